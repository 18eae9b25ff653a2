"""What every protocol does: parse a request, and write the answer, errors and streams in its own form.

A protocol has no state. The endpoint samples a whole answer and then writes it, also where the client asked for a stream: token ids
and log-probs are recorded from the engine, and streamed text would say nothing new.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from burnish.gateway.calls import CallAnswer, CallChoice, ModelCall
from burnish.gateway.chat_messages import RESERVED_VARIABLES
from burnish.gateway.openai_schema import MAX_N, MAX_NAME, MAX_STOP_LENGTH, ApiError, bad_value
from burnish.gateway.protocols.fields import Fields, Json

AGENT_HEADER = "x-burnish-agent"
"""Header that names the sub-agent, for protocols and clients without `metadata.agent`."""
KEEP_ALIVE = ": keep-alive\n\n"
"""A comment of server-sent events, which clients skip. It keeps a connection open while a long answer is sampled."""
SSE_DONE = "data: [DONE]\n\n"
MAX_STOPS = 32
"""Most stop strings. Agent frameworks send more than the four that OpenAI allows."""
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "min_tokens")
PENALTIES = ("frequency_penalty", "presence_penalty")
ONE_LOGPROB = "the run records the log-prob of the sampled token alone, not those of alternatives"
NO_GRAMMAR = "tokens are sampled freely, so JSON could not be promised; ask for it in the prompt"
TEXT_ONLY = "the model reads only text, and in messages of users and tools images"


class CallProtocol(ABC):
    """One API that agents speak."""

    path: str
    """The path of its requests below the base URL of the protocol's clients."""
    count_path: str | None = None
    """The path of requests that only count the tokens of a prompt, with the same body."""

    @abstractmethod
    def parse(self, body: bytes | bytearray, headers: Mapping[str, str]) -> ModelCall:
        """The call in a request; an `ApiError` if it is invalid, with status 400 unless a client expects another. Names of headers are in
        lower case."""

    @abstractmethod
    def whole(self, call: ModelCall, answer: CallAnswer) -> Json:
        """The JSON body of an answer."""

    @abstractmethod
    def events(self, call: ModelCall, answer: CallAnswer) -> Iterator[str]:
        """The answer to a call with `is_stream`, as server-sent events."""

    def token_count(self, num_tokens: int) -> Json:
        """The JSON body of the answer at `count_path`."""
        raise NotImplementedError(f"{self.path} has no count_path")

    def error(self, error: ApiError) -> tuple[int, Json]:
        """Status and JSON body of an error."""
        return error.status, error.body()

    def error_event(self, error: ApiError) -> str:
        """An error after the start of a stream, whose status was sent already."""
        return sse(self.error(error)[1])

    def stopped(self, call: ModelCall, answer_id: str, created: int, reason: str) -> CallAnswer:
        """An answer to a call that is not sampled, because the budget of its session is spent.

        It is a plain message with text. Agents tried again for ever after an empty answer and after an error.
        """
        choice = CallChoice({"role": "assistant", "content": reason or "The session has ended."}, "stop")
        return CallAnswer(answer_id, created, (choice,) * call.n)


def api_key(headers: Mapping[str, str]) -> str | None:
    """The key that a client sent: a bearer token, or Anthropic's `x-api-key`."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key", "").strip() or None


def sse(value: Json, event: str | None = None) -> str:
    """A server-sent event. It is ASCII: some clients end a line at U+2028, which JSON leaves as it is."""
    data = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return f"data: {data}\n\n" if event is None else f"event: {event}\ndata: {data}\n\n"


# --- fields that several protocols share -----------------------------------------------------------------------------


def common_fields(body: Fields, headers: Mapping[str, str]) -> Json:
    """The fields of a `ModelCall` that mean the same in each protocol."""
    metadata = body.child("metadata")
    agent = metadata.values.get("agent") if metadata is not None else None
    if agent is not None and (not isinstance(agent, str) or len(agent) > MAX_NAME):
        raise bad_value("metadata.agent", f"expected a text of {MAX_NAME} characters at most")
    if agent is None:
        agent = headers.get(AGENT_HEADER, "")[:MAX_NAME] or None
    return {
        "model": body.text("model", MAX_NAME) or "default",
        "agent": agent,
        "is_stream": body.flag("stream"),
        "wants_token_ids": body.flag("return_token_ids"),
    }


def template_variables(body: Fields) -> Json:
    """Variables of the chat template (`chat_template_kwargs`, as vLLM has it)."""
    found = body.free_object("chat_template_kwargs")
    if reserved := next((name for name in found if name in RESERVED_VARIABLES), None):
        raise body.error("chat_template_kwargs", f"{reserved} is set by the server")
    if body.flag("continue_final_message") or body.values.get("add_generation_prompt") is False:
        name = "continue_final_message" if body.flag("continue_final_message") else "add_generation_prompt"
        raise body.error(name, "an answer always begins a new message of the assistant", "unsupported_parameter")
    return found


def overridden_fields(body: Fields, *others: str) -> Json:
    """What the client asked for and does not get. Penalties and alternatives of 0 have no effect and are left out."""
    for name in (*SAMPLING_FIELDS, *PENALTIES):
        body.number(name)
    effective = [name for name in (*PENALTIES, "top_logprobs") if body.values.get(name)]
    found = body.recorded(*SAMPLING_FIELDS, *effective, *others)
    if body.values.get("parallel_tool_calls") is False:
        found["parallel_tool_calls"] = False
    return found


def openai_sampling(body: Fields) -> Json:
    """`n`, `seed` and `stop` of OpenAI's chats and completions, and the options of a stream."""
    options = body.child("stream_options")
    return {
        "n": body.integer("n", 1, MAX_N) or 1,
        "seed": body.integer("seed", -(2**63)),
        "stop": body.texts("stop", MAX_STOPS, MAX_STOP_LENGTH, "stop strings"),
        "includes_usage": options is not None and options.flag("include_usage"),
    }


def reasoning_of(choice: CallChoice) -> str | None:
    """The reasoning of a choice; None without any."""
    return choice.message.get("reasoning_content") or None


def plain_finish(choice: CallChoice) -> str:
    """The finish of a choice in protocols without tool calls, whose clients read them from the tokens or the text."""
    return "stop" if choice.finish == "tool_calls" else choice.finish


def logprob_entry(piece: str, logp: float) -> Json:
    """A sampled token in OpenAI's form."""
    return {"token": piece, "logprob": logp, "bytes": list(piece.encode()), "top_logprobs": []}


def token_names(choice: CallChoice) -> list[str]:
    """The text of each sampled token; `token_id:N`, as vLLM writes it, where the texts are not known."""
    return list(choice.pieces) if choice.pieces else [f"token_id:{token}" for token in choice.tokens]


def usage(answer: CallAnswer) -> Json:
    """Numbers of tokens as OpenAI's chats and completions count them: n samples of a prompt count it once."""
    num_prompt, num_sampled = len(answer.prompt_tokens), answer.num_sampled
    return {"prompt_tokens": num_prompt, "completion_tokens": num_sampled, "total_tokens": num_prompt + num_sampled}


def strategy_field(answer: CallAnswer) -> Json:
    """The object `strategy` of an answer that a strategy chose; nothing for an ordinary answer."""
    return {} if answer.strategy is None else {"strategy": dict(answer.strategy)}


def with_limit(body: Fields, *names: str) -> int | None:
    """Most new tokens, from the first of the fields that is there."""
    limits: list[Any] = [body.integer(name, 1) for name in names]
    return next((limit for limit in limits if limit is not None), None)
