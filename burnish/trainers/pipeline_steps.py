"""The steps of `pipeline.py` that prepare and trim a batch: `run(batch, context) -> batch`.

A step reads models and trainer state from the `StepContext`, and adds its metrics and notes to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from burnish.algorithms.advantages.returns import AdvantagesAndReturns
from burnish.algorithms.advantages.roles import AdvantagesAndBaselines
from burnish.algorithms.batch_columns import (
    ALIGNED,
    ANSWER_COLUMN,
    TAUGHT,
    TEACHER_PROMPT,
    place_rewards,
    replay_anchor_logp,
    with_replayed_behaviour_logp,
    without_replayed,
)
from burnish.algorithms.correction.budget import BudgetState
from burnish.algorithms.filters.filter_functions import (
    chosen_of_pair,
    has_untrained_edges,
    loss_mask_from_plugin,
    pair_counts,
    seq_error_metrics,
)
from burnish.algorithms.losses.model_losses import explained_variance
from burnish.algorithms.terms.loss_terms import kl_advantages, kl_reward
from burnish.algorithms.terms.spec import KlAdvantage, KlReward
from burnish.config.errors import UserError
from burnish.core.batch import Batch
from burnish.core.trajectory import role_key, role_name
from burnish.trainers.process_rewards import ProcessRewards
from burnish.trainers.state import TrainerState
from burnish.training.interfaces import AnyCritic, AnyLearner, AnyReference


@dataclass
class StepContext:
    """What the steps of one training step read, and what they report."""

    learner: AnyLearner
    reference: AnyReference | None = None
    critic: AnyCritic | None = None
    process: ProcessRewards | None = None
    state: TrainerState = field(default_factory=TrainerState)
    """Read: the KL coefficient, the mean reward of earlier steps, the mismatch budget."""
    is_critic_warmup: bool = False
    """Whether only the critic is trained. Its targets are then Monte-Carlo returns: lambda is 1, not the configured value."""
    metrics: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """Sentences for the user."""
    budget: BudgetState | None = None
    """The next state of a mismatch budget."""
    roles: Sequence[str] = ()
    """Names of the environment's roles."""
    role_baselines: dict[str, float] = field(default_factory=dict)
    """The baselines of advantage rae: those before the step, then those after it."""
    unfinished: list[int] | None = None
    """Indices into the packed trajectories of those with untrained tree edges; None if answers are no trees."""
    early: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """Columns of steps that ran while the rewards were computed, by the name of the step (`while_scoring.py`)."""

    def __post_init__(self) -> None:
        self.budget, self.role_baselines = self.state.budget, self.state.role_baselines


class SlotFunction(NamedTuple):
    """The function of a shaper or filter, with its options."""

    name: str
    function: Callable[..., Any]
    options: dict[str, Any]


# --- Log-probs ------------------------------------------------------------------------------------------------------------


def old_logprobs(
    batch: Batch, context: StepContext, columns: frozenset[str] = frozenset(), keeps_policy_logp: bool = False
) -> Batch:
    """`old_logp`: the log-probs of the policy before its first update, with other output `columns` of the same pass.

    The column of the entropy is `old_entropy`. `learner_experts` are the experts of this pass, which updates replay.
    """
    outputs = context.learner.outputs(batch, columns)
    old = outputs.pop("logp")
    if "entropy" in columns:
        outputs["old_entropy"] = outputs.pop("entropy")
    if keeps_policy_logp:
        outputs["policy_logp"] = old
    return batch.with_token(old_logp=old, **outputs)


def old_logprobs_of_new_groups(batch: Batch, context: StepContext, needs_reference: bool) -> Batch:
    """Compute `old_logp` of new groups only. Replayed groups get the log-probs of the policy that sampled them.

    If the reference is the policy itself, all groups are computed, because `ref_logp` reuses this pass.
    """
    new = without_replayed(batch)
    if new is batch or (needs_reference and context.reference is not None and context.reference.is_policy):
        return old_logprobs(batch, context)
    if new.num_sequences == 0:
        return batch.with_token(old_logp=with_replayed_behaviour_logp(batch, new.token["behaviour_logp"]))
    logp = context.learner.outputs(new, frozenset())["logp"]
    return batch.with_token(old_logp=with_replayed_behaviour_logp(batch, logp))


def anchor_on_behaviour(batch: Batch, context: StepContext) -> Batch:
    """Use the engine's log-probs as `old_logp` (correction `bypass`)."""
    return batch.with_token(old_logp=batch.token["behaviour_logp"])


