"""Engines around other engines: `MismatchEngine` with one known fault, and `WeightCopyEngine` on a copy of the weights.

`MismatchEngine` is for tests and studies of the gap between the policy that samples and the one that is trained. The fault is in
the weights (noise, stale, quantised, never_loaded), in the requests (temperature, extra_bos, truncated), or in the completions
(reencoded, and wrong log-probs). The tokens that were drawn and their log-probs stay known: `Faulty.drawn` and `.drawn_logp`.
All randomness follows from the fault's seed and the requests' keys, so a run is reproducible bit for bit.

    engine = MismatchEngine(NativeEngine, decoder, NoiseFault(scale=0.02))
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from burnish.config.errors import UserError
from burnish.config.rollout import (
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
from burnish.core.engine import Completion, Engine, Request
from burnish.core.pictures import PictureSpan, shifted
from burnish.core.random_keys import fold
from burnish.models.decoder import Decoder
from burnish.models.nf4 import quantised_weights
from burnish.models.tokenizer import Tokenizer
from burnish.models.vision.pieces import Piece, piece_pass
from burnish.run.checkpoint.saver import TensorStaging
from burnish.run.checkpoint.snapshot import Content
from burnish.run.checkpoint.tensor_file import TensorFile
from burnish.training.forward import PolicyForward
from burnish.training.sharded_checkpoint import StoredTensors

Module = TypeVar("Module", bound=nn.Module)
Weights = dict[str, Tensor]
CHECKPOINT_FILE = "engine"


@dataclass
class FaultyCompletion(Completion):
    """A completion as the faulty engine reports it, with what was really drawn."""

    drawn: np.ndarray  # int64, the sampled tokens
    drawn_logp: np.ndarray  # float32, under the distribution each token was sampled from


# --- weights -------------------------------------------------------------------------------------------------------------


def add_noise(name: str, weight: Tensor, scale: float, seed: int) -> Tensor:
    """w + scale rms(w) z with normal z. The seed and the tensor's name determine z, so it is the same after every load."""
    generator = torch.Generator().manual_seed(fold("mismatch", seed, name))
    wide = _at_least_float32(weight)
    z = torch.randn(weight.shape, generator=generator).to(wide)
    return (wide + scale * wide.square().mean().sqrt() * z).to(weight.dtype)


def round_weight(weight: Tensor, kind: str) -> Tensor:
    """Round a weight to bf16 or int8 values, in its own type. int8 has a scale for each row of a matrix and skips vectors."""
    if kind == "bf16":
        return weight.to(torch.bfloat16).to(weight.dtype)
    if weight.dim() != 2:
        return weight
    wide = _at_least_float32(weight)
    step = wide.abs().amax(1, keepdim=True) / 127
    step = torch.where(step > 0, step, torch.ones_like(step))  # a row of zeros stays as it is
    return ((wide / step).round() * step).to(weight.dtype)


def _at_least_float32(weight: Tensor) -> Tensor:
    return weight.to(torch.promote_types(weight.dtype, torch.float32))


def _copy_weights(weights: Mapping[str, Tensor]) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in weights.items()}


# --- completions ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def completion_logprobs(
    module: nn.Module,
    prompt: Sequence[int],
    tokens: np.ndarray,
    temperature: float,
    pictures: Sequence[PictureSpan] = (),
) -> np.ndarray:
    """float32 log-probs of tokens after a prompt with pictures, without truncation."""
    if not len(tokens):
        return np.empty(0, dtype=np.float32)
    device = next(module.parameters()).device
    packed = torch.tensor([*prompt, *tokens.tolist()], device=device)
    offsets = torch.tensor([0, len(packed)], device=device)
    wanted = torch.arange(len(prompt), len(packed), device=device)
    shown: AbstractContextManager[Any] = nullcontext()
    if isinstance(module, Decoder) and module.arch.vision is not None:
        piece = Piece(0, len(packed), pictures)
        shown = module.with_pictures(piece_pass([piece], module.arch.vision, device))
    with shown:
        logp, _ = cast(PolicyForward, module).token_logprobs(packed, offsets, wanted, temperature)
    return logp.float().cpu().numpy()


