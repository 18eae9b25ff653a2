"""`AlgorithmPipeline` holds the steps between rollouts and losses, as lists that are built once from the algorithm.

    shape      reward shapers
    select     group filters: dynamic sampling, difficulty band
    prepare    old log-probs, correction, reference log-probs, values, process rewards, token rewards, advantages
    trim       sample filters: overlong, pruning, resampling

A step is a named function `run(batch, context) -> batch`. It reads models and trainer state from the `StepContext` and adds its metrics
and notes to it. Every option adds its own step: GRPO with one update per batch prepares only `reference_logprobs` (for its KL term),
`token_rewards` and `advantages`. The anchor is the policy in the denominator of the importance ratio. Its log-probs are `old_logp`, or
`ref_logp` if the loss is anchored on the reference.

`burnish/trainers/rl.py` calls the four methods of `AlgorithmPipeline` in this order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from burnish.algorithms.advantages.advantage_functions import ADVANTAGES
from burnish.algorithms.advantages.spec import SpoChainAdvantage, SpoTreeAdvantage
from burnish.algorithms.batch_columns import (
    differs_within_trajectories,
    is_replayed,
)
from burnish.algorithms.curriculum.prompt_selection import linear_anneal
from burnish.algorithms.curriculum.spec import HardOnlyCurriculum
from burnish.algorithms.filters.filter_functions import (
    GROUP_FILTERS,
    RESAMPLERS,
    SAMPLE_FILTERS,
)
from burnish.algorithms.filters.spec import SnrFilter
from burnish.algorithms.losses.policy_loss import PolicyLoss
from burnish.algorithms.shaping.shapers import SHAPERS
from burnish.algorithms.spec import OLD_PASS_COLUMNS, Algorithm
from burnish.config.errors import UserError
from burnish.config.records import Plugin, slot_options
from burnish.core.batch import Batch
from burnish.core.routed_experts import LEARNER_EXPERTS
from burnish.core.segments import compact_ids
from burnish.rewards.score_types import reward_problem
from burnish.trainers.minibatches import build_policy_loss, filter_function, slot_function
from burnish.trainers.mismatch import (
    ApplyCorrection,
    GapReport,
    acts_before_advantages,
    apply_correction,
    apply_to_replayed,
    apply_to_sampled,
    gap_report,
)
from burnish.trainers.pipeline_steps import (
    SlotFunction,
    StepContext,
    anchor_on_behaviour,
    anchor_replayed_on_behaviour,
    author_logprobs,
    compute_advantages,
    critic_values,
    drop_empty_sequences,
    filter_by_plugin,
    filter_samples,
    kl_in_advantages,
    kl_in_reward,
    log_pair_counts,
    log_seq_errors,
    log_taught,
    mark_chosen,
    old_logprobs,
    old_logprobs_of_new_groups,
    process_rewards,
    record_unfinished_trees,
    reference_logprobs,
    reference_on_behaviour,
    resample,
    token_rewards,
)
from burnish.training.learner import Update

REWARD_FREE_PASSES = ("old_logprobs", "reference_logprobs", "values")
"""Steps of the preparation that run a model over the batch and read no reward."""


class Step(NamedTuple):
    """One step of a pipeline."""

    name: str
    run: Callable[[Batch, StepContext], Batch]


class AlgorithmPipeline:
    """An algorithm as lists of steps, with its `PolicyLoss`."""

    def __init__(
        self,
        algorithm: Algorithm,
        num_updates: int,
        base: Path | None = None,
        part_weights: Mapping[str, float] | None = None,
        has_demonstrations: bool = False,
    ) -> None:
        """`num_updates` is the number of updates per batch. `part_weights` are those of the reward parts, for GDPO."""
        self.algorithm = algorithm
        self.loss = build_policy_loss(algorithm, base)
        self.shapers = [
            SlotFunction(s.name, slot_function(s, SHAPERS, base), slot_options(s)) for s in algorithm.shaping
        ]
        filters = [SlotFunction(f.name, filter_function(f, base), slot_options(f)) for f in algorithm.filters]
        self.group_filters = [one for one in filters if one.name in GROUP_FILTERS]
        self.advantage_scale = next((f.scale for f in algorithm.filters if isinstance(f, SnrFilter)), "none")
        """How the share of kept groups scales the advantages (filter snr)."""
        advantages = _advantage_step(algorithm, base, part_weights or {})
        self.preparation = preparation_steps(algorithm, num_updates, self.loss, advantages, has_demonstrations)
        self.sample_filters = sample_filter_steps(filters, replays=algorithm.replay is not None)
        self.compares_with_engine = algorithm.own_temperature is None
        """Whether the learner's log-probs are of the distribution that was sampled from, not of a temperature of the loss (SSD)."""
        self.has_trainer_logp = algorithm.has_trainer_logp(num_updates)

    def shape(self, batch: Batch, step: int, max_tokens: int) -> Batch:
        """The batch with the rewards that the shapers return, in the listed order. Shapers never change `accuracy`."""
        for shaper in self.shapers:
            batch = _shape(batch, shaper, step, max_tokens)
        return batch

    def kept_by_group_filters(self, batch: Batch) -> Tensor:
        """[S] which sequences the group filters keep."""
        keep = torch.ones(batch.num_sequences, dtype=torch.bool, device=batch.tokens.device)
        for _, function, options in self.group_filters:
            keep &= function(batch, **options)
        return keep

    def num_kept_groups(self, batch: Batch) -> int:
        """New groups that the group filters keep."""
        is_kept = self.kept_by_group_filters(batch) & ~is_replayed(batch)
        return compact_ids(batch.sequence["group_ids"][is_kept])[1]

    def select(self, batch: Batch, limit: int | None = None) -> Batch:
        """The groups that the filters keep, at most `limit` new ones. Replayed groups do not count towards the limit.

        With `refill.short: fill`, groups that the filters drop make up for missing ones.
        """
        keep = self.kept_by_group_filters(batch)
        groups, num_groups = compact_ids(batch.sequence["group_ids"])
        if limit is not None:
            kept = torch.zeros(num_groups, dtype=torch.bool, device=keep.device).index_fill(0, groups[keep], True)
            order = kept.nonzero().squeeze(1)
            if self.algorithm.refill.short == "fill":
                order = torch.cat([order, (~kept).nonzero().squeeze(1)])
            replayed = torch.zeros_like(kept).index_fill(0, groups[is_replayed(batch)], True)
            chosen = (kept & replayed).index_fill(0, order[~replayed[order]][:limit], True)
            keep = chosen[groups]
        if self.advantage_scale != "none":
            share = compact_ids(groups[keep])[1] / max(1, num_groups)
            factor = share if self.advantage_scale == "share" else math.sqrt(share)
            batch = batch.with_sequence(advantage_scale=torch.full_like(batch.sequence["reward"], factor))
        return batch.select(keep.nonzero().squeeze(1))

    @property
    def reward_free_steps(self) -> list[Step]:
        """The steps that may run before the rewards are known. None if rewards decide which samples are learnt from, or values are among
        the columns of segments."""
        algorithm = self.algorithm
        chooses = self.group_filters or algorithm.replay is not None or algorithm.refill.oversample != 1
        branches = isinstance(algorithm.advantage, SpoChainAdvantage | SpoTreeAdvantage)
        return [] if chooses or branches else [step for step in self.preparation if step.name in REWARD_FREE_PASSES]

    def prepare(self, batch: Batch, context: StepContext) -> Batch:
        """The batch with every column that the loss reads."""
        return _run(self.preparation, batch, context)

    def trim(self, batch: Batch, context: StepContext) -> Batch:
        """The batch after the sample filters, without sequences that have no token left in the loss."""
        return _run(self.sample_filters, batch, context)

    def lr_scale(self, step: int) -> float:
        """The factor of a curriculum on the learning rate."""
        curriculum = self.algorithm.curriculum
        if not isinstance(curriculum, HardOnlyCurriculum):
            return 1.0
        return linear_anneal(max(0, step - curriculum.start), curriculum.steps, 1.0, curriculum.lr_final)

    def trainer_logp(self, batch: Batch, updates: Sequence[Update]) -> Tensor | None:
        """[N] the trainer's log-probs before the first update, nan where unknown. None where all are unknown."""
        if self.has_trainer_logp:
            return torch.where(batch.action_mask, batch.token["old_logp"], torch.nan)
        if len(updates) == 1 and updates[0].logp is not None:
            return torch.where(batch.loss_mask, updates[0].logp, torch.nan)
        return None

    def mismatch(self, whole: Batch, batch: Batch, updates: Sequence[Update], version: int) -> GapReport:
        """Report the gap between sampler and trainer, in the prepared batch `whole` and in the trimmed `batch`.

        `version` is that of the trainer's weights. The report is empty for `bypass` with several updates per batch: the trainer's
        log-probs before the first update are then unknown. It is also empty for a loss with a temperature of its own: the gap is meant.
        """
        if not self.compares_with_engine:
            return GapReport()
        if not self.has_trainer_logp and len(updates) != 1:
            return GapReport()
        logp = None if self.has_trainer_logp else updates[0].logp
        return gap_report(whole, batch, logp, self.algorithm.correction, version)


