"""A model that a client trains: adapters over the base's tensors, or a copy of all weights, with gradients and AdamW state.

All adapters read the same base tensors, which are in memory once. `forward_backward` adds to the gradient until `optim_step` uses
and clears it. The gradient does not depend on how sequences are packed into micro-batches, because every loss is a sum.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from burnish.config.model import Lora, Optimizer
from burnish.core.batch import Batch
from burnish.models.decoder import Decoder
from burnish.models.kernels.logprob import head_logprob, row_chunks, scaled_logits
from burnish.models.lora.adapters import add_lora
from burnish.models.policy import PolicyModel
from burnish.models.weight_files import on_meta_device
from burnish.run.checkpoint.saver import keep_in_place
from burnish.run.checkpoint.snapshot import BytesFile, Content
from burnish.serve.tinker.losses import TARGETS, LossSpec, find_loss, read_names, sequence_loss
from burnish.serve.tinker.requests import AdamOptions, BadRequest, Datum
from burnish.serve.tinker.responses import TrainingOutput
from burnish.training.optimizers.parameter_groups import ParameterSetting
from burnish.training.optimizers.update_rules import AdamW
from burnish.training.packing import Unit, pack_units, prefix_trees, sequence_units, sharing_pays, tree_units
from burnish.training.sharded_checkpoint import StoredTensors, read_state, state_contents

STATE_FILE = "optimizer.json"
Weights = dict[str, Tensor]
"""Trained weights by parameter name: adapters, or all weights."""


def share_base(base: Decoder) -> Decoder:
    """A new module tree over the tensors of `base`: adapters can be added to it without touching `base`."""
    with on_meta_device():
        shared = Decoder(base.arch)
    modules = dict(shared.named_modules())
    for name, parameter in base.named_parameters():
        path, _, own = name.rpartition(".")
        setattr(modules[path], own, parameter)
    shared._tables = base._tables  # rotation tables depend on the architecture only
    return shared


def new_module(base: PolicyModel, lora: Lora | None, seed: int) -> Decoder:
    """A decoder to train: with new adapters over the base's tensors, or, without `lora`, with a copy of all weights."""
    assert isinstance(base.module, Decoder), "checked when the server started"
    if lora is None:
        return deepcopy(base.module).requires_grad_(True)
    module = share_base(base.module)
    add_lora(module, lora, seed)
    return module


def target_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None = None) -> Tensor:
    """log p of the targets [M] or [M, K] after hidden states [M, hidden], with gradient, for a few rows of logits at a time."""
    if targets.dim() == 1:
        return head_logprob(hidden, weight, targets, softcap=softcap)[0]

    def chunk(rows: Tensor, head: Tensor, wanted: Tensor) -> Tensor:
        return scaled_logits(rows, head, 1.0, softcap).log_softmax(-1).gather(1, wanted)

    parts = []
    for i, j in row_chunks(hidden, weight):
        part = hidden[i:j], weight, targets[i:j]
        # Recomputed in the backward pass, which would otherwise keep [M, vocab].
        is_trained = torch.is_grad_enabled()
        parts.append(checkpoint(chunk, *part, use_reentrant=False) if is_trained else chunk(*part))
    return torch.cat(parts)