def anchor_replayed_on_behaviour(batch: Batch, context: StepContext) -> Batch:
    """Use the behaviour log-probs of replayed groups as `old_logp`, unless `rollout_weight` already corrects for their age."""
    return batch if "rollout_weight" in batch.token else batch.with_token(old_logp=replay_anchor_logp(batch))


def reference_logprobs(batch: Batch, context: StepContext, reuses_old: bool) -> Batch:
    """Add `ref_logp`. If the reference is the current policy, `old_logp` is reused."""
    assert context.reference is not None
    if reuses_old and context.reference.is_policy and TEACHER_PROMPT not in batch.ragged:
        return batch.with_token(ref_logp=batch.token["old_logp"])
    return batch.with_token(ref_logp=context.reference.logprobs(batch))


def log_taught(batch: Batch, context: StepContext) -> Batch:
    """Metric `taught`: the share of samples whose teacher has something to show."""
    context.metrics["taught"] = float(batch.sequence[TAUGHT].double().mean())
    if ALIGNED in batch.token:  # the share of tokens that have a partner in the teacher's tokens
        context.metrics["aligned"] = float((batch.token[ALIGNED][batch.action_mask] >= 0).double().mean())
    return batch


def reference_on_behaviour(batch: Batch, context: StepContext) -> Batch:
    """Use the engine's log-probs as `ref_logp` (kl.reference `rollout`)."""
    return batch.with_token(ref_logp=batch.token["behaviour_logp"])


def author_logprobs(batch: Batch, context: StepContext) -> Batch:
    """`author_logp`: the log-probs under the policy that wrote each token, for losses that read them.

    Workers of a cluster get no `behaviour_logp`, because most losses do not read it.
    """
    return batch.with_token(author_logp=batch.token["behaviour_logp"])


# --- Values, rewards, advantages ------------------------------------------------------------------------------------------


def critic_values(batch: Batch, context: StepContext) -> Batch:
    """`values`: the critic's estimate at each token."""
    assert context.critic is not None
    return batch.with_token(values=context.critic.values(batch))


def process_rewards(batch: Batch, context: StepContext) -> Batch:
    """Add `process_rewards` of the process reward model, which also trains on the batch."""
    assert context.process is not None
    rewards, metrics, notes = context.process(batch)
    context.metrics |= metrics
    context.notes += notes
    return batch.with_token(process_rewards=rewards)


def token_rewards(batch: Batch, context: StepContext, always: bool) -> Batch:
    """`token_rewards`, where rewards differ between the tokens of a sequence: dense shaping, rewards of turns or steps."""
    dense = [batch.token[name] for name in ("dense_rewards", "step_rewards") if name in batch.token]
    if not dense and not always and "turn_reward" not in batch.ragged:
        return batch
    return batch.with_token(token_rewards=sum(dense, start=place_rewards(batch)))


def kl_in_reward(batch: Batch, context: StepContext, term: KlReward) -> Batch:
    """Subtract the KL penalty from `token_rewards`. The coefficient may be adaptive."""
    coef = term.coef if context.state.kl_coef is None else context.state.kl_coef
    rewards, kl = kl_reward(
        batch, batch.token["token_rewards"], term.estimator, coef, term.center, term.policy, term.clamp
    )
    context.metrics |= {"kl_coef": coef} | ({} if math.isnan(kl) else {"kl_reward": kl})
    return batch.with_token(token_rewards=rewards)


def kl_in_advantages(batch: Batch, context: StepContext, term: KlAdvantage) -> Batch:
    """Subtract coef (old - ref) from every token's advantage."""
    advantages = batch.token["advantages"] if "advantages" in batch.token else batch.sequence["advantages"]
    found = kl_advantages(batch, advantages, term.coef, term.clamp)
    sequence = {name: column for name, column in batch.sequence.items() if name != "advantages"}
    return replace(batch, sequence=sequence).with_token(advantages=found)


def compute_advantages(batch: Batch, context: StepContext, advantage: SlotFunction) -> Batch:
    """`advantages`, one value per sequence or per token; with a critic also `returns`, which it learns."""
    name, function, options = advantage
    options = dict(options)
    if options.get("baseline") == "ema":
        options["baseline"] = context.state.reward_mean or 0.0
    if context.is_critic_warmup:
        options["lam_critic"] = 1.0
    if name == "rae":
        result = _role_advantages(batch, context, partial(function, **options))
    else:
        result = function(batch, **options)
    if isinstance(result, AdvantagesAndReturns):
        batch = batch.with_token(returns=result.returns)
        explained = explained_variance(result.returns, batch.token["values"], batch.action_mask)
        if not math.isnan(explained):  # nan where all returns are equal
            context.metrics["vf_explained_var"] = explained
        result = result.advantages
    return _with_advantages(batch, result, name)


