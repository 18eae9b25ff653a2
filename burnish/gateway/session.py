"""`AgentSession`: the model calls of one episode of an agent, from the request to the recorded tokens.

A session lives in the event loop of the endpoint. It places each call in its token tree, asks the runner for samples, records what was
sampled, and answers. The runner samples in a thread of its own: a `SampleRequest` goes there through `submit` and comes back through
`complete`, which any thread may call.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from burnish.config.errors import UserError
from burnish.core.pictures import PictureSpan, distinct_tokens
from burnish.gateway.calls import CallAnswer, CallChoice, Json, ModelCall, continued
from burnish.gateway.chat_messages import answer_message
from burnish.gateway.completion_text import stop_position
from burnish.gateway.message_keys import CallRefused
from burnish.gateway.openai_schema import ApiError
from burnish.gateway.session_renderer import SessionRenderer
from burnish.gateway.token_tree import CallPrompt, SessionTree

MAX_OPEN_SAMPLES = 1024
"""Samples of one session that may be under way at once. More than any agent uses; a flood of calls is told to wait."""
MAX_OPEN_BYTES = 64 << 20
"""Bytes of the requests of one session that may be under way at once. A single larger request is taken."""
RETRY_AFTER_S = 1
GONE = 410
"""Status of a call after the end of its session. Clients do not try it again, as they would after 409."""


@dataclass(frozen=True)
class SessionLimits:
    """What an agent may ask of the model in one episode."""

    max_calls: int
    """Model calls of one episode."""
    max_tokens: int
    """New tokens of one sample."""
    longest: int | None = None
    """Tokens of a prompt and its answer together; None without a limit."""


@dataclass(frozen=True)
class Sampled:
    """What the engine sampled."""

    tokens: list[int]
    logp: list[float]
    version: list[int]
    """Version of the weights that sampled each token."""
    finish: Literal["stop", "length"]


@dataclass(eq=False)
class SampleRequest:
    """One sample that a session wants."""

    session: AgentSession
    tokens: tuple[int, ...]
    max_tokens: int
    stop: tuple[str, ...]
    stop_tokens: tuple[int, ...]
    """Besides the run's own."""
    key_parts: tuple[int, ...]
    """What distinguishes its random numbers from those of the session's other samples. It does not depend on the order of calls."""
    pictures: tuple[PictureSpan, ...] = ()
    """The images of the prompt, in order."""
    result: asyncio.Future[Sampled] = field(init=False)

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.result = self._loop.create_future()

    @property
    def is_wanted(self) -> bool:
        """Whether the session still waits for it."""
        return not self.result.done()

    def complete(self, sampled: Sampled) -> None:
        """Hand over the sample. Any thread may call it."""
        self._loop.call_soon_threadsafe(self._set, sampled)

    def _set(self, sampled: Sampled) -> None:
        if not self.result.done():
            self.result.set_result(sampled)


@dataclass(eq=False)
class _RunningCall:
    """A call that was answered or is under way."""

    task: asyncio.Task[CallAnswer] | None = None
    num_clients: int = 0
    """Connections that wait for it. A client that left may come back."""

    @property
    def has_failed(self) -> bool:
        task = self.task
        return task is not None and task.done() and (task.cancelled() or task.exception() is not None)


class SessionSpent(Exception):
    """The session has made all calls that it may. The agent gets an answer that says so; it is not recorded."""


