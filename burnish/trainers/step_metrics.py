"""The metrics of a step for metrics.jsonl, and its rows for the tables in samples/.

Only the metrics of `performance.py` and those named `time/...` differ between two identical runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from burnish.algorithms.batch_columns import per_trajectory, sampled_sequences
from burnish.config.plugins import is_plugin
from burnish.config.schema import TrainConfig
from burnish.core.batch import Batch
from burnish.core.segments import compact_ids, segment_max, segment_min
from burnish.core.trajectory import TokenSequence, Trajectory, with_accuracy
from burnish.data.row import Row
from burnish.models.tokenizer import Tokenizer
from burnish.rollout.episode_metrics import episode_metrics, role_rewards, turn_metrics
from burnish.rollout.scoring import RolloutBatch
from burnish.run.run import PromptVisit
from burnish.trainers.context import StepResult
from burnish.trainers.episode_rows import episode_columns, opening_text
from burnish.trainers.mismatch import WorstToken
from burnish.training.learner import Update

MAX_SAMPLE_ROWS = 64
"""Rows of a step in the samples table."""
ANSWER_COLUMNS = ("solution", "ground_truth", "label", "target", "final_answer", "expected_answer", "reference_answer")
"""Columns in which other systems keep the expected answer, for a reward function that takes it by that name."""
PREPARED_METRIC_NAMES = {"vf_explained_var": "critic/vf_explained_var"}
"""Metrics of the pipeline that do not belong under `actor/`."""
OptionalFloats = list[float | None]


def training_metrics(
    rollouts: RolloutBatch, result: StepResult, step_s: float, is_shaped: bool = False
) -> dict[str, Any]:
    """Metrics of rollouts, rewards, updates and mismatch. `is_shaped`: shapers change the rewards."""
    values = reward_metrics(rollouts) | rollout_metrics(rollouts)
    batch, updates = result.batch, result.updates
    if batch is not None:
        values["rollout/sequences_used"] = batch.num_sequences
        values["rollout/tokens_used"] = int(batch.loss_mask.sum())
        sampled = sampled_sequences(batch)
        rewards = per_trajectory(sampled, sampled.sequence["reward"])
        if is_shaped and rewards.numel():
            values["reward/shaped"] = float(rewards.mean())
    values["actor/updates"] = sum(u.skipped is None for u in updates)
    values |= {name if "/" in name else f"actor/{name}": value for name, value in mean_stats(updates).items()}
    values |= {f"critic/{name}": value for name, value in mean_stats(result.critic_updates).items()}
    for name, value in result.metrics.items():
        values[name if "/" in name else PREPARED_METRIC_NAMES.get(name, f"actor/{name}")] = value
    values |= result.mismatch.metrics
    values["time/step_s"] = step_s
    values["time/rollout_s"] = rollouts.rollout_s
    values["time/reward_s"] = rollouts.reward_s
    values["time/tokens_per_s"] = rollouts.num_tokens / step_s
    return values


def mean_stats(updates: Sequence[Update]) -> dict[str, float]:
    """The mean of each statistic over the updates that have it."""
    names = sorted({name for update in updates for name in update.stats})
    seen = {name: [u.stats[name] for u in updates if name in u.stats] for name in names}
    return {name: sum(found) / len(found) for name, found in seen.items()}


def reward_metrics(rollouts: RolloutBatch) -> dict[str, float]:
    """Mean reward, accuracy, mean of each reward part and of each role of a game, and counts of timed-out and failed samples."""
    scored = [t for t in rollouts.trajectories if t.reward is not None]
    values = {
        "reward/failed": float(len(rollouts.failed)),
        "reward/answer_timeout": float(num_timed_out(rollouts)),
    }
    if (mean := mean_reward(rollouts)) is not None:
        values["reward/mean"] = mean
    if greedy := [t.reward for t in rollouts.greedy if t.reward is not None]:
        values["reward/greedy"] = sum(greedy) / len(greedy)
    if rollouts.continued:
        values["rollout/continued"] = float(len(rollouts.continued))
        values["reward/continued_failed"] = float(sum(t.reward is None for t in rollouts.continued))
    if verdicts := with_accuracy(scored):
        values["reward/accuracy"] = sum(accuracy for _, accuracy in verdicts) / len(verdicts)
    for name in sorted({k for t in scored for k in t.parts}):
        part = [t.parts[name] for t in scored if name in t.parts]
        values[f"reward/part/{name}"] = sum(part) / len(part)
    return values | {f"reward/{name}": value for name, value in role_rewards(scored).items()}


def binary_reward_hint(config: TrainConfig, scored: RolloutBatch) -> str | None:
    """Return a hint if a plug-in's reward gives only 0 and 1 to held-out samples but `correct_at` is not set."""
    own = [i for i, part in enumerate(config.reward.parts) if is_plugin(part.name) and part.correct_at is None]
    rewards = {t.reward for t in scored.trajectories if t.reward is not None}
    if not own or with_accuracy(scored.trajectories) or rewards != {0.0, 1.0}:
        return None
    part = own[0]
    return (
        f"every held-out reward is 0 or 1; if 1 means correct, reward.parts.{part}.correct_at=1 (or True and False in place of 1 and 0) gives "
        "accuracy and pass@k, and filters by accuracy work"
    )


