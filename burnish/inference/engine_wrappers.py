"""An engine with one known fault, for tests and study of the gap between what samples and what is trained.

`MismatchEngine` makes an engine on weights of its own where the fault is in the weights (noise, stale, quantised,
never_loaded), changes what it is asked for (temperature, extra_bos, truncated), or changes what comes back (reencoded, and
log-probs that are reported wrong). What was really drawn, and how likely it was, stays known: `Faulty.drawn` and `.drawn_logp`.
Everything random is a function of the fault's seed and the requests' keys, so a run repeats bit for bit.

    engine = MismatchEngine(NativeEngine, decoder, NoiseFault(scale=0.02))
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from burnish.config.engines import (
    ExtraBosFault,
    Mismatch,
    NeverLoadedFault,
    NoiseFault,
    QuantisedFault,
    ReencodedFault,
    StaleFault,
    TemperatureFault,
    TruncatedFault,
)
from burnish.config.errors import UserError
from burnish.core.engine import Completion, Engine, Request
from burnish.core.random_keys import fold
from burnish.models.nf4 import quantised_weights
from burnish.models.tokenizer import Tokenizer
from burnish.run.checkpoint.saver import TensorStaging
from burnish.run.checkpoint.snapshot import Content, TensorFile
from burnish.training.forward import PolicyForward
from burnish.training.sharded_checkpoint import StoredTensors

Module = TypeVar("Module", bound=nn.Module)
Weights = dict[str, Tensor]
CHECKPOINT_FILE = "engine"


@dataclass
class FaultyCompletion(Completion):
    """What the engine says of a request, and the truth of it."""

    drawn: np.ndarray  # int64, the tokens the engine sampled
    drawn_logp: np.ndarray  # float32, under the distribution each was sampled from


# --- weights -------------------------------------------------------------------------------------------------------------


def add_noise(name: str, weight: Tensor, scale: float, seed: int) -> Tensor:
    """w + scale rms(w) z: z is normal, of the seed and the tensor's name alone, so that it is the same after every load."""
    generator = torch.Generator().manual_seed(fold("mismatch", seed, name))
    wide = _at_least_float32(weight)
    z = torch.randn(weight.shape, generator=generator).to(wide)
    return (wide + scale * wide.square().mean().sqrt() * z).to(weight.dtype)


def round_weight(weight: Tensor, kind: str) -> Tensor:
    """A weight as bf16 or int8 holds it, in its own type; int8 has a scale for each row of a matrix and leaves vectors."""
    if kind == "bf16":
        return weight.to(torch.bfloat16).to(weight.dtype)
    if weight.dim() != 2:
        return weight
    wide = _at_least_float32(weight)
    step = wide.abs().amax(1, keepdim=True) / 127
    step = torch.where(step > 0, step, torch.ones_like(step))  # a row of zeros stays one
    return ((wide / step).round() * step).to(weight.dtype)


def _at_least_float32(weight: Tensor) -> Tensor:
    return weight.to(torch.promote_types(weight.dtype, torch.float32))


def _copy_weights(weights: Mapping[str, Tensor]) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in weights.items()}


# --- completions ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def completion_logprobs(module: nn.Module, prompt: Sequence[int], tokens: np.ndarray, temperature: float) -> np.ndarray:
    """float32 log-probs of tokens after a prompt, under the module's whole distribution (no top-k, no top-p)."""
    if not len(tokens):
        return np.empty(0, dtype=np.float32)
    device = next(module.parameters()).device
    packed = torch.tensor([*prompt, *tokens.tolist()], device=device)
    offsets = torch.tensor([0, len(packed)], device=device)
    wanted = torch.arange(len(prompt), len(packed), device=device)
    logp, _ = cast(PolicyForward, module).token_logprobs(packed, offsets, wanted, temperature)
    return logp.float().cpu().numpy()


