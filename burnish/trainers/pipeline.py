"""From scored rollouts to a batch the learner can use: shaping, group filters, old and reference log-probs, values, KL,
advantages, sample filters. One method for each line of the loop, in its order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from burnish.algorithms.advantages.advantage_functions import ADVANTAGES
from burnish.algorithms.advantages.returns import AdvantagesAndReturns
from burnish.algorithms.batch_columns import (
    is_replayed,
    place_rewards,
    replay_anchor_logp,
    with_replayed_behaviour_logp,
    without_replayed,
)
from burnish.algorithms.correction.budget import BudgetState
from burnish.algorithms.curriculum.prompt_selection import linear_anneal
from burnish.algorithms.curriculum.spec import HardOnlyCurriculum
from burnish.algorithms.filters.filter_functions import (
    GROUP_FILTERS,
    RESAMPLERS,
    SAMPLE_FILTERS,
    chosen_of_pair,
    has_untrained_edges,
    loss_mask_from_plugin,
    pair_counts,
)
from burnish.algorithms.losses.model_losses import explained_variance
from burnish.algorithms.shaping.shapers import SHAPERS
from burnish.algorithms.spec import Algorithm
from burnish.algorithms.terms.loss_terms import kl_reward
from burnish.config.errors import UserError
from burnish.config.records import Plugin
from burnish.core.batch import Batch
from burnish.core.segments import compact_ids
from burnish.rewards.score_types import reward_problem
from burnish.trainers.minibatches import build_policy_loss, filter_function, slot_function, slot_options
from burnish.trainers.mismatch import GapReport, acts_before_advantages, apply_correction, gap_report
from burnish.trainers.process_rewards import ProcessRewards
from burnish.trainers.state import TrainerState, initial_state
from burnish.training.interfaces import AnyCritic, AnyLearner, AnyReference
from burnish.training.learner import Update


class Prepared(NamedTuple):
    """A batch with its columns, what to log of it, the next state of a mismatch budget, and what to tell the user."""

    batch: Batch
    stats: dict[str, float]
    budget: BudgetState | None = None
    notes: tuple[str, ...] = ()


class AlgorithmPipeline:
    """An algorithm with its functions looked up: the pure part of every step."""

    def __init__(
        self,
        algorithm: Algorithm,
        num_updates: int,
        base: Path | None = None,
        part_weights: Mapping[str, float] | None = None,
    ) -> None:
        """`part_weights` are those of the reward's parts, for an advantage that adds them up itself."""
        self.algorithm = algorithm
        self.advantage = slot_function(algorithm.advantage, ADVANTAGES, base)
        self.advantage_options = slot_options(algorithm.advantage)
        if algorithm.advantage.name == "gdpo" and not self.advantage_options["weights"]:
            self.advantage_options["weights"] = dict(part_weights or {})
        self.shapers = [(s.name, slot_function(s, SHAPERS, base), slot_options(s)) for s in algorithm.shaping]
        self.filters = [(f.name, filter_function(f, base), slot_options(f)) for f in algorithm.filters]
        self.loss = build_policy_loss(algorithm, base)
        self.bypass = algorithm.correction.name == "bypass"
        # With one update a batch the policy is its own anchor, unless something else reads those log-probs.
        own_anchor = num_updates == 1 and algorithm.replay is None
        self.needs_old = not own_anchor or algorithm.kl.reward.coef > 0 or bool(algorithm.needs("old"))
        # A KL over the whole vocabulary asks the reference during the update.
        anchored = not isinstance(algorithm.loss, Plugin) and algorithm.loss.anchored
        elsewhere = anchored or "reference" in algorithm.loss.needs or algorithm.kl.reward.coef > 0
        self.needs_ref = elsewhere or "kl" not in self.loss.needs
        self.needs_sum_p2 = bool(algorithm.needs("sum_p2"))
        # What comes back is anchored on the policy that wrote it, unless a correction weighs it by the policy of now.
        self.needs_old_of_all = (
            algorithm.replay is None or self.needs_sum_p2 or acts_before_advantages(algorithm.correction)
        )
        self.is_paired = any(name == "pairs" for name, *_ in self.filters)

    # --- before the log-probs ---------------------------------------------------------------------------------------------

    def shape(self, batch: Batch, step: int, max_tokens: int) -> Batch:
        """Rewards as the shapers leave them, in the listed order; `accuracy` is not theirs to change."""
        for name, shaper, options in self.shapers:
            if options.get("max_tokens", 0) is None:
                options = {**options, "max_tokens": max_tokens}
            result = shaper(batch, step, **options)
            if not isinstance(result, Tensor) or not result.is_floating_point():
                kind = result.dtype if isinstance(result, Tensor) else type(result).__name__
                raise UserError(f"shaper {name} returned {kind}; expected a tensor of finite numbers")
            if strange := int((~result.isfinite()).sum()):
                raise UserError(
                    f"shaper {name} returned nan or inf for {strange} of {result.numel()}; expected a tensor of finite numbers"
                )
            result = result.double()
            largest = result.abs().max() if result.numel() else torch.zeros(())
            if wrong := reward_problem(float(largest)):
                raise UserError(f"shaper {name} returned a reward out of range: {wrong}")
            if result.shape == (batch.num_sequences,):
                batch = batch.with_sequence(reward=result)
            elif result.shape == (batch.num_tokens,):
                dense = batch.token.get("dense_rewards", torch.zeros_like(result))
                batch = batch.with_token(dense_rewards=dense + result)
            else:
                raise UserError(
                    f"shaper {name} returned shape {tuple(result.shape)}; expected the new reward of each sequence "
                    f"[{batch.num_sequences}] or what to add at each token [{batch.num_tokens}]"
                )
        return batch

    def wanted(self, batch: Batch) -> Tensor:
        """[S] which sequences the group filters keep."""
        keep = torch.ones(batch.num_sequences, dtype=torch.bool, device=batch.tokens.device)
        for name, function, options in self.filters:
            if name in GROUP_FILTERS:
                keep &= function(batch, **options)
        return keep

    def select(self, batch: Batch, limit: int | None = None) -> Batch:
        """The groups the filters keep, at most `limit` new ones; `refill.short: fill` makes up for missing ones. Groups that come
        back are beside the limit."""
        keep = self.wanted(batch)
        groups, num = compact_ids(batch.sequence["group_ids"])
        if limit is not None:
            kept = torch.zeros(num, dtype=torch.bool, device=keep.device).index_fill(0, groups[keep], True)
            order = kept.nonzero().squeeze(1)
            if self.algorithm.refill.short == "fill":
                order = torch.cat([order, (~kept).nonzero().squeeze(1)])
            back = torch.zeros_like(kept).index_fill(0, groups[is_replayed(batch)], True)
            chosen = (kept & back).index_fill(0, order[~back[order]][:limit], True)
            keep = chosen[groups]
        return batch.select(keep.nonzero().squeeze(1))

    # --- columns ----------------------------------------------------------------------------------------------------------

    def prepare(
        self,
        batch: Batch,
        learner: AnyLearner,
        reference: AnyReference | None = None,
        critic: AnyCritic | None = None,
        state: TrainerState | None = None,
        warming: bool = False,
        process: ProcessRewards | None = None,
    ) -> Prepared:
        """Old and reference log-probs, values and process rewards where they are needed, token rewards, advantages; and what to log.

        `state` has what is steered: the coefficient of the KL in the reward, the mean reward of earlier steps. While the
        critic is `warming` it learns Monte-Carlo returns, whatever its lambda later.
        """
        state = state or initial_state(self.algorithm)
        stats: dict[str, float] = {}
        is_reference = reference is not None and self.needs_ref and reference.is_policy and not self.bypass
        if self.needs_sum_p2 or (self.needs_old and not self.bypass):
            wanted = frozenset({"sum_p2"}) if self.needs_sum_p2 else frozenset[str]()
            asked = batch if self.needs_old_of_all or is_reference else without_replayed(batch)
            outputs = learner.outputs(asked, wanted) if asked.num_sequences else {"logp": asked.token["behaviour_logp"]}
            old = outputs.pop("logp")
            if self.needs_sum_p2 and (self.bypass or self.algorithm.replay is not None):
                outputs["policy_logp"] = old  # `old_logp` will be of other policies, `sum_p2` is of this one
            batch = batch.with_token(
                old_logp=old if asked is batch else with_replayed_behaviour_logp(batch, old), **outputs
            )
        if self.bypass:  # the engine's policy is the anchor, whatever else was computed
            batch = batch.with_token(old_logp=batch.token["behaviour_logp"])
        batch, budget, why = apply_correction(batch, self.algorithm.correction, stats, state.budget)
        if reference is not None and self.needs_ref:
            same = is_reference and self.needs_old  # one pass serves both
            batch = batch.with_token(ref_logp=batch.token["old_logp"] if same else reference.logprobs(batch))
        if self.algorithm.replay is not None and self.needs_old and "rollout_weight" not in batch.token:
            batch = batch.with_token(old_logp=replay_anchor_logp(batch))  # weights count the steps in between already
        if critic is not None:
            batch = batch.with_token(values=critic.values(batch))
        notes = [f"correction: {why}"] if why else []
        if process is not None:
            batch, found, told = process(batch)
            stats |= found
            notes += told
        if self.loss.loss_options.get("weight") == "author":
            batch = batch.with_token(author_logp=batch.token["behaviour_logp"])
        batch = self._token_rewards(batch, state.kl_coef, stats)
        options = dict(self.advantage_options)
        if options.get("baseline") == "ema":
            options["baseline"] = state.reward_mean or 0.0
        if warming:
            options["lam_critic"] = 1.0
        estimate = self.advantage(batch, **options)
        if isinstance(estimate, AdvantagesAndReturns):
            batch = batch.with_token(returns=estimate.returns)
            explained = explained_variance(estimate.returns, batch.token["values"], batch.action_mask)
            stats |= {} if math.isnan(explained) else {"vf_explained_var": explained}  # returns that are all alike
            estimate = estimate.advantages
        batch = _with_advantages(batch, estimate, self.algorithm.advantage.name)
        return Prepared(batch, stats, budget, tuple(notes))

    def trainer_logp(self, batch: Batch, updates: Sequence[Update]) -> Tensor | None:
        """[N] the trainer's log-probs before the first update as far as the step knows them (else nan), where it does."""
        if self.needs_old and not self.bypass:
            return torch.where(batch.action_mask, batch.token["old_logp"], torch.nan)
        if len(updates) == 1 and updates[0].logp is not None:
            return torch.where(batch.loss_mask, updates[0].logp, torch.nan)
        return None

    def mismatch(self, whole: Batch, batch: Batch, updates: Sequence[Update], version: int) -> GapReport:
        """How far the sampler was from the trainer, in the batch that was prepared and in what filters left of it;
        `version` is the trainer's.

        Nothing where the learner's log-probs before the first update are not known: bypass with several updates. Samples that come
        back are left out: that they are of another policy is known.
        """
        learner = updates[0].logp if len(updates) == 1 else None
        if self.algorithm.replay is not None:
            fresh = ~is_replayed(batch)[batch.sequence_ids]
            learner = None if learner is None else learner[fresh]
            whole, batch = without_replayed(whole), without_replayed(batch)
        if self.needs_old and not self.bypass:
            return gap_report(whole, batch, None, self.algorithm.correction, version)
        if len(updates) == 1:
            return gap_report(whole, batch, learner, self.algorithm.correction, version)
        return GapReport()

    def _token_rewards(self, batch: Batch, kl_coef: float | None, stats: dict[str, float]) -> Batch:
        """`token_rewards`, only where rewards differ between the tokens of a sequence (KL in the reward, dense shaping, turns or
        steps that earned something) or a user's own estimator may look for them.
        """
        term = self.algorithm.kl.reward
        own = isinstance(self.algorithm.advantage, Plugin)
        added = [batch.token[name] for name in ("dense_rewards", "step_rewards") if name in batch.token]
        dense = bool(added) or "turn_reward" in batch.ragged
        if term.coef == 0 and not dense and not own:
            return batch
        rewards = place_rewards(batch)
        for column in added:
            rewards = rewards + column
        if term.coef > 0:
            coef = term.coef if kl_coef is None else kl_coef
            rewards, kl = kl_reward(batch, rewards, term.estimator, coef, term.center)
            stats |= {"kl_coef": coef} | ({} if math.isnan(kl) else {"kl_reward": kl})
        return batch.with_token(token_rewards=rewards)

    def lr_scale(self, step: int) -> float:
        """What a curriculum does to the learning rate."""
        curriculum = self.algorithm.curriculum
        if not isinstance(curriculum, HardOnlyCurriculum):
            return 1.0
        return linear_anneal(max(0, step - curriculum.start), curriculum.steps, 1.0, curriculum.lr_final)

    # --- after the advantages ---------------------------------------------------------------------------------------------

    def trim(self, batch: Batch, stats: dict[str, float] | None = None) -> Batch:
        """Sample filters and resampling; sequences with nothing left in the loss go. `stats` is given what to log of it."""
        for name, function, options in self.filters:
            if name == "pairs" and stats is not None:
                stats.update(pair_counts(batch))
            if name in RESAMPLERS:
                batch = batch.select(function(batch, **options))
            elif name in SAMPLE_FILTERS:
                batch = batch.with_token(loss_mask=function(batch, **options))
            elif name not in GROUP_FILTERS:
                batch = batch.with_token(loss_mask=loss_mask_from_plugin(function(batch, **options), batch, name))
        left = torch.zeros_like(batch.sequence["truncated"])
        left[batch.sequence_ids[batch.loss_mask]] = True
        batch = batch.select(left.nonzero().squeeze(1))
        return batch.with_sequence(chosen=chosen_of_pair(batch)) if self.is_paired else batch

    def unfinished(self, batch: Batch) -> list[int] | None:
        """The trajectories of trees that have edges for later steps, whether or not filters left any of them for this one; None where
        samples have no parts for other times."""
        options = next((options for name, _, options in self.filters if name == "tree_edges"), None)
        if options is None or self.algorithm.replay is None:
            return None
        found: list[int] = batch.sequence["trajectory_ids"][has_untrained_edges(batch, **options)].tolist()
        return found


def _with_advantages(batch: Batch, advantages: Tensor, name: str) -> Batch:
    """Advantages as the column they are: one a sequence, or one a token."""
    if not isinstance(advantages, Tensor):
        raise UserError(f"advantage {name} returned {type(advantages).__name__}; expected a tensor")
    if not bool(torch.isfinite(advantages.float().square()).all()):  # statistics and losses square them in float32
        raise UserError(
            f"advantage {name} gave values that are not finite, or too large to be squared in float32; rewards were {batch.sequence['reward'].tolist()[:8]}..."
        )
    if advantages.shape == (batch.num_sequences,):
        return batch.with_sequence(advantages=advantages.detach())
    if advantages.shape == (batch.num_tokens,):
        return batch.with_token(advantages=advantages.detach())
    raise UserError(
        f"advantage {name} returned shape {tuple(advantages.shape)}; expected one value a sequence [{batch.num_sequences}] or a token [{batch.num_tokens}]"
    )