def _run(steps: Sequence[Step], batch: Batch, context: StepContext) -> Batch:
    for step in steps:
        early = context.early.get(step.name)
        batch = step.run(batch, context) if early is None else batch.with_token(**early)
    return batch


# --- Building the lists ---------------------------------------------------------------------------------------------------


def needs_reference_logp(algorithm: Algorithm, loss: PolicyLoss) -> bool:
    """Whether anything reads `ref_logp`. A KL over the whole vocabulary asks the reference during the update instead."""
    if algorithm.kl.reference.name == "none":
        return False
    is_anchor = not isinstance(algorithm.loss, Plugin) and algorithm.loss.anchored
    is_read = is_anchor or ("reference" in algorithm.loss.needs and not loss.uses_divergence)
    return is_read or algorithm.kl.reward.coef > 0 or algorithm.kl.advantage.coef > 0 or "kl" not in loss.needs


def preparation_steps(
    algorithm: Algorithm, num_updates: int, loss: PolicyLoss, advantages: Step, has_demonstrations: bool
) -> list[Step]:
    """The steps of `prepare`, in the order in which they run."""
    replays, bypasses = algorithm.replay is not None, algorithm.correction.name == "bypass"
    corrects = acts_before_advantages(algorithm.correction)
    needs_old = algorithm.reads_old_logp(num_updates)
    columns = frozenset(name for name in OLD_PASS_COLUMNS if algorithm.needs(name))
    if algorithm.router.learner_experts == "replay":
        columns |= {LEARNER_EXPERTS}
    needs_reference = needs_reference_logp(algorithm, loss)
    steps: list[Step] = []
    if replays and needs_old and not (columns or bypasses or corrects):
        steps.append(Step("old_logprobs", partial(old_logprobs_of_new_groups, needs_reference=needs_reference)))
    elif algorithm.makes_old_pass(num_updates):
        # A later step replaces `old_logp` by log-probs of other policies; `sum_p2` needs those of the current policy.
        keeps_policy_logp = "sum_p2" in columns and (bypasses or replays)
        steps.append(Step("old_logprobs", partial(old_logprobs, columns=columns, keeps_policy_logp=keeps_policy_logp)))
    if bypasses:
        steps.append(Step("bypass_anchor", anchor_on_behaviour))
    if corrects:
        steps.append(Step("correction", _correction_step(algorithm, has_demonstrations)))
    if needs_reference and not algorithm.kl.reference.has_weights:
        steps.append(Step("rollout_reference", reference_on_behaviour))
    elif needs_reference:
        reuses_old = needs_old and not bypasses
        steps.append(Step("reference_logprobs", partial(reference_logprobs, reuses_old=reuses_old)))
    if algorithm.kl.context.name != "prompt" or algorithm.loss.name == "gold":
        steps.append(Step("taught", log_taught))
    if replays:
        steps.append(Step("replay_anchor", anchor_replayed_on_behaviour))
    if algorithm.critic is not None:
        steps.append(Step("values", critic_values))
    if algorithm.process is not None:
        steps.append(Step("process_rewards", process_rewards))
    if loss.reads_author_logp:
        steps.append(Step("author_logprobs", author_logprobs))
    # An advantage function of a plug-in may read the column, so it must exist.
    always = algorithm.kl.reward.coef > 0 or isinstance(algorithm.advantage, Plugin)
    steps.append(Step("token_rewards", partial(token_rewards, always=always)))
    if algorithm.kl.reward.coef > 0:
        steps.append(Step("kl_in_reward", partial(kl_in_reward, term=algorithm.kl.reward)))
    steps.append(advantages)
    if algorithm.kl.advantage.coef > 0:
        steps.append(Step("kl_in_advantages", partial(kl_in_advantages, term=algorithm.kl.advantage)))
    return steps