def reencode(tokenizer: Tokenizer, request: Request, completion: Completion) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a completion's text, and the log-probs of the drawn tokens, paired with them by position."""
    drawn = completion.tokens.tolist()
    end = drawn[-1:] if drawn and drawn[-1] in request.sampling.stop_tokens else []
    body = tokenizer.encode(tokenizer.decode(drawn[: len(drawn) - len(end)]))
    tokens = np.array([*body, *end], dtype=np.int64)
    logp = np.zeros(len(tokens), dtype=np.float32)
    shared = min(len(tokens), len(drawn))
    logp[:shared] = completion.logp[:shared]
    return tokens, logp


# --- the engine ----------------------------------------------------------------------------------------------------------


class MismatchEngine:
    """An engine of `make_engine` with a fault. `policy` is the module that is trained; the engine is made on it, or on a
    copy of it that follows it at every `load` in the fault's way. `reencoded` needs the tokenizer."""

    def __init__(
        self,
        make_engine: Callable[[Module], Engine],
        policy: Module,
        fault: Mismatch,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        if isinstance(fault, ReencodedFault) and tokenizer is None:
            raise UserError("a mismatch engine that re-encodes text needs a tokenizer")
        if isinstance(fault, NoiseFault | QuantisedFault) and quantised_weights(policy):
            raise UserError(
                f"rollout.mismatch={fault.name} changes weights that are plain numbers, and the policy's layers are in 4 bits: "
                "use another fault, or an adapter over plain weights (model.lora.base=dtype)"
            )
        self.policy: nn.Module = policy
        self.fault, self.tokenizer = fault, tokenizer
        own = isinstance(fault, NoiseFault | StaleFault | QuantisedFault | NeverLoadedFault)
        sampler = copy.deepcopy(policy).requires_grad_(False) if own else policy
        self.sampler: nn.Module = sampler
        """The module that samples."""
        self._asked: dict[str, Request] = {}  # unfinished requests, as they were submitted
        self._history: list[tuple[int, Weights]] = []  # of a stale engine, oldest first, with their versions
        if isinstance(fault, StaleFault):
            self._history = [(0, _copy_weights(dict(policy.named_parameters())))]
        self._write(self._faulty(dict(policy.named_parameters())))
        self.engine = make_engine(sampler)  # on the weights it shall have: an engine may take a copy of them

    # --- the Engine protocol ---------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        self.engine.submit([self._request(r) for r in requests])
        self._asked.update((r.id, r) for r in requests)

    def stream(self) -> Iterator[FaultyCompletion]:
        for completion in self.engine.stream():
            yield self._completion(completion)

    def interrupt(self) -> None:
        self.engine.interrupt()

    def abort(self, ids: Iterable[str], keep: bool) -> list[Completion]:
        # Only what comes back was stopped: an engine may be unable to, and then the completion is still to come.
        stopped: list[Completion] = [self._completion(c) for c in self.engine.abort(ids, keep=True)]
        return stopped if keep else []

    def load(self, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """The policy's weights, or those sent, in the fault's way. The version is that of the weights that sample, except
        where they never arrive and the engine knows nothing of it."""
        sent = dict(named_tensors)
        weights = dict(self.policy.named_parameters()) | sent
        history = self._history
        if isinstance(self.fault, StaleFault):
            # The newest version loaded again (a run that resumes) is no new load.
            older = [entry for entry in history if entry[0] != version]
            history = [*older, (version, _copy_weights(weights))][-1 - self.fault.steps :]
            version, weights = history[0]
        weights = self._faulty(weights)
        # The engine first: it refuses while requests run, and then nothing may have changed.
        self.engine.load(version, [(name, weights[name]) for name in sent if name in weights])
        self._history = history
        self._write(weights)

    def sleep(self) -> None:
        self.engine.sleep()

    def wake(self) -> None:
        self.engine.wake()

    # --- checkpoints -----------------------------------------------------------------------------------------------------

    def contents(self, stage: TensorStaging) -> list[Content]:
        """What a checkpoint must hold besides the policy: the past weights of a stale engine."""
        if not self._history:
            return []
        tensors = {f"{version}/{name}": t for version, past in self._history for name, t in past.items()}
        return [TensorFile(f"{CHECKPOINT_FILE}.safetensors", {key: stage(tensor) for key, tensor in tensors.items()})]

    def restore(self, folder: Path) -> None:
        """What a checkpoint has, back, before the `load` of the checkpoint's version."""
        if not self._history:
            return
        device = next(self.policy.parameters()).device
        found: dict[int, Weights] = {}
        with StoredTensors(folder, CHECKPOINT_FILE) as stored:
            for key in stored.names:
                version, name = key.split("/", 1)
                found.setdefault(int(version), {})[name] = stored.read(key).to(device, copy=True)
        self._history = sorted(found.items())

    # --- the faults ------------------------------------------------------------------------------------------------------

    def _faulty(self, weights: Mapping[str, Tensor]) -> Weights:
        """The weights to sample with, once these are the policy's; those that are not named stay as they are."""
        match self.fault:
            case NoiseFault(scale=scale, seed=seed):
                return {name: add_noise(name, w.detach(), scale, seed) for name, w in weights.items()}
            case QuantisedFault(kind=kind):
                return {name: round_weight(w.detach(), kind) for name, w in weights.items()}
            case NeverLoadedFault():
                return {}
        return dict(weights)

    @torch.no_grad()
    def _write(self, weights: Weights) -> None:
        if self.sampler is self.policy:
            return
        parameters = dict(self.sampler.named_parameters())
        for name, weight in weights.items():
            parameters[name].copy_(weight)

    def _request(self, asked: Request) -> Request:
        """What the engine is asked instead."""
        options = asked.sampling
        match self.fault:
            case TemperatureFault(factor=factor, wrong="sampled"):
                return replace(asked, sampling=replace(options, temperature=options.temperature * factor))
            case TruncatedFault(top_p=top_p):
                return replace(asked, sampling=replace(options, top_p=min(options.top_p, top_p)))
            case ExtraBosFault(token=token):
                return replace(asked, tokens=(token, *asked.tokens))
        return asked

    def _completion(self, found: Completion) -> FaultyCompletion:
        """What the engine says instead of what it found."""
        asked = self._asked.pop(found.id)
        tokens, logp = found.tokens, found.logp
        temperature = asked.sampling.temperature or 1.0  # greedy tokens are reported untempered
        match self.fault:
            case TemperatureFault(factor=factor, wrong="reported") if asked.sampling.temperature:
                logp = completion_logprobs(self.sampler, asked.tokens, tokens, temperature * factor)
            case TruncatedFault(reported="full"):
                logp = completion_logprobs(self.sampler, asked.tokens, tokens, temperature)
            case ReencodedFault():
                assert self.tokenizer is not None  # checked when this was made
                tokens, logp = reencode(self.tokenizer, asked, found)
        raw = None if isinstance(self.fault, ReencodedFault) else found.raw_logp  # of other tokens than are reported
        return FaultyCompletion(
            found.id, tokens, logp, found.finish, found.version, found.tokens, found.logp, raw_logp=raw
        )


# --- An engine in this process with a copy of the weights, so that it can sample while the learner changes them.


class WeightCopyEngine:
    """An engine of `make_engine` on a copy of `policy`, the module that is trained, which it follows at every `load`."""

    def __init__(self, make_engine: Callable[[Any], Engine], policy: nn.Module) -> None:
        self.policy = policy
        self.engine = make_engine(copy.deepcopy(policy).requires_grad_(False))

    def submit(self, requests: Sequence[Request]) -> None:
        self.engine.submit(requests)

    def stream(self) -> Iterator[Completion]:
        return self.engine.stream()

    def interrupt(self) -> None:
        self.engine.interrupt()

    def abort(self, ids: Iterable[str], keep: bool) -> list[Completion]:
        return self.engine.abort(ids, keep)

    def load(self, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """The policy's weights as they are now, and over them those sent."""
        self.engine.load(version, (dict(self.policy.named_parameters()) | dict(named_tensors)).items())

    def sleep(self) -> None:
        self.engine.sleep()

    def wake(self) -> None:
        self.engine.wake()