def num_timed_out(rollouts: RolloutBatch) -> int:
    """Samples whose reward timed out."""
    return sum(bool(t.metadata.get("timed_out")) for t in rollouts.trajectories)


def mean_reward(rollouts: RolloutBatch) -> float | None:
    """Mean reward of the scored samples, before shaping; None without any."""
    rewards = [t.reward for t in rollouts.trajectories if t.reward is not None]
    return sum(rewards) / len(rewards) if rewards else None


def rollout_metrics(rollouts: RolloutBatch) -> dict[str, float]:
    """Sampled tokens (baselines included), lengths, truncation, and the share of groups with equal rewards."""
    lengths = [t.num_actions for t in rollouts.trajectories]
    groups: dict[str, set[float]] = {}
    for t in rollouts.trajectories:
        if t.reward is not None:
            groups.setdefault(t.group_id, set()).add(t.reward)
    values = {
        "rollout/tokens": float(rollouts.num_tokens),
        "rollout/length_mean": sum(lengths) / len(lengths),
        "rollout/length_max": float(max(lengths)),
        "rollout/truncated": sum(t.truncated and t.finish != "turns" for t in rollouts.trajectories) / len(lengths),
        "rollout/zero_signal": sum(len(g) == 1 for g in groups.values()) / max(1, len(groups)),
    }
    values |= {f"rollout/{name}": value for name, value in turn_metrics(rollouts.trajectories).items()}
    return values | {f"environment/{name}": value for name, value in episode_metrics(rollouts.trajectories).items()}


def no_signal_text(batch: Batch) -> str:
    """Explain in one line why the group filters removed all groups."""
    groups, num = compact_ids(batch.sequence["group_ids"])
    rewards = batch.sequence["reward"]
    high, low = segment_max(rewards, groups, num), segment_min(rewards, groups, num)
    best, equal = int((low == rewards.max()).sum()), int((high == low).sum())
    return (
        f"{equal} of {num} groups gave equal rewards to all their samples ({best} of them {float(rewards.max()):g}, "
        f"{equal - best} lower): nothing to compare; the prompts are all too easy or all too hard"
    )


def nothing_left_text(batch: Batch) -> str:
    """Explain in one line why the sample filters removed all sequences."""
    truncated = int(batch.sequence["truncated"].sum())
    return f"the filters took all {batch.num_sequences} sequences out of the loss ({truncated} of them truncated)"


def used_trajectory_ids(rollouts: RolloutBatch, batch: Batch | None) -> list[str]:
    """Ids of the trajectories whose tokens were in the loss."""
    if batch is None:
        return []
    usable = rollouts.usable
    return [usable[i].id for i in batch.sequence["trajectory_ids"].unique().tolist()]


def prompt_visits(rollouts: RolloutBatch) -> list[PromptVisit]:
    """The scores of each prompt of the step, filtered groups included."""
    groups: dict[tuple[str, int], list[Trajectory]] = {}
    verdicts = {t.id: accuracy for t, accuracy in with_accuracy(rollouts.trajectories)}
    for t in rollouts.trajectories:
        groups.setdefault((t.prompt_id, t.visit), []).append(t)
    found = []
    for (prompt_id, visit), samples in groups.items():
        rewards = [t.reward for t in samples if t.reward is not None]
        known = [verdicts[t.id] for t in samples if t.id in verdicts]
        found.append(PromptVisit(prompt_id, visit, len(rewards), sum(rewards), len(known), sum(known)))
    return found


