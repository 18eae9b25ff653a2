"""The learner: one optimizer step of any loss on any model, with the same gradient for any split into micro-batches.

The learner is independent of algorithms. A loss record says which outputs it needs, and sums over tokens with weights that were
fixed on the whole mini-batch. Gradients therefore add up to the same for every token budget.

- A loss of single tokens or sequences is differentiated micro-batch by micro-batch.
- A loss of single groups is too, if every group fits into a micro-batch.
- A loss that must see a whole group or batch is differentiated in two passes: outputs of all tokens without gradient, the loss on
  them as leaves, then every micro-batch again with the derivatives found.

Both ways need the memory of one micro-batch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from burnish.algorithms.batch_columns import ANSWER_COLUMN, first_sequences
from burnish.algorithms.losses.loss_view import loss_view
from burnish.algorithms.losses.policy_loss import Loss
from burnish.algorithms.terms.spec import Router
from burnish.config.errors import UserError
from burnish.config.model import Optimizer
from burnish.core.batch import Batch
from burnish.core.pipeline_stage import stage_of
from burnish.core.routed_experts import LEARNER_EXPERTS
from burnish.models.decoder import drop_features
from burnish.models.lora.adapters import trained_tower_weights
from burnish.run.checkpoint.saver import TensorStaging
from burnish.run.checkpoint.snapshot import BytesFile, Content, writer_rank_of
from burnish.training.forward import (
    MicroBatch,
    Needs,
    Packing,
    ReferenceFn,
    batch_outputs,
    forward,
    groups_fit_budget,
    has_outputs,
    micro_batches_of,
    zero_loss,
)
from burnish.training.meter import Meter, memory_metrics, metered, model_flops
from burnish.training.observed_outputs import (
    LOSS_MASK,
    WANTED_MASK,
    SplitOutputs,
    add_observed_slopes,
    observation_stats,
    with_wanted_mask,
)
from burnish.training.optimizers.base_optimizer import BaseOptimizer
from burnish.training.optimizers.update_rules import lr_factor, make_optimizer
from burnish.training.parallel.pipeline import OneForwardOneBackward
from burnish.training.parallel.ranks import SOLO, Ranks
from burnish.training.router_training import RouterTraining
from burnish.training.sharded_checkpoint import StoredTensors, read_state, state_contents

LAYER_PATTERN = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
DIFFERENTIABLE_OUTPUTS = frozenset({"entropy", "kl", "value"})
"""Model outputs besides log-probs that a loss may need with gradient."""


@dataclass(frozen=True)
class Update:
    """What one optimizer step did."""

    stats: dict[str, float]
    logp: Tensor | None
    """[N] log-probs (or a critic's values) before the step at the tokens in the loss; 0 elsewhere. None unless `columns=True`."""
    skipped: str | None
    """Why no step was made, or None."""
    entropy: Tensor | None = None
    """[N] entropies of the same forward pass, if the loss needs them."""


class Learner:
    """A policy or a critic's model with its optimizer.

    `temperature` is the sampling temperature of the batches; all log-probs are computed at it. With `share_prefixes` a
    prefix that sequences of a group have in common is computed once, if the model supports it and it saves enough. With
    `grad_norms` an update also reports the gradient norm of each block. `router` is for models with experts. `meter` counts the work and its time.

    With several `ranks`, each is given its own shard of a mini-batch (`ranks.local_shard`), and all make the same calls. The numbers
    of an update are those of the whole mini-batch on every rank; its columns are of the rank's own tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        total_updates: int,
        token_budget: int,
        temperature: float = 1.0,
        share_prefixes: bool = True,
        grad_norms: bool = False,
        ranks: Ranks = SOLO,
        router: Router | None = None,
    ) -> None:
        self.model, self.ranks = model, ranks
        self.routers = RouterTraining.of(model, router, ranks)
        self.config, self.total_updates = optimizer, total_updates
        self.packing, self.temperature = Packing.of(model, token_budget, share_prefixes), temperature
        self.reference: ReferenceFn | None = None
        """The reference's distributions, for a loss with the KL over the whole vocabulary."""
        self.updates = 0
        self.names = {name: p for name, p in model.named_parameters() if p.requires_grad}
        """The trained parameters; of a model that is divided into stages, those of this process's stage."""
        self.trains_tower = bool(trained_tower_weights(model))
        self.stage = stage_of(model)
        self.trained_names = list(self.names) if self.stage is None else self.stage.trained_names
        """Names of the trained parameters of all stages."""
        self.optimizer = make_optimizer(
            model, self.names, optimizer, ranks.sum_over_stages if ranks.mesh is not None else None
        )
        self.grad_norms = grad_norms
        self.meter = Meter(self.device, model_flops(model, ranks))

    @property
    def device(self) -> torch.device:
        return self.ranks.device or next(iter(self.names.values())).device

    def logprobs(self, batch: Batch) -> Tensor:
        """[N] log-prob of every token the model wrote, under the current weights; 0 elsewhere."""
        return self.outputs(batch, frozenset())["logp"]

    @metered("forward")
    def outputs(self, batch: Batch, needs: Needs, mask: str = "action_mask") -> dict[str, Tensor]:
        """[N] columns under the current weights at the tokens of a mask, without gradient; 0 elsewhere.

        `value` if it is among the needs, else `logp`, with `entropy`, `kl` and `sum_p2` (sum_v p_v^2) if needed. With
        `learner_experts` also the experts [N, layers, k] that this pass chose, which updates of the batch replay.
        """
        records = None
        if LEARNER_EXPERTS in needs:
            assert self.routers is not None, "a model with experts, which the start of a run checks"
            records = self.routers
            records.record(batch)
        found = batch_outputs(
            self.model,
            batch,
            needs,
            self.packing,
            self.temperature,
            mask,
            self._before_pass,
            self.ranks,
            self.reference,
        )
        if records is not None:
            found[LEARNER_EXPERTS] = records.recorded()
        self._end_passes()
        return found

    def _before_pass(self, micro_batch: MicroBatch) -> None:
        self._count_work(micro_batch)
        if self.routers is not None:
            self.routers.begin(micro_batch, with_gradient=False)

    @metered("other")
    def update(
        self,
        batch: Batch,
        loss: Loss,
        lr_scale: float = 1.0,
        also: tuple[Batch, Loss] | None = None,
        columns: bool = True,
    ) -> Update:
        """One optimizer step. The batch has a `weight` column, of tokens or of sequences, with denominators included.

        The step is skipped, with the reason, if the gradient is not finite or no token is in the loss. `also` is a second batch
        with its own loss, whose gradient goes into the same step. Without `columns` only numbers are returned.
        """
        num_tokens = int(self.ranks.sum_over_ranks({"tokens": int(batch.loss_mask.sum())})["tokens"])
        if num_tokens == 0:
            nothing = torch.zeros(batch.num_tokens, device=batch.tokens.device) if columns else None
            return Update({}, nothing, "no token is left in the loss")
        self.optimizer.zero_grad()
        total, sums, seen = self._accumulate(batch, loss)
        observed = observation_stats(sums, num_tokens)
        logp, entropy = (_main_output(seen), seen.get("entropy")) if columns else (None, None)
        second = 0.0 if also is None else self._accumulate(*also)[0]
        lr = lr_scale * self.config.lr * self._schedule()
        with self.meter("communication"):
            self.ranks.reduce_partial_gradients(self.optimizer.gradients(), self.model)
        blocks = block_grad_norms(self.optimizer, self.trained_names) if self.grad_norms else {}
        with self.meter("optimizer"):
            norm = self.optimizer.clip(self.config.clip_norm)
        stats = {"loss": total + second, "grad_norm": norm, "lr": lr, **{k: v / num_tokens for k, v in sums.items()}}
        stats |= blocks | observed | ({} if self.routers is None else self.routers.stats())
        if also is not None:
            stats["second_loss"] = second
        if not math.isfinite(norm):
            self.optimizer.zero_grad()
            return Update(stats, logp, f"the gradient is not finite (norm {norm})", entropy)
        with self.meter("optimizer"):
            self.optimizer.step(lr, self.updates)
        if self.trains_tower:
            drop_features(self.model)
        self.updates += 1
        return Update(stats, logp, None, entropy)

    def _accumulate(self, batch: Batch, loss: Loss) -> tuple[float, dict[str, float], dict[str, Tensor]]:
        """Accumulate the gradients of a mini-batch. Returns its loss and metric sums, and [N] outputs at this rank's tokens."""
        needs, scope = loss.needs & DIFFERENTIABLE_OUTPUTS, loss.scope
        batch, mask = with_wanted_mask(batch, loss)
        if scope == "sequence" and has_split_answers(batch, self.ranks):
            scope = "groups"  # the sequences of an answer must be in one view, and a group has all of them
        whole_groups = scope == "groups" and groups_fit_budget(batch, self.packing, mask, self.ranks)
        if scope in ("token", "sequence") or whole_groups:
            total, sums, outputs = self._one_pass(batch, loss, needs, whole_groups, mask)
            with self.meter("communication"):
                sums = self.ranks.sum_over_ranks(sums | {"": total})
            return sums.pop(""), sums, outputs
        outputs = self.outputs(batch, needs, mask)
        with self.meter("communication"):
            whole = self.ranks.gather_batch(batch, outputs)
        total, sums, slopes = loss_derivatives(whole.batch, loss, whole.outputs)
        if mask == WANTED_MASK:
            observed, more = add_observed_slopes(whole.batch, whole.outputs, slopes)
            total, sums = total + observed, sums | more
        self.backward(batch, {name: slope[whole.own_tokens] for name, slope in slopes.items()}, mask)
        if mask == WANTED_MASK:
            outputs = {name: output.masked_fill(~batch.loss_mask, 0) for name, output in outputs.items()}
        return total, sums, outputs

    def _one_pass(
        self, batch: Batch, loss: Loss, needs: Needs, whole_groups: bool = False, mask: str = LOSS_MASK
    ) -> tuple[float, dict[str, float], dict[str, Tensor]]:
        total = torch.zeros((), dtype=torch.float64, device=batch.tokens.device)
        sums: dict[str, Tensor] = {}
        seen: dict[str, Tensor] = {}
        schedule = OneForwardOneBackward(self.model, self._backward_pass)
        micro_batches = micro_batches_of(batch, self.packing, mask, self.ranks, whole_groups)
        if self.routers is not None:
            self.routers.start(micro_batches)
        for micro_batch in micro_batches:
            self._count_work(micro_batch, with_gradient=True)
            with self.meter("forward"):
                if self.routers is not None:
                    self.routers.begin(micro_batch, with_gradient=True)
                found = forward(self.model, micro_batch, needs, self.temperature, self.reference)
            if not has_outputs(self.model):
                schedule.add(self._with_balance(zero_loss(found)))
                continue
            with self.meter("forward"):
                split = SplitOutputs(micro_batch, found, mask)
                outputs = split.outputs
                value, amounts = (
                    (zero_loss(outputs), {})
                    if micro_batch.is_padding
                    else loss(loss_view(micro_batch.batch, **outputs, joins_answers=loss.scope != "token"))
                )
                if (term := split.term()) is not None:
                    value, amounts = value + term[0], amounts | term[1]
            schedule.add(self._with_balance(value))
            total += value.detach()
            for name, amount in amounts.items():
                sums[name] = sums.get(name, torch.zeros_like(total)) + amount.detach()
            for name, output in outputs.items():
                if name not in seen:
                    seen[name] = output.new_zeros(batch.num_tokens)
                seen[name][split.positions] = output.detach()
        schedule.finish()
        self._end_passes()
        numbers = float(total), {name: float(amount) for name, amount in sums.items()}
        return *self.ranks.from_last_stage(numbers), self.ranks.columns_from_last_stage(seen, batch)

    def backward(self, batch: Batch, slopes: Mapping[str, Tensor], mask: str = LOSS_MASK) -> None:
        """Accumulate gradients of sum_t slope_t output_t: the second pass of a loss with known derivatives; [N] columns.

        `mask` is the column of the tokens that have derivatives.
        """
        # An entropy that only metrics use has slope 0, and is not computed again.
        names = [name for name, slope in slopes.items() if name != "entropy" or bool(slope.any())]
        schedule = OneForwardOneBackward(self.model, self._backward_pass)
        micro_batches = micro_batches_of(batch, self.packing, mask, self.ranks)
        if self.routers is not None:
            self.routers.start(micro_batches)
        for micro_batch in micro_batches:
            self._count_work(micro_batch, with_gradient=True)
            with self.meter("forward"):
                if self.routers is not None:
                    self.routers.begin(micro_batch, with_gradient=True)
                outputs = forward(self.model, micro_batch, frozenset(names), self.temperature, self.reference)
                if has_outputs(self.model):
                    terms = [(outputs[name] * slopes[name][micro_batch.positions]).sum() for name in names]
                    value = torch.stack(terms).sum()
                else:
                    value = zero_loss(outputs)
            schedule.add(self._with_balance(value))
        schedule.finish()
        self._end_passes()

    def _backward_pass(self, value: Tensor) -> None:
        with self.meter("backward"):
            value.backward()
            self.optimizer.accumulate_gradients()

    def _with_balance(self, value: Tensor) -> Tensor:
        """The loss of a forward pass with the balance loss of its routers, if there is one."""
        term = None if self.routers is None else self.routers.term()
        return value if term is None else value + term.to(value.dtype)

    def _end_passes(self) -> None:
        if self.routers is not None:
            self.routers.end()

    def _count_work(self, micro_batch: MicroBatch, with_gradient: bool = False) -> None:
        if not micro_batch.is_padding:
            batch, num_wanted = micro_batch.batch, micro_batch.wanted.numel()
            grids = [picture.grid for picture in batch.needed_pictures.values()]
            self.meter.count_pass(batch.offsets, num_wanted, micro_batch.shared_prefix, with_gradient, grids)

    def _schedule(self) -> float:
        config = self.config
        return lr_factor(self.updates, self.total_updates, config.schedule, config.warmup, config.final, config.decay)

    def usage(self) -> dict[str, float]:
        """Memory metrics since the peak was reset."""
        return memory_metrics(self.device)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the parameters."""
        return next(iter(self.names.values())).dtype

    def release(self) -> None:
        """Free the gradients until the next update, so that a rollout can use their memory."""
        self.optimizer.zero_grad()

    def reset_optimizer(self) -> None:
        """Reset the optimizer's moments, as Kimi k1.5 does at the start of an iteration; the schedule continues."""
        self.optimizer.reset()

    # --- checkpoints ---------------------------------------------------------------------------------------------------

    def contents(self, stage: TensorStaging, folder: str = "") -> list[Content]:
        """This rank's optimizer state as checkpoint files. The model's own code saves the weights."""
        files = state_contents(f"{folder}optimizer", self.optimizer.tensors(), self.model, stage)
        if writer_rank_of(self.model).index == 0:
            files.append(BytesFile(f"{folder}optimizer.json", json.dumps({"updates": self.updates})))
        return files

    def load(self, directory: Path) -> None:
        """Load optimizer state that any number of ranks wrote; the weights must be those saved with it."""
        with StoredTensors(directory, "optimizer") as stored:
            saved = {flat.split("/", 1)[1] for flat in stored.names}
            if unknown := sorted(saved.difference(self.trained_names)):
                raise UserError(f"{directory}: optimizer state for parameters this model does not have: {unknown[:3]}")
            if saved and (missing := sorted(self.names.keys() - saved)):
                raise UserError(f"{directory}: no optimizer state for {missing[:3]}")
            self.optimizer.restore(read_state(stored, self.model, self.optimizer.layout))
        self.updates = int(json.loads((directory / "optimizer.json").read_text())["updates"])


def has_split_answers(batch: Batch, ranks: Ranks = SOLO) -> bool:
    """Whether on any rank an answer has several sequences. The column `answer_ids` is on all ranks or on none."""
    return ANSWER_COLUMN in batch.sequence and ranks.max_over_ranks(int(first_sequences(batch) is not None)) > 0


def loss_derivatives(
    batch: Batch, loss: Loss, outputs: Mapping[str, Tensor]
) -> tuple[float, dict[str, float], dict[str, Tensor]]:
    """Evaluate a loss on the outputs of a whole mini-batch: its value, metric sums, and d loss / d output as [N] columns."""
    mask = batch.loss_mask
    leaves = {name: column[mask].requires_grad_() for name, column in outputs.items()}
    value, amounts = loss(loss_view(batch, **leaves, joins_answers=True))
    found = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
    slopes = {name: torch.zeros_like(outputs[name]) for name in leaves}
    for slope, gradient in zip(slopes.values(), found, strict=True):
        slope[mask] = gradient
    return float(value.detach()), {name: float(amount) for name, amount in amounts.items()}, slopes


def _main_output(outputs: Mapping[str, Tensor]) -> Tensor:
    """The log-probs of a policy, the values of a critic."""
    return next(iter(outputs.values()))


# --- Gradient norm per block, which shows where in the model gradients vanish or explode ---------------------------------


@torch.no_grad()
def block_grad_norms(optimizer: BaseOptimizer, names: Iterable[str]) -> dict[str, float]:
    """Gradient norm of each block, as `grad_norm_<block>`; their squares add up to the square of the total norm.

    `names` are those of the trained parameters, on other stages too.

    Every rank must call this: each has a shard of a parameter, and the norm is that of all shards.
    """
    gradients = optimizer.gradients()
    blocks = sorted({parameter_block(name) for name in names})
    if not gradients or not blocks:
        return {}
    device = next(iter(gradients.values())).device
    squares = torch.stack([norm.double() for norm in torch._foreach_norm(list(gradients.values()))]).square()
    # Multiplied by the number of shards, the mean over ranks is the sum over shards.
    squares *= torch.tensor([optimizer.num_counted(name) for name in gradients], device=device)
    block_index = torch.tensor([blocks.index(parameter_block(name)) for name in gradients], device=device)
    sums = torch.zeros(len(blocks), dtype=torch.float64, device=device).index_add_(0, block_index, squares)
    if optimizer.reduce is not None:
        sums = optimizer.reduce(sums)
    return {f"grad_norm_{block}": norm for block, norm in zip(blocks, sums.sqrt().tolist(), strict=True)}


def parameter_block(name: str) -> str:
    """The block of a parameter: embedding, layer_<k>, head, or rest (the final norm)."""
    if found := LAYER_PATTERN.search(name):
        return f"layer_{int(found[1]):02d}"
    words = name.split(".")
    if any("emb" in word or word == "wte" for word in words):
        return "embedding"
    return "head" if any("head" in word for word in words) else "rest"