def reencode(tokenizer: Tokenizer, request: Request, completion: Completion) -> tuple[np.ndarray, np.ndarray]:
    """Tokenise the text of a completion again; pair the new tokens with the log-probs of the drawn ones by position."""
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
    """An engine of `make_engine` with a fault.

    The engine samples from `policy`, the module that is trained, or from a copy that `load` updates with the fault. `reencoded`
    needs the tokenizer.
    """

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
        self._asked: dict[str, Request] = {}  # unfinished requests as submitted
        self._history: list[tuple[int, Weights]] = []  # (version, weights) of a stale engine, oldest first
        if isinstance(fault, StaleFault):
            self._history = [(0, _copy_weights(dict(policy.named_parameters())))]
        self._write(self._faulty(dict(policy.named_parameters())))
        self.engine = make_engine(sampler)  # after the weights are written: an engine may copy them

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
        # An engine may be unable to abort a request; its completion then comes later.
        stopped: list[Completion] = [self._completion(c) for c in self.engine.abort(ids, keep=True)]
        return stopped if keep else []

    def load(self, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load the policy's or the given weights with the fault. The version is that of the weights that sample; under never_loaded
        it is the new one, as the engine does not know of the fault."""
        sent = dict(named_tensors)
        weights = dict(self.policy.named_parameters()) | sent
        history = self._history
        if isinstance(self.fault, StaleFault):
            # A resumed run loads the newest version again, which adds no entry.
            older = [entry for entry in history if entry[0] != version]
            history = [*older, (version, _copy_weights(weights))][-1 - self.fault.steps :]
            version, weights = history[0]
        weights = self._faulty(weights)
        given = sent if self.sampler is self.policy else weights
        # The engine writes them, because it may have copies of them in 8 bits. It raises while requests run, and then no state may have changed.
        self.engine.load(version, [(name, weights[name]) for name in given if name in weights])
        self._history = history

    def sleep(self) -> None:
        self.engine.sleep()

    def wake(self) -> None:
        self.engine.wake()

    # --- checkpoints -----------------------------------------------------------------------------------------------------

    def contents(self, stage: TensorStaging) -> list[Content]:
        """The state of the engine for a checkpoint: the past weights of a stale engine."""
        if not self._history:
            return []
        tensors = {f"{version}/{name}": t for version, past in self._history for name, t in past.items()}
        return [TensorFile(f"{CHECKPOINT_FILE}.safetensors", {key: stage(tensor) for key, tensor in tensors.items()})]

    def restore(self, folder: Path) -> None:
        """Restore the state from a checkpoint, before the `load` of its version."""
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
        """The weights to sample with for these weights of the policy. Missing names keep their values."""
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
        """The request for the inner engine."""
        options = asked.sampling
        match self.fault:
            case TemperatureFault(factor=factor, wrong="sampled"):
                return replace(asked, sampling=replace(options, temperature=options.temperature * factor))
            case TruncatedFault(top_p=top_p):
                return replace(asked, sampling=replace(options, top_p=min(options.top_p, top_p)))
            case ExtraBosFault(token=token):
                return replace(asked, tokens=(token, *asked.tokens), pictures=shifted(asked.pictures, 1))
        return asked

    def _completion(self, found: Completion) -> FaultyCompletion:
        """The faulty report of a completion."""
        asked = self._asked.pop(found.id)
        tokens, logp = found.tokens, found.logp
        temperature = asked.sampling.temperature or 1.0  # greedy log-probs are untempered
        match self.fault:
            case TemperatureFault(factor=factor, wrong="reported") if asked.sampling.temperature:
                logp = completion_logprobs(self.sampler, asked.tokens, tokens, temperature * factor, asked.pictures)
            case TruncatedFault(reported="full"):
                logp = completion_logprobs(self.sampler, asked.tokens, tokens, temperature, asked.pictures)
            case ReencodedFault():
                assert self.tokenizer is not None  # checked by __init__
                tokens, logp = reencode(self.tokenizer, asked, found)
        raw = None if isinstance(self.fault, ReencodedFault) else found.raw_logp  # these are of the drawn tokens
        is_same = not isinstance(self.fault, ReencodedFault | ExtraBosFault)
        experts = found.experts if is_same else None  # of the tokens that the engine read
        return FaultyCompletion(
            found.id, tokens, logp, found.finish, found.version, found.tokens, found.logp, raw_logp=raw, experts=experts
        )


class WeightCopyEngine:
    """An engine of `make_engine` on a copy of `policy`, so that it can sample while the learner changes the policy.

    `load` copies the policy's weights.
    """

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
        """Load the present weights of the policy, overridden by the given ones."""
        self.engine.load(version, (dict(self.policy.named_parameters()) | dict(named_tensors)).items())

    def sleep(self) -> None:
        self.engine.sleep()

    def wake(self) -> None:
        self.engine.wake()