def demonstration_metrics(rollouts: RolloutBatch) -> dict[str, float]:
    """Number of demonstrations in the groups, their tokens, mean reward and accuracy, and prompts without any."""
    found = rollouts.demonstrations
    rewards = [t.reward for t in found if t.reward is not None]
    verdicts = [accuracy for _, accuracy in with_accuracy(found)]
    groups = {(t.prompt_id, t.visit) for t in found}
    values = {
        "demonstrations/number": float(len(found)),
        "demonstrations/tokens": float(sum(t.num_actions for t in found)),
        "demonstrations/missing": float(len(rollouts.draws) - len(groups)),
    }
    values |= {"demonstrations/reward": sum(rewards) / len(rewards)} if rewards else {}
    return values | ({"demonstrations/accuracy": sum(verdicts) / len(verdicts)} if verdicts else {})


# --- Rows of the tables ----------------------------------------------------------------------------------------------------


def sample_rows(
    rollouts: RolloutBatch, result: StepResult, tokenizer: Tokenizer, limit: int = MAX_SAMPLE_ROWS
) -> list[dict[str, Any]]:
    """The first trajectories as rows of the samples table, with what the step found about them. A validation has an empty result."""
    advantages = _mean_advantages(rollouts, result.batch)
    trajectories = rollouts.grouped[:limit]
    shown = {t.id for t in trajectories}
    of_tokens = token_values(rollouts.usable, shown, result)
    rows = {(d.prompt.row.id, d.visit): d.prompt for d in rollouts.draws}
    table = []
    for t in trajectories:
        prompt, sampled = rows[t.prompt_id, t.visit], sampled_tokens(t)
        table.append(
            {
                "group": t.group_id,
                "sample": t.sample,
                "data_source": prompt.row.data_source,
                "prompt": opening_text(t, prompt, tokenizer),
                "completion": t.completion,
                "answer": expected_answer(prompt.row),
                "reward": t.reward,
                "accuracy": t.accuracy,
                "parts": t.parts,
                "advantage": advantages.get(t.id),
                "truncated": t.truncated,
                "finish": "demonstration" if t.is_demonstration else t.finish,
                "length": t.num_actions,
                "pieces": tokenizer.pieces([token for token, _ in sampled]),
                "logp": [logp for _, logp in sampled] if t.has_logp else None,
                "mask": None if result.batch is None else [0.0] * len(sampled),  # unless the batch has the sample
                **(of_tokens[t.id]._asdict() if t.id in of_tokens else {}),
                **episode_columns(t, tokenizer),
                "details": t.metadata.get("details"),
                "extra": t.metadata.get("extra"),
                "error": t.error,
            }
        )
    return table


def sampled_tokens(trajectory: Trajectory) -> list[tuple[int, float]]:
    """Each sampled token with its log-prob, sequence after sequence."""
    found: list[tuple[int, float]] = []
    for s in trajectory.sequences:
        found += zip(s.tokens[s.action_mask].tolist(), s.behaviour_logp[s.action_mask].tolist(), strict=True)
    return found


class TokenValues(NamedTuple):
    """Values of each sampled token of a sample, sequence after sequence; None where unknown."""

    advantages: OptionalFloats | None
    """None if all tokens of a sample share its advantage."""
    gap: OptionalFloats | None
    """Trainer log-prob minus engine log-prob; None for a demonstration."""
    entropy: OptionalFloats | None
    """Entropy of the policy before its first update on the batch."""
    mask: OptionalFloats
    """1 if the token was in the loss, else 0."""