class TrainingModel:
    """Weights that a client trains, their gradient and their optimizer."""

    def __init__(self, base: PolicyModel, lora: Lora | None, seed: int, token_budget: int) -> None:
        self.lora, self.token_budget = lora, token_budget
        self.module = new_module(base, lora, seed)
        self.policy = PolicyModel(self.module, base.tokenizer, base.source, "")
        self.parameters: dict[str, nn.Parameter] = {
            name: parameter for name, parameter in self.module.named_parameters() if parameter.requires_grad
        }
        self.optimizer = AdamW(self.parameters, Optimizer(), self._settings(0.0))
        self.num_steps = 0

    @property
    def device(self) -> torch.device:
        return self.module.embedding.weight.device

    # --- forward and backward ------------------------------------------------------------------------------------------

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, options: Mapping[str, float | str], forward_only: bool = False
    ) -> TrainingOutput:
        """Log-probs of all targets and the loss; its gradient is added to the model's unless `forward_only`.

        A request that is refused leaves the gradient as it was. A failure of the device drops it.
        """
        spec = find_loss(loss_fn, options)
        if not data:
            raise BadRequest("there is no data")
        names = [self._check(index, datum, loss_fn) for index, datum in enumerate(data)]
        logprobs: list[np.ndarray] = [np.empty(0, np.float32)] * len(data)
        total = 0.0
        try:
            for part in pack_units(self._units(data), self.token_budget):
                with torch.set_grad_enabled(not forward_only):
                    value = self._micro_batch(data, part, names, spec, options, logprobs)
                if not forward_only:
                    value.backward()
                    self.optimizer.accumulate_gradients()
                total += float(value.detach())
        except Exception:
            self.optimizer.zero_grad()
            raise
        return TrainingOutput(logprobs, {"loss:sum": total})

    def _units(self, data: Sequence[Datum]) -> list[Unit]:
        """The units to pack. Prompts that sequences have in common are computed once, if that saves enough."""
        lengths, cost = [len(datum.tokens) for datum in data], self.module.attention_cost
        tokens, offsets = torch.from_numpy(np.concatenate([d.tokens for d in data])), np.cumsum([0, *lengths])
        one_group = {"group_ids": torch.zeros(len(data), dtype=torch.long)}
        trees = prefix_trees(Batch(tokens, torch.from_numpy(offsets), sequence=one_group))
        if sharing_pays(lengths, trees):
            return tree_units(lengths, trees, self.token_budget, cost)
        return sequence_units(lengths, cost)

    def _micro_batch(
        self,
        data: Sequence[Datum],
        part: Sequence[Unit],
        names: Sequence[Sequence[str]],
        spec: LossSpec,
        options: Mapping[str, float | str],
        logprobs: list[np.ndarray],
    ) -> Tensor:
        """The loss of the sequences of some units. Their log-probs are written to `logprobs`."""
        members = [index for unit in part for index in unit.members]
        shared = np.array([count for unit in part for count in unit.shared], np.int64)
        lengths = [len(data[index].tokens) for index in members]
        tokens = self._send(np.concatenate([data[index].tokens for index in members]))
        offsets = self._send(np.cumsum([0, *lengths], dtype=np.int64))
        hidden = self.module.hidden(tokens, offsets, shared_prefix=self._send(shared) if shared.any() else None)
        losses, start = [], 0
        # Neighbours with the same columns are computed together: each transfer and each head pass costs time of its own.
        for (_, own), group in groupby(members, key=lambda i: (data[i].inputs[TARGETS].shape[1:], tuple(names[i]))):
            run = list(group)
            sizes = [len(data[index].tokens) for index in run]
            rows = hidden[start : start + sum(sizes)]
            start += sum(sizes)
            targets = self._column(data, run, TARGETS).long()
            logp = target_logprobs(rows, self.module.head_weight, targets, self.module.arch.logit_softcap)
            found = np.split(logp.detach().float().cpu().numpy(), np.cumsum(sizes)[:-1])
            columns = {name: self._column(data, run, name).to(logp.dtype).split(sizes) for name in own}
            for k, (index, one) in enumerate(zip(run, logp.split(sizes), strict=True)):
                inputs = {name: column[k] for name, column in columns.items()}
                losses.append(sequence_loss(spec, one, inputs, options))
                logprobs[index] = found[k]
        return torch.stack(losses).sum(dtype=torch.float64)

    def _column(self, data: Sequence[Datum], members: Sequence[int], name: str) -> Tensor:
        """A column of several sequences, one after the other, on the device."""
        return self._send(np.concatenate([data[index].inputs[name] for index in members]))

    def _check(self, index: int, datum: Datum, loss_fn: str) -> list[str]:
        """The names of the tensors that the loss reads; BadRequest if the sequence cannot be trained on."""
        arch, where = self.module.arch, f"data[{index}]"
        size = len(datum.tokens)
        if not 0 < size <= arch.max_positions:
            raise BadRequest(f"{where} has {size} tokens; expected 1 to {arch.max_positions}, the model's positions")
        try:
            names = read_names(loss_fn, datum.inputs)
        except BadRequest as error:
            raise BadRequest(f"{where}: {error}") from error
        targets = datum.inputs[TARGETS]
        if targets.dtype.kind != "i" or targets.ndim not in (1, 2) or len(targets) != size or 0 in targets.shape:
            shape = list(targets.shape)
            raise BadRequest(f"{where}: {TARGETS} is {targets.dtype} {shape}; expected int64 [{size}] or [{size}, K]")
        if targets.ndim == 2 and loss_fn != "cross_entropy":
            raise BadRequest(f"{where}: {TARGETS} has {targets.shape[1]} columns; only cross_entropy takes several")
        for name in names:
            if datum.inputs[name].shape != targets.shape:
                shapes = f"{list(datum.inputs[name].shape)}, and {TARGETS} has {list(targets.shape)}"
                raise BadRequest(f"{where}: {name} has the shape {shapes}; they must be equal")
        for what, tokens in (("the input", datum.tokens), (TARGETS, targets)):
            if tokens.min() < 0 or tokens.max() >= arch.vocab_size:
                wrong = tokens[(tokens < 0) | (tokens >= arch.vocab_size)].flat[0]
                raise BadRequest(f"{where}: {what} has token {wrong}; the model has 0 to {arch.vocab_size - 1}")
        if "sequence_ratio_mask" in names and not datum.inputs["sequence_ratio_mask"].any():
            raise BadRequest(f"{where}: sequence_ratio_mask marks no token, so the sequence has no ratio")
        return names

    # --- the optimizer -------------------------------------------------------------------------------------------------

    def optim_step(self, adam: AdamOptions) -> dict[str, float]:
        """One step of AdamW with the accumulated gradient, which is cleared; returns metrics."""
        if not self.optimizer.gradients():
            raise BadRequest("optim_step without a gradient: call forward_backward first")
        norm = self.optimizer.clip(adam.grad_clip_norm if adam.grad_clip_norm > 0 else math.inf)
        if not math.isfinite(norm):
            self.optimizer.zero_grad()
            raise BadRequest(
                f"the gradient is not finite (norm {norm}): it was dropped and the weights are unchanged; look for infinite "
                "log-probs or advantages in the data since the last step"
            )
        self.optimizer.config = Optimizer(betas=(adam.beta1, adam.beta2), eps=adam.eps)
        self.optimizer.settings = self._settings(adam.weight_decay)
        self.optimizer.step(adam.learning_rate, self.num_steps)
        self.optimizer.zero_grad()
        self.num_steps += 1
        return {"unclipped_grad_l2:mean": norm}

    def _settings(self, decay: float) -> dict[str, ParameterSetting]:
        """One setting for every parameter, as torch.optim.AdamW has it."""
        return dict.fromkeys(self.parameters, ParameterSetting(decay=decay))

    # --- weights and state ---------------------------------------------------------------------------------------------

    def snapshot(self) -> Weights:
        """A copy of the trained weights in host memory, for a sampler."""
        return {name: parameter.detach().to("cpu", copy=True) for name, parameter in self.parameters.items()}

    def contents(self, with_optimizer: bool) -> list[Content]:
        """The files of a checkpoint: a PEFT or Hugging Face directory, and AdamW's state and step count."""
        files = self.policy.contents(keep_in_place)
        if with_optimizer:
            files += state_contents("optimizer", self.optimizer.tensors(), self.module, keep_in_place)
            files.append(BytesFile(STATE_FILE, json.dumps({"steps": self.num_steps})))
        return files

    def load(self, directory: Path, with_optimizer: bool) -> None:
        """Load weights, and AdamW's state or none. A gradient that was accumulated is dropped."""
        if not with_optimizer:
            self._load_weights(directory)
            self.optimizer.state, self.optimizer.updates, self.num_steps = {}, {}, 0
            return
        # The state is read before the weights change: with the new weights, older master copies would undo them at the next step.
        with StoredTensors(directory, "optimizer") as stored:
            state = read_state(stored, self.module, self.optimizer.layout)
            num_steps = int(json.loads((directory / STATE_FILE).read_text())["steps"])
            self._load_weights(directory)
            self.optimizer.restore(state)
        self.num_steps = num_steps

    def _load_weights(self, directory: Path) -> None:
        self.policy.load_weights(directory)
        self.optimizer.zero_grad()

    def _send(self, array: np.ndarray) -> Tensor:
        return torch.as_tensor(array.copy() if not array.flags.writeable else array, device=self.device)
