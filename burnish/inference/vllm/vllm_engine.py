"""vLLM in this process, behind the engine's protocol: token ids in and out, weights from the learner's tensors.

The engine is built on the policy's config with no weights, and takes them by `load`; where adapters alone are trained, on the
weights below, and `load` is of the adapters. Prompts that begin alike share their
cache, which is emptied with every load. Stop strings are looked for here, with the policy's own tokenizer.

Randomness: a request's noise is vLLM's, seeded by its key and what was drawn before. The same request gives the same tokens
again; what runs beside it matters as far as it changes the rounding of vLLM's logits. A request that is aborted and
continued draws other tokens than one that was not.
"""

from __future__ import annotations

import shutil
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from burnish.config.engines import Vllm
from burnish.config.errors import UserError
from burnish.core.engine import Completion, Finish, Request
from burnish.inference.vllm.library import BASE, arguments, find_library, start, stop
from burnish.inference.vllm.server_protocol import PROBE, check, check_probe, needs_scoring, sampling, scoring
from burnish.inference.vllm.vllm_weights import Update, refresh_tied, verify, write_adapter
from burnish.inference.weight_sync.publisher import probe
from burnish.models.policy import PolicyModel

# --- A request that vLLM works on, and what it has produced.

TEXT_TAIL = 8
"""Tokens that show no text, which a stop string may span besides one for each of its bytes."""


@dataclass
class Row:
    """Tokens as they come; ended when `finish` is set, complete when nothing is scored any more."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    raw_logp: list[float] | None = None
    """Where they are another distribution's and have been computed."""
    finish: Finish | None = None

    def extend(
        self, tokens: Sequence[int], logp: Sequence[float], decode: Callable[[list[int]], str] | None
    ) -> list[int]:
        """Take what was drawn, up to a stop string; returns the tokens that were taken."""
        stop, before = self.request.sampling.stop, len(self.tokens)
        for token, value in zip(tokens, logp, strict=True):
            self.tokens.append(token)
            self.logp.append(value)
            if stop and self._ends_with(stop, decode):
                self.finish = "stop"
                break
        return self.tokens[before:]

    def _ends_with(self, stop: Sequence[str], decode: Callable[[list[int]], str] | None) -> bool:
        assert decode is not None, "checked when the request was submitted"
        tail = max(len(text.encode()) for text in stop) + TEXT_TAIL
        text = decode(self.tokens[-tail:])
        return any(s in text for s in stop)

    def completion(self, version: int) -> Completion:
        """What it has."""
        raw = None
        if self.request.sampling.raw_logprobs:
            raw = np.array(self.logp if self.raw_logp is None else self.raw_logp, dtype=np.float32)
        return Completion(
            self.request.id,
            np.array(self.tokens, dtype=np.int64),
            np.array(self.logp, dtype=np.float32),
            self.finish or "aborted",
            version,
            raw_logp=raw,
        )


FINISHES: dict[str, Finish] = {"stop": "stop", "length": "length"}
DRAW, SCORE = "draw ", "score "
"""What a request of vLLM's is for, before its id."""