def sample_filter_steps(filters: Sequence[SlotFunction], replays: bool) -> list[Step]:
    """The steps of `trim`, in the order in which they run."""
    steps: list[Step] = []
    for name, function, options in filters:
        if name == "tree_edges" and replays:
            # Runs before all filters: a tree may have untrained edges even if the filters remove all its edges from this step.
            steps.insert(0, Step("unfinished_trees", partial(record_unfinished_trees, options=options)))
        if name == "pairs":
            steps.append(Step("pair_counts", log_pair_counts))
        if name == "seq_error":
            steps.append(Step("seq_error_metrics", partial(log_seq_errors, options=options)))
        if name in RESAMPLERS:
            steps.append(Step(name, partial(resample, function=function, options=options)))
        elif name in SAMPLE_FILTERS:
            steps.append(Step(name, partial(filter_samples, function=function, options=options)))
        elif name not in GROUP_FILTERS:
            steps.append(Step(name, partial(filter_by_plugin, function=function, options=options, name=name)))
    steps.append(Step("drop_empty", drop_empty_sequences))
    if any(name == "pairs" for name, *_ in filters):
        steps.append(Step("chosen_of_pair", mark_chosen))
    return steps


def _correction_step(algorithm: Algorithm, has_demonstrations: bool) -> Callable[[Batch, StepContext], Batch]:
    apply: ApplyCorrection = apply_correction if algorithm.replay is None else apply_to_replayed
    if has_demonstrations:
        apply = partial(apply_to_sampled, apply=apply)

    def correct(batch: Batch, context: StepContext) -> Batch:
        batch, metrics, context.budget, reason = apply(batch, algorithm.correction, context.budget)
        context.metrics |= metrics
        context.notes += [f"correction: {reason}"] if reason else []
        return batch

    return correct