class AgentSession:
    """The model calls of one episode. All methods run in the endpoint's event loop."""

    def __init__(
        self,
        name: str,
        root_url: str,
        renderer: SessionRenderer,
        limits: SessionLimits,
        submit: Callable[[SampleRequest], None],
    ) -> None:
        self.name, self.limits = name, limits
        self.id, self.api_key = secrets.token_hex(8), f"sk-{secrets.token_urlsafe(24)}"
        self.base_url = f"{root_url}/s/{self.id}/v1"
        self.tree = SessionTree(renderer)
        self.counts: Counter[str] = Counter()
        """What happened besides calls that were answered: refusals, calls after the end, disconnects."""
        self.finish: Literal["turns", "length"] | None = None
        """The limit that the agent ran into."""
        self.num_rewards = 0
        """Rewards of single answers that the agent gave, zeros included."""
        self._last_active: float | None = None
        self.is_ended = False
        self._submit = submit
        self._tokenizer = renderer.tokenizer
        self._num_calls = 0
        self._num_open_calls, self._open_bytes = 0, 0
        self._waiting: set[SampleRequest] = set()
        self._repeats: Counter[tuple[int, ...]] = Counter()
        self._calls: dict[str, tuple[ModelCall, Json]] = {}
        """By the id of the answer: calls that a later one may name as its history, and the answer as templates read it."""
        self._answers: dict[bytes, _RunningCall] = {}
        """By retry key: calls that were answered or are under way."""

    # --- calls -----------------------------------------------------------------------------------------------------------

    async def answer(
        self, call: ModelCall, digest: bytes, num_bytes: int, retry_key: str | None, is_retry: bool
    ) -> CallAnswer:
        """Answer a call. A client that tries a call again gets the answer of the first try, finished or under way.

        `digest` is that of the request, which had `num_bytes`.
        The call runs to its end even if the client leaves: its tokens are sampled, and the client may come back for them.
        """
        self._check_open()
        key = retry_key.encode() if retry_key is not None else digest
        running = self._answers.get(key) if is_retry or retry_key is not None else None
        if running is None or running.has_failed:
            self._check_room(call.n, num_bytes)
            running = self._answers[key] = _RunningCall()
            running.task = asyncio.create_task(self._answer(call, running))
            running.task.add_done_callback(partial(self._forget_failure, key, running, num_bytes))
            self._num_open_calls += 1
            self._open_bytes += num_bytes
        else:
            self.counts["client_retries"] += 1
        assert running.task is not None
        running.num_clients += 1
        try:
            return await asyncio.shield(running.task)
        finally:
            running.num_clients -= 1

    def _check_room(self, num_samples: int, num_bytes: int) -> None:
        """Refuse a call if the session has too much under way. Clients wait and try again."""
        num_open = max(self._num_open_calls, len(self._waiting))
        is_full = num_open > 0 and (
            num_open + num_samples > MAX_OPEN_SAMPLES or self._open_bytes + num_bytes > MAX_OPEN_BYTES
        )
        if is_full:
            self.counts["calls_refused_busy"] += 1
            raise ApiError(
                429,
                f"this session has {num_open} samples and {self._open_bytes} bytes of requests under way; it may have {MAX_OPEN_SAMPLES} "
                f"and {MAX_OPEN_BYTES}. Wait for answers before the next call",
                code="too_many_calls",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )

    def _forget_failure(
        self, key: bytes, running: _RunningCall, num_bytes: int, task: asyncio.Task[CallAnswer]
    ) -> None:
        """A call has ended. One that failed is not kept: an agent may be refused any number of times."""
        self._num_open_calls -= 1
        self._open_bytes -= num_bytes
        has_failed = task.cancelled() or task.exception() is not None  # read, so that it is not reported as lost
        if has_failed and self._answers.get(key) is running:
            del self._answers[key]

    async def _answer(self, call: ModelCall, running: _RunningCall) -> CallAnswer:
        limits = self.limits
        if self._num_calls >= limits.max_calls:
            self.finish = "turns"
            self.counts["calls_past_limit"] += 1
            raise SessionSpent(f"this episode has made all {limits.max_calls} model calls that it may")
        call = self._with_history(call)
        prompt = self._placed(call)
        room = limits.max_tokens if limits.longest is None else limits.longest - len(prompt.tokens)
        if room < 1:
            self.finish = "length"
            self.counts["too_long"] += 1
            raise ApiError(
                400,
                f"the prompt has {len(prompt.tokens)} tokens; an episode of this run has room for {limits.longest} with the answer",
                param="messages",
                code="context_length_exceeded",
            )
        self._num_calls += 1
        max_tokens = min(limits.max_tokens, room, call.max_tokens or limits.max_tokens)
        samples = self._requests(call, prompt, max_tokens)
        self._waiting.update(samples)
        try:
            for sample in samples:
                self._submit(sample)
            sampled = await asyncio.gather(*(sample.result for sample in samples))
        finally:
            self._waiting.difference_update(samples)
            self._last_active = time.monotonic()
        name = secrets.token_hex(12)
        choices = [self._recorded(call, prompt, one, name, is_cut=not running.num_clients) for one in sampled]
        if call.is_stored and call.messages is not None and choices:
            self._calls[name] = call, answer_message(choices[0].message)
        return CallAnswer(name, int(time.time()), tuple(choices), prompt.tokens)

    def count_tokens(self, call: ModelCall) -> int:
        """Return the length of the prompt that a call would have. It leaves no trace in the tree."""
        self._check_open()
        scratch = SessionTree(self.tree.renderer)
        return len(self._place_in(scratch, self._with_history(call)).tokens)

    def _with_history(self, call: ModelCall) -> ModelCall:
        """Put the messages before a call that the client left to the server to remember."""
        if call.previous_id is None:
            return call
        found = self._calls.get(bare_id(call.previous_id))
        if found is None:
            message = f"there is no response {call.previous_id!r} in this session"
            raise ApiError(400, message, param="previous_response_id", code="previous_response_not_found")
        return continued(call, *found)

    def _placed(self, call: ModelCall) -> CallPrompt:
        """Place a call in the tree. What no engine can read is refused here: there, it would end the run."""
        try:
            size = self._tokenizer.vocab_size
            if unknown := [token for token in call.token_ids or () if not 0 <= token < size]:
                raise CallRefused(
                    f"token {unknown[0]} is not one of the model's, 0 to {size - 1}", code="invalid_value"
                )
            prompt = self._place_in(self.tree, call)
            if not prompt.tokens:
                raise CallRefused("the prompt has no tokens", code="invalid_value")
            return prompt
        except CallRefused as error:
            self.counts["calls_refused"] += 1
            raise ApiError(400, str(error), param=error.param, code=error.code) from error

    @staticmethod
    def _place_in(tree: SessionTree, call: ModelCall) -> CallPrompt:
        if call.messages is not None:
            return tree.place(call.messages, call.tools, call.template_variables, call.token_ids)
        if call.token_ids is not None:
            return tree.place_tokens(call.token_ids)
        assert call.text is not None, "a call has messages, a text or token ids"
        return tree.place_text(call.text)

    def _requests(self, call: ModelCall, prompt: CallPrompt, max_tokens: int) -> list[SampleRequest]:
        read = distinct_tokens(prompt.tokens, prompt.pictures)
        digest = hashlib.blake2b(array("q", read).tobytes(), digest_size=8).digest()
        place = int.from_bytes(digest, "little")
        seed = () if call.seed is None else (call.seed,)
        repeat = self._repeats[place, *seed]
        self._repeats[place, *seed] += 1
        found = []
        for index in range(call.n):
            parts = (place, repeat, index, *seed)
            found.append(
                SampleRequest(self, prompt.tokens, max_tokens, call.stop, call.stop_tokens, parts, prompt.pictures)
            )
        return found

    def _recorded(self, call: ModelCall, prompt: CallPrompt, sampled: Sampled, name: str, is_cut: bool) -> CallChoice:
        message = self.tree.record(
            prompt,
            sampled.tokens,
            sampled.logp,
            sampled.version,
            finish=sampled.finish,
            response_id=name,
            is_cut=is_cut,
            stops=call.stop,
            stop_tokens=call.stop_tokens,
            agent=call.agent,
        )
        has_calls = bool(message.get("tool_calls"))
        pieces = tuple(self._tokenizer.pieces(sampled.tokens, skip_special=False)) if call.logprobs else ()
        finish = "tool_calls" if has_calls else sampled.finish
        return CallChoice(
            dict(message),
            finish,
            self._stop_string(call.stop, sampled.tokens) if finish == "stop" else None,
            tuple(sampled.tokens),
            tuple(sampled.logp),
            pieces,
        )

    def _stop_string(self, stops: tuple[str, ...], tokens: list[int]) -> str | None:
        """Return the stop string that ended a sample; None if an end token did."""
        if not stops:
            return None
        text = self._tokenizer.decode(tokens)
        at = stop_position(text, stops)
        return None if at is None else next(stop for stop in stops if text.startswith(stop, at))

    # --- the life of a session ---------------------------------------------------------------------------------------------

    @property
    def num_calls(self) -> int:
        return self._num_calls

    def begin(self) -> None:
        """The agent starts now."""
        self._last_active = time.monotonic()

    @property
    def idle_s(self) -> float:
        """How long the agent has neither ended nor waited for the model; 0 before it starts."""
        return 0.0 if self._last_active is None or self._waiting else time.monotonic() - self._last_active

    def reward(self, response_id: str, value: float) -> None:
        """Give one answer a reward. It may carry the prefix of its protocol, as clients got it."""
        self._check_open()
        try:
            self.tree.reward(bare_id(response_id), value)
        except UserError as error:
            raise ApiError(400, str(error), code="invalid_value") from error
        self.num_rewards += 1

    def reward_last(self, value: float) -> None:
        """Give the last answer of the session a reward."""
        self._check_open()
        if not self.tree.answers:
            raise ApiError(400, "X-Reward: the session has no answer to reward yet", code="invalid_value")
        self.tree.answers[-1].reward += value
        self.num_rewards += 1

    def end(self) -> None:
        """End the session: calls under way fail, and later ones are refused. A second call does nothing."""
        self.is_ended = True
        for sample in list(self._waiting):
            if not sample.result.done():
                sample.result.set_exception(_ended())

    def _check_open(self) -> None:
        if self.is_ended:
            self.counts["calls_after_end"] += 1
            raise _ended()


def bare_id(response_id: str) -> str:
    """Return the id of an answer without the prefix of its protocol, such as `chatcmpl-`."""
    return re.split("[-_]", response_id)[-1]


def _ended() -> ApiError:
    return ApiError(GONE, "this session has ended: its episode is over", code="session_ended")