class VllmEngine:
    """Samples from a copy of the policy. `listener(request_id, token)` hears every token as it is drawn.

    A process has one at a time: the one before is closed.
    """

    _latest: ClassVar[weakref.ref[VllmEngine] | None] = None

    def __init__(
        self,
        policy: PolicyModel,
        options: Vllm,
        max_rows: int = 256,
        cache_gib: float | None = None,
        listener: Callable[[str, int], None] | None = None,
    ) -> None:
        library = find_library()
        before = None if VllmEngine._latest is None else VllmEngine._latest()
        if before is not None:
            before.close()
        self.policy, self.library, self.listener, self.decode = policy, library, listener, policy.tokenizer.decode
        self.update = Update(policy, adapters=policy.lora is not None)
        self.version = 0
        self.ready: deque[Completion] = deque()  # finished, not handed over yet
        self._rows: dict[str, Row] = {}
        self._folder = TemporaryDirectory(prefix="burnish-vllm-")
        self._adapter: Any = None
        self._num_loads = 0
        self._weights: Literal["none", "part", "all"] = "none"
        self._interrupted = self._asleep = False
        folder = Path(self._folder.name)
        self.llm = start(library, arguments(policy, options, max_rows, cache_gib, folder, library.can_sleep))
        shutil.rmtree(folder / BASE, ignore_errors=True)  # it is read
        config = self.llm.model_config
        self.vocab, self.positions = int(config.get_vocab_size()), int(config.max_model_len)
        self._closing = weakref.finalize(self, stop, self.llm)
        VllmEngine._latest = weakref.ref(self)
        self._try()

    def close(self) -> None:
        """Give everything back; the engine is of no more use."""
        self._closing()

    # --- the Engine protocol -----------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        known = self._rows.keys() | {completion.id for completion in self.ready}
        check(requests, known, self.vocab, self.positions)
        if not self._closing.alive:
            raise RuntimeError("this vLLM engine is closed: a process has one at a time, and another was started")
        if self._weights != "all":
            self.load(self.version, ())
        self.wake()
        for request in requests:
            self._rows[request.id] = Row(request)
            self._add(DRAW + request.id, request.tokens, sampling(request), -request.priority)

    def stream(self) -> Iterator[Completion]:
        while self.ready or (self._rows and not self._interrupted):
            if not self.ready:
                self._step()
            while self.ready:
                yield self.ready.popleft()
        self._interrupted = False

    def interrupt(self) -> None:
        self._interrupted = True

    def abort(self, ids: Iterable[str], keep: bool) -> list[Completion]:
        wanted = set(ids)
        unknown = wanted - self._rows.keys() - {completion.id for completion in self.ready}
        if unknown:
            raise KeyError(f"cannot abort requests that are not running: {sorted(unknown)[:3]}")
        stopped = [row for name, row in self._rows.items() if name in wanted]
        drawing = [row for row in stopped if row.finish is None]
        self.llm.abort_request([DRAW + row.request.id for row in drawing])
        if keep:
            for row in drawing:
                row.finish = "aborted"
                self._end(row)
            while wanted & self._rows.keys():  # the others go on meanwhile
                self._step()
        else:
            self.llm.abort_request([SCORE + row.request.id for row in stopped if row.finish is not None])
            for row in stopped:
                del self._rows[row.request.id]
        kept = [completion for completion in self.ready if completion.id in wanted]
        self.ready = deque(completion for completion in self.ready if completion.id not in wanted)
        return kept if keep else []

    def load(self, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        if self._rows:
            raise RuntimeError(
                f"new weights while {len(self._rows)} rows are running: their cache would be stale; finish or abort first"
            )
        if self._weights == "part":
            raise RuntimeError(
                "new weights reached vLLM only in part, and it can take no others: start the engine again"
            )
        self.wake()
        self._weights = "part"
        tensors = self.update.tensors(named_tensors)
        if self.update.adapters:
            self._load_adapter(tensors)
        else:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
            self.llm.apply_model(refresh_tied)
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(
                "vLLM did not empty its prefix cache after new weights: it would go on with keys of the old ones"
            )
        self.version = version
        if self.update.is_own and self.policy.part.count == 1:
            self._verify()
        self._weights = "all"

    def sleep(self) -> None:
        """On a GPU the cache is given up and the weights wait in host memory; on a CPU vLLM cannot, and nothing happens."""
        if self._rows:
            raise RuntimeError(f"the engine cannot sleep with {len(self._rows)} requests unfinished")
        if self.library.can_sleep and not self._asleep:
            self.llm.sleep(level=1)
            self._asleep = True

    def wake(self) -> None:
        if self._asleep:
            self.llm.wake_up()
            self._asleep = False

    # --- vLLM ----------------------------------------------------------------------------------------------------------

    def _add(self, name: str, tokens: Sequence[int], options: dict[str, Any], priority: int) -> None:
        prompt = self.library.TokensPrompt(prompt_token_ids=list(tokens))
        renderer = getattr(self.llm, "renderer", None)
        if renderer is not None:  # newer versions want what it makes of a prompt
            (prompt,) = renderer.render_cmpl([prompt])
        params = self.library.SamplingParams(**options, detokenize=False, output_kind=self.library.delta)
        self.llm.add_request(name, prompt, params, priority=priority, lora_request=self._adapter)

    def _step(self) -> None:
        """One step of everything that runs; what is complete goes to `ready`."""
        for output in self.llm.step():
            kind, name = output.request_id.split(" ", 1)
            row = self._rows.get(name)
            if row is None:
                continue  # it was aborted in this very step
            if kind + " " == SCORE:
                row.raw_logp = raw_logprobs(output, row.request, row.tokens)
                self._complete(row)
            elif row.finish is None:
                self._take(row, output.outputs[0])

    def _take(self, row: Row, drawn: Any) -> None:
        taken = row.extend(list(drawn.token_ids), logprobs(drawn), self.decode)
        if self.listener is not None:
            for token in taken:
                self.listener(row.request.id, token)
        if row.finish is not None:
            if drawn.finish_reason is None:
                self.llm.abort_request([DRAW + row.request.id])
        elif drawn.finish_reason is not None:
            if drawn.finish_reason not in FINISHES:
                raise RuntimeError(f"vLLM ended request {row.request.id} with {drawn.finish_reason!r}")
            row.finish = FINISHES[drawn.finish_reason]
        if row.finish is not None:
            self._end(row)

    def _end(self, row: Row) -> None:
        """It draws no more: its raw log-probs are computed where they are others, else it is complete."""
        if row.tokens and needs_scoring(row.request.sampling):
            *before, last = (*row.request.tokens, *row.tokens)
            self._add(SCORE + row.request.id, before, scoring(last), -row.request.priority)
        else:
            self._complete(row)

    def _complete(self, row: Row) -> None:
        del self._rows[row.request.id]
        self.ready.append(row.completion(self.version))

    def _load_adapter(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._num_loads += 1
        folder = Path(self._folder.name) / "adapter"
        write_adapter(folder, self.policy, tensors)
        adapter = self.library.LoRARequest(f"policy-{self._num_loads}", self._num_loads, str(folder))
        if self._adapter is not None:
            self.llm.remove_lora(self._adapter.lora_int_id)
        if not self.llm.add_lora(adapter):
            raise RuntimeError(f"vLLM {self.library.version} did not take the adapter in {folder}")
        self._adapter = adapter

    def _verify(self) -> None:
        asked = probe(self.vocab, self.positions)
        self._rows[asked.id] = Row(asked)
        self._add(DRAW + asked.id, asked.tokens, sampling(asked), 0)
        while self._rows:
            self._step()
        dtype = str(self.llm.model_config.dtype).removeprefix("torch.")
        verify(self.policy, asked, self.ready.pop(), dtype, f"vLLM {self.library.version}")

    def _try(self) -> None:
        """One token: what vLLM cannot run, it finds out at its first step."""
        self._add("probe", PROBE.tokens, sampling(PROBE), 0)
        logp: list[float] = []
        try:
            while self.llm.has_unfinished_requests():
                for output in self.llm.step():
                    logp += logprobs(output.outputs[0])
        except (RuntimeError, NotImplementedError, ValueError) as error:
            raise UserError(
                f"vLLM {self.library.version} cannot run this model: {error}; try rollout.engine=native, or another version of vLLM"
            ) from error
        check_probe(logp, f"vLLM {self.library.version}")


def logprobs(drawn: Any) -> list[float]:
    """The log-prob of each token that was drawn."""
    return [float(at[token].logprob) for at, token in zip(drawn.logprobs or [], drawn.token_ids, strict=True)]


def raw_logprobs(output: Any, request: Request, tokens: Sequence[int]) -> list[float]:
    """The model's own log-probs of a completion's tokens, from a pass that had all but the last in its prompt."""
    inside = zip(output.prompt_logprobs[len(request.tokens) :], tokens, strict=False)
    return [float(at[token].logprob) for at, token in inside] + [
        float(output.outputs[0].logprobs[0][tokens[-1]].logprob)
    ]
