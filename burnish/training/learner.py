"""The learner: one optimizer step of any loss, on any model, whatever the split into micro-batches.

It knows nothing of algorithms: a loss record says what it needs and sums over tokens with weights that were fixed on
the whole mini-batch, so gradients add up to the same for every token budget.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from burnish.algorithms.losses import Loss, Outputs
from burnish.config.errors import UserError
from burnish.config.schema import Optimizer
from burnish.core.batch import Batch
from burnish.training.adamw import AdamW
from burnish.training.forward import Policy, batch_logprobs, element_positions, split
from burnish.training.schedule import factor


@dataclass(frozen=True)
class Update:
    """What one optimizer step did."""

    stats: dict[str, float]
    logp: Tensor
    """[N] log-probs from the forward pass, before the step, at the tokens in the loss; 0 elsewhere."""
    skipped: str | None
    """Why no step was made, or None."""


class Learner:
    """A model with its optimizer. `temperature` is the one the batch was sampled at: all log-probs are under it."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, total_updates: int, token_budget: int, temperature: float = 1.0
    ) -> None:
        self.model = model
        self.policy: Policy = model  # type: ignore[assignment]
        self.config, self.total_updates = optimizer, total_updates
        self.token_budget, self.temperature = token_budget, temperature
        self.updates = 0
        self.names = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer = AdamW(self.names, optimizer)

    @property
    def device(self) -> torch.device:
        return next(iter(self.names.values())).device

    def logprobs(self, batch: Batch) -> Tensor:
        """[N] log-prob of every token the model wrote, under the current weights; 0 elsewhere."""
        return batch_logprobs(self.policy, batch, self.token_budget, self.temperature)

    def update(self, batch: Batch, loss: Loss) -> Update:
        """One optimizer step. The batch has a `weight` token column: 0 outside the loss, denominators included.

        A gradient that is not finite makes no step and says so; so does a batch without a token in the loss.
        """
        num_tokens = int(batch.loss_mask.sum())
        if num_tokens == 0:
            return Update({}, torch.zeros(batch.num_tokens, device=batch.tokens.device), "no token is left in the loss")
        self.optimizer.zero_grad()
        total, sums, logp = self._accumulate(batch, loss)
        lr = self.config.lr * factor(
            self.updates, self.total_updates, self.config.schedule, self.config.warmup, self.config.final
        )
        norm = float(nn.utils.clip_grad_norm_(self.names.values(), self.config.clip_norm, foreach=True))
        stats = {"loss": total, "grad_norm": norm, "lr": lr, **{k: v / num_tokens for k, v in sums.items()}}
        if not math.isfinite(norm):
            self.optimizer.zero_grad()
            return Update(stats, logp, f"the gradient is not finite (norm {norm})")
        self.optimizer.step(lr)
        self.updates += 1
        return Update(stats, logp, None)

    def _accumulate(self, batch: Batch, loss: Loss) -> tuple[float, dict[str, float], Tensor]:
        """Gradients into `.grad`, micro-batch by micro-batch; the loss, the metric sums and the log-probs seen."""
        total, sums = 0.0, dict[str, float]()
        all_logp: Tensor | None = None
        for part, micro in split(batch, self.token_budget):
            wanted = micro.loss_mask.nonzero().squeeze(1)
            if wanted.numel() == 0:
                continue
            logp, entropy = self.policy.token_logprobs(
                micro.tokens, micro.offsets, wanted, self.temperature, "entropy" in loss.needs
            )
            value, parts = loss(Outputs(logp, entropy), _Columns(micro, wanted, logp.dtype))
            value.backward()
            total += float(value.detach())
            for name, amount in parts.items():
                sums[name] = sums.get(name, 0.0) + float(amount)
            if all_logp is None:
                all_logp = torch.zeros(batch.num_tokens, dtype=logp.dtype, device=logp.device)
            all_logp[element_positions(batch, part)[wanted]] = logp.detach()
        assert all_logp is not None
        return total, sums, all_logp

    # --- checkpoints ---------------------------------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        """Optimizer state beside the weights (which the model's own code saves): safetensors, never pickle."""
        tensors = {k: t.detach().cpu().contiguous() for k, t in self.optimizer.tensors().items()}
        save_file(tensors, directory / "optimizer.safetensors")
        (directory / "optimizer.json").write_text(json.dumps({"updates": self.updates}))

    def load(self, directory: Path) -> None:
        """Optimizer state back; the weights must be the ones saved with it."""
        tensors = load_file(directory / "optimizer.safetensors")
        unknown = [k for k in tensors if k.split("/", 1)[1] not in self.names]
        if unknown:
            raise UserError(f"{directory}: optimizer state for parameters this model does not have: {unknown[:3]}")
        missing = self.names.keys() - {k.split("/", 1)[1] for k in tensors}
        if tensors and missing:
            raise UserError(f"{directory}: no optimizer state for {sorted(missing)[:3]}")
        self.optimizer.restore(tensors)
        self.updates = int(json.loads((directory / "optimizer.json").read_text())["updates"])


class _Columns(Mapping[str, Tensor]):
    """The columns a loss reads, at the tokens in it: token columns, and sequence columns spread over their tokens."""

    def __init__(self, batch: Batch, wanted: Tensor, dtype: torch.dtype) -> None:
        self.batch, self.wanted, self.dtype = batch, wanted, dtype

    def __getitem__(self, name: str) -> Tensor:
        if name in self.batch.token:
            column = self.batch.token[name][self.wanted]
        else:
            column = self.batch.sequence[name][self.batch.sequence_ids[self.wanted]]
        return column.to(self.dtype) if column.is_floating_point() else column

    def __iter__(self) -> Iterator[str]:
        return iter([*self.batch.token, *self.batch.sequence])

    def __len__(self) -> int:
        return len(self.batch.token) + len(self.batch.sequence)