def _role_advantages(
    batch: Batch, context: StepContext, function: Callable[[Batch, dict[int, float]], AdvantagesAndBaselines]
) -> Tensor:
    """Advantages from the baselines of the roles, which go on from batch to batch."""
    names = {role_key(name): name for name in ("", *map(role_name, context.roles))}
    found = function(batch, {role_key(name): value for name, value in context.role_baselines.items()})
    context.role_baselines = {names[key]: value for key, value in found.baselines.items()}
    context.metrics |= {f"role_baseline/{name or 'all'}": value for name, value in context.role_baselines.items()}
    return found.advantages


def _with_advantages(batch: Batch, advantages: Tensor, name: str) -> Batch:
    if not isinstance(advantages, Tensor):
        raise UserError(f"advantage {name} returned {type(advantages).__name__}; expected a tensor")
    if not bool(torch.isfinite(advantages.float().square()).all()):  # statistics and losses square them in float32
        raise UserError(
            f"advantage {name} gave values that are not finite, or too large to be squared in float32; rewards were {batch.sequence['reward'].tolist()[:8]}..."
        )
    if "advantage_scale" in batch.sequence and advantages.shape in ((batch.num_sequences,), (batch.num_tokens,)):
        scale = batch.sequence["advantage_scale"].to(advantages.dtype)
        advantages = advantages * (scale if len(advantages) == len(scale) else scale[batch.sequence_ids])
    if advantages.shape == (batch.num_sequences,):
        return batch.with_sequence(advantages=advantages.detach())
    if advantages.shape == (batch.num_tokens,):
        return batch.with_token(advantages=advantages.detach())
    raise UserError(
        f"advantage {name} returned shape {tuple(advantages.shape)}; expected one value a sequence [{batch.num_sequences}] or a token [{batch.num_tokens}]"
    )


# --- Sample filters -------------------------------------------------------------------------------------------------------


def record_unfinished_trees(batch: Batch, context: StepContext, options: dict[str, Any]) -> Batch:
    """Record which trajectories have untrained tree edges, so that replay keeps them."""
    context.unfinished = batch.sequence["trajectory_ids"][has_untrained_edges(batch, **options)].tolist()
    return batch


def log_pair_counts(batch: Batch, context: StepContext) -> Batch:
    """Metrics of the filter `pairs`."""
    context.metrics |= pair_counts(batch)
    return batch


def log_seq_errors(batch: Batch, context: StepContext, options: dict[str, Any]) -> Batch:
    """Metrics of the filter `seq_error`."""
    context.metrics |= seq_error_metrics(batch, **options)
    return batch


def resample(batch: Batch, context: StepContext, function: Callable[..., Tensor], options: dict[str, Any]) -> Batch:
    """The sequences that the resampler draws. Every draw of a trajectory is an answer of its own."""
    index = function(batch, **options)
    trajectory = batch.sequence["trajectory_ids"][index]
    is_first = torch.ones_like(index, dtype=torch.bool)
    is_first[1:] = (trajectory[1:] != trajectory[:-1]) | (index[1:] <= index[:-1])
    return batch.select(index).with_sequence(**{ANSWER_COLUMN: is_first.cumsum(0)})


def filter_samples(
    batch: Batch, context: StepContext, function: Callable[..., Tensor], options: dict[str, Any]
) -> Batch:
    return batch.with_token(loss_mask=function(batch, **options))


def filter_by_plugin(
    batch: Batch, context: StepContext, function: Callable[..., Any], options: dict[str, Any], name: str
) -> Batch:
    return batch.with_token(loss_mask=loss_mask_from_plugin(function(batch, **options), batch, name))


def drop_empty_sequences(batch: Batch, context: StepContext) -> Batch:
    """Remove sequences that have no token left in the loss."""
    has_tokens = torch.zeros_like(batch.sequence["truncated"])
    has_tokens[batch.sequence_ids[batch.loss_mask]] = True
    return batch.select(has_tokens.nonzero().squeeze(1))


def mark_chosen(batch: Batch, context: StepContext) -> Batch:
    """`chosen`: the better answer of each pair."""
    return batch.with_sequence(chosen=chosen_of_pair(batch))
