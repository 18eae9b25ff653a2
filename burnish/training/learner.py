"""The learner: one optimizer step of any loss, on any model, whatever the split into micro-batches.

It knows nothing of algorithms: a loss record says what it needs and sums over tokens with weights that were fixed on
the whole mini-batch, so gradients add up to the same for every token budget. A loss that looks at one sequence at a
time is differentiated micro-batch by micro-batch. One that must see a group or the batch at once is differentiated in
two passes: the outputs of all tokens without gradient, the loss on them as leaves, then every micro-batch again with
the derivatives found. Memory is that of one micro-batch either way.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from burnish.algorithms.losses import Loss
from burnish.algorithms.view import view_of
from burnish.config.errors import UserError
from burnish.config.optimizer import Optimizer
from burnish.core.batch import Batch
from burnish.training.adamw import AdamW
from burnish.training.forward import Needs, batch_outputs, forward, pieces
from burnish.training.schedule import factor
from burnish.training.tensors import read_tensors, write_tensors

OF_A_LOSS = frozenset({"entropy", "value"})
"""What a loss may need of the model beside log-probs, and with gradient."""


@dataclass(frozen=True)
class Update:
    """What one optimizer step did."""

    stats: dict[str, float]
    logp: Tensor
    """[N] log-probs (a critic's values) from the forward pass, before the step, at the tokens in the loss; 0 elsewhere."""
    skipped: str | None
    """Why no step was made, or None."""
    entropy: Tensor | None = None
    """[N] of the same pass, where the loss asks for it."""


class Learner:
    """A policy or a critic's model with its optimizer.

    `temperature` is the one the batch was sampled at: all log-probs are under it.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, total_updates: int, token_budget: int, temperature: float = 1.0
    ) -> None:
        self.model = model
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
        return self.outputs(batch, frozenset())["logp"]

    def outputs(self, batch: Batch, needs: Needs, mask: str = "action_mask") -> dict[str, Tensor]:
        """[N] columns under the current weights at the tokens of a mask, without gradient; 0 elsewhere.

        `value` if that is needed, else `logp`, with `entropy` and `sum_p2` (sum_v p_v^2) where they are.
        """
        return batch_outputs(self.model, batch, needs, self.token_budget, self.temperature, mask)

    def update(self, batch: Batch, loss: Loss, lr_scale: float = 1.0, also: tuple[Batch, Loss] | None = None) -> Update:
        """One optimizer step. The batch has a `weight` token column: 0 outside the loss, denominators included.

        A gradient that is not finite makes no step and says so; so does a batch without a token in the loss. `also` is a
        second batch with a loss of its own whose gradient goes into the same step.
        """
        num_tokens = int(batch.loss_mask.sum())
        if num_tokens == 0:
            return Update({}, torch.zeros(batch.num_tokens, device=batch.tokens.device), "no token is left in the loss")
        self.optimizer.zero_grad()
        total, sums, seen = self._accumulate(batch, loss)
        logp, entropy = _first(seen), seen.get("entropy")
        second = 0.0 if also is None else self._accumulate(*also)[0]
        lr = (
            lr_scale
            * self.config.lr
            * factor(self.updates, self.total_updates, self.config.schedule, self.config.warmup, self.config.final)
        )
        norm = self.optimizer.clip(self.config.clip_norm)
        stats = {"loss": total + second, "grad_norm": norm, "lr": lr, **{k: v / num_tokens for k, v in sums.items()}}
        if also is not None:
            stats["second_loss"] = second
        if not math.isfinite(norm):
            self.optimizer.zero_grad()
            return Update(stats, logp, f"the gradient is not finite (norm {norm})", entropy)
        self.optimizer.step(lr)
        self.updates += 1
        return Update(stats, logp, None, entropy)

    def _accumulate(self, batch: Batch, loss: Loss) -> tuple[float, dict[str, float], dict[str, Tensor]]:
        """Gradients of a whole mini-batch; the loss, the metric sums and the outputs seen, [N] each."""
        needs = loss.needs & OF_A_LOSS
        if loss.scope in ("token", "sequence"):
            return self._one_pass(batch, loss, needs)
        outputs = self.outputs(batch, needs, "loss_mask")
        total, sums, slopes = derivatives(batch, loss, outputs)
        self.backward(batch, slopes)
        return total, sums, outputs

    def _one_pass(self, batch: Batch, loss: Loss, needs: Needs) -> tuple[float, dict[str, float], dict[str, Tensor]]:
        total = torch.zeros((), dtype=torch.float64, device=batch.tokens.device)
        sums: dict[str, Tensor] = {}
        seen: dict[str, Tensor] = {}
        for piece in pieces(batch, self.token_budget, "loss_mask"):
            outputs = forward(self.model, piece, needs, self.temperature)
            value, amounts = loss(view_of(piece.batch, **outputs))
            value.backward()
            self.optimizer.absorb()
            total += value.detach()
            for name, amount in amounts.items():
                sums[name] = sums.get(name, torch.zeros_like(total)) + amount.detach()
            for name, output in outputs.items():
                if name not in seen:
                    seen[name] = output.new_zeros(batch.num_tokens)
                seen[name][piece.positions] = output.detach()
        return float(total), {name: float(amount) for name, amount in sums.items()}, seen

    def backward(self, batch: Batch, slopes: Mapping[str, Tensor]) -> None:
        """Gradients of sum_t slope_t output_t: the second pass of a loss whose derivatives are known; [N] columns."""
        # Only outputs that are differentiated get a graph: an entropy that is only looked at is not computed again.
        names = [name for name, slope in slopes.items() if name != "entropy" or bool(slope.any())]
        for piece in pieces(batch, self.token_budget, "loss_mask"):
            outputs = forward(self.model, piece, frozenset(names), self.temperature)
            terms = [(outputs[name] * slopes[name][piece.positions]).sum() for name in names]
            torch.stack(terms).sum().backward()
            self.optimizer.absorb()

    def release(self) -> None:
        """Let go of the gradients, which nobody needs until the next update: a rollout wants their memory."""
        self.optimizer.zero_grad()

    def reset_optimizer(self) -> None:
        """Forget the optimizer's moments, as at the start of an iteration of Kimi k1.5; the schedule goes on."""
        self.optimizer.reset()

    # --- checkpoints ---------------------------------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        """Optimizer state beside the weights (which the model's own code saves): safetensors, never pickle."""
        write_tensors(directory / "optimizer.safetensors", self.optimizer.tensors())
        (directory / "optimizer.json").write_text(json.dumps({"updates": self.updates}))

    def load(self, directory: Path) -> None:
        """Optimizer state back; the weights must be the ones saved with it."""
        tensors = read_tensors(directory / "optimizer.safetensors")
        unknown = [k for k in tensors if k.split("/", 1)[1] not in self.names]
        if unknown:
            raise UserError(f"{directory}: optimizer state for parameters this model does not have: {unknown[:3]}")
        missing = self.names.keys() - {k.split("/", 1)[1] for k in tensors}
        if tensors and missing:
            raise UserError(f"{directory}: no optimizer state for {sorted(missing)[:3]}")
        self.optimizer.restore(tensors)
        self.updates = int(json.loads((directory / "optimizer.json").read_text())["updates"])


def derivatives(
    batch: Batch, loss: Loss, outputs: Mapping[str, Tensor]
) -> tuple[float, dict[str, float], dict[str, Tensor]]:
    """A loss on the outputs of a whole mini-batch: its value, its metric sums, and d loss / d output; [N] columns."""
    mask = batch.loss_mask
    leaves = {name: column[mask].requires_grad_() for name, column in outputs.items()}
    value, amounts = loss(view_of(batch, **leaves))
    found = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
    slopes = {name: torch.zeros_like(outputs[name]) for name in leaves}
    for slope, gradient in zip(slopes.values(), found, strict=True):
        slope[mask] = gradient
    return float(value.detach()), {name: float(amount) for name, amount in amounts.items()}, slopes


def _first(outputs: Mapping[str, Tensor]) -> Tensor:
    """The log-probs of a policy, the values of a critic."""
    return next(iter(outputs.values()))