def token_values(usable: Sequence[Trajectory], shown: set[str], result: StepResult) -> dict[str, TokenValues]:
    """Token values of the trajectories whose ids are in `shown` and that are in the batch of a step.

    Only shown samples are read, so that the cost does not grow with the batch. The batch's `trajectory_ids` index `usable`.
    """
    batch = result.batch
    if batch is None:
        return {}
    owners = batch.sequence["trajectory_ids"].tolist()
    chosen = [k for k, owner in enumerate(owners) if usable[owner].id in shown]
    columns = {"trainer_logp": result.trainer_logp, "policy_entropy": result.entropy}
    part = batch.with_token(**{name: column for name, column in columns.items() if column is not None})
    part = part.select(torch.tensor(chosen, dtype=torch.int64)).to(torch.device("cpu"))
    per_token, entropy = part.token.get("advantages"), part.token.get("policy_entropy")
    gap = None if result.trainer_logp is None else part.token["trainer_logp"] - part.token["behaviour_logp"]
    of_trajectory: dict[int, list[slice]] = {}
    for k, index in enumerate(chosen):
        of_trajectory.setdefault(owners[index], []).append(slice(int(part.offsets[k]), int(part.offsets[k + 1])))
    found = {}
    for owner, spans in of_trajectory.items():
        t = usable[owner]
        places = [_place_in_batch(sequence, part, spans) for sequence in t.sequences]
        gaps = None if gap is None or t.is_demonstration else _sampled_values(t, gap, places)
        in_loss = [value or 0.0 for value in _sampled_values(t, part.loss_mask.float(), places)]
        found[t.id] = TokenValues(
            None if per_token is None else _sampled_values(t, per_token, places),
            gaps,
            None if entropy is None else _sampled_values(t, entropy, places),
            [*in_loss],
        )
    return found


def _place_in_batch(sequence: TokenSequence, batch: Batch, spans: Sequence[slice]) -> slice | None:
    """Which of the spans of the batch holds the sequence; None if a filter removed it."""
    columns = torch.from_numpy(sequence.tokens), torch.from_numpy(sequence.action_mask)
    same = (span for span in spans if torch.equal(batch.tokens[span], columns[0]))
    return next((span for span in same if torch.equal(batch.action_mask[span], columns[1])), None)


def _sampled_values(trajectory: Trajectory, column: Tensor, places: Sequence[slice | None]) -> OptionalFloats:
    """The values of a column at the sampled tokens of each sequence; None for sequences that are not in the batch."""
    found: OptionalFloats = []
    for sequence, span in zip(trajectory.sequences, places, strict=True):
        written = torch.from_numpy(sequence.action_mask)
        values = [math.nan] * int(written.sum()) if span is None else column[span][written].tolist()
        found += [value if math.isfinite(value) else None for value in values]
    return found


def expected_answer(row: Row) -> str:
    """The expected answer of a row: its `answer`, or the first known column that a reward function may read."""
    found = (row.answer, *(row.extra.get(name) for name in ANSWER_COLUMNS))
    answer = next((one for one in found if one is not None), "")
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str)


def worst_token_rows(rollouts: RolloutBatch, worst: Sequence[WorstToken], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The tokens with the largest gap as rows of their table."""
    usable = rollouts.usable
    return [
        {
            "group": usable[w.trajectory].group_id,
            "sample": usable[w.trajectory].sample,
            "position": w.position,
            "token": w.token,
            **_token_with_context(w, tokenizer),
            "behaviour_logp": w.engine,
            "trainer_logp": w.trainer,
            "gap": w.gap,
            "weight": w.weight,
        }
        for w in worst
    ]


def _token_with_context(worst: WorstToken, tokenizer: Tokenizer) -> dict[str, str]:
    """The text of a token, and the text before and after it.

    Each text is what its tokens add to the decoded text before them. A decoder may treat the first token specially, and it emits a
    character only when all its bytes are there.
    """
    tokens = [*worst.before, worst.token, *worst.after]
    ends = (len(worst.before), len(worst.before) + 1, len(tokens))
    before, to_here, whole = (tokenizer.decode(tokens[:end], skip_special=False) for end in ends)
    here, there = _common_prefix_length(before, to_here), _common_prefix_length(to_here, whole)
    return {"before": before[:here], "text": to_here[here:], "after": whole[there:]}


def _common_prefix_length(one: str, other: str) -> int:
    """Length of the common prefix of two texts."""
    return next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _mean_advantages(rollouts: RolloutBatch, batch: Batch | None) -> dict[str, float]:
    """The mean advantage of each trajectory in the batch."""
    if batch is None:
        return {}
    owners, ids = batch.sequence["trajectory_ids"], batch.sequence_ids
    mask = batch.loss_mask
    if "advantages" in batch.sequence:
        values, of_value = batch.sequence["advantages"].double(), owners
    else:
        values, of_value = batch.token["advantages"][mask].double(), owners[ids[mask]]
    usable = rollouts.usable
    num = len(usable)
    total = torch.zeros(num, dtype=torch.float64, device=ids.device).index_add_(0, of_value, values)
    means = (total / of_value.bincount(minlength=num).clamp(min=1)).tolist()
    return {usable[i].id: means[i] for i in owners.unique().tolist() if math.isfinite(means[i])}