def _advantage_step(algorithm: Algorithm, base: Path | None, part_weights: Mapping[str, float]) -> Step:
    function, options = slot_function(algorithm.advantage, ADVANTAGES, base), slot_options(algorithm.advantage)
    if algorithm.advantage.name == "gdpo" and not options["weights"]:
        options["weights"] = dict(part_weights)
    one = SlotFunction(algorithm.advantage.name, function, options)
    return Step("advantages", partial(compute_advantages, advantage=one))


# --- Shaping --------------------------------------------------------------------------------------------------------------


def _shape(batch: Batch, shaper: SlotFunction, step: int, max_tokens: int) -> Batch:
    """One shaper. It returns the new reward of each sequence [S], or what to add at each token [N]."""
    name, function, options = shaper
    if options.get("max_tokens", 0) is None:
        options = {**options, "max_tokens": max_tokens}
    result = function(batch, step, **options)
    if not isinstance(result, Tensor) or not result.is_floating_point():
        kind = result.dtype if isinstance(result, Tensor) else type(result).__name__
        raise UserError(f"shaper {name} returned {kind}; expected a tensor of finite numbers")
    if num_bad := int((~result.isfinite()).sum()):
        raise UserError(
            f"shaper {name} returned nan or inf for {num_bad} of {result.numel()}; expected a tensor of finite numbers"
        )
    result = result.double()
    largest = result.abs().max() if result.numel() else torch.zeros(())
    if problem := reward_problem(float(largest)):
        raise UserError(f"shaper {name} returned a reward out of range: {problem}")
    if result.shape == (batch.num_sequences,):
        if differs_within_trajectories(batch, result):
            raise UserError(
                f"shaper {name} returned different rewards for sequences of one trajectory: `trajectory_ids` tells which belong together, and "
                "a trajectory has one reward"
            )
        return batch.with_sequence(reward=result)
    if result.shape == (batch.num_tokens,):
        return batch.with_token(dense_rewards=batch.token.get("dense_rewards", torch.zeros_like(result)) + result)
    raise UserError(
        f"shaper {name} returned shape {tuple(result.shape)}; expected the new reward of each sequence "
        f"[{batch.num_sequences}] or what to add at each token [{batch.num_tokens}]"
    )
