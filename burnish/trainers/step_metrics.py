"""What a step looked like: the numbers for metrics.jsonl and the rows for the tables in samples/.

What `performance.py` adds and names starting with `time/` are the only ones that differ between two identical runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from burnish.algorithms.batch_columns import sampled_sequences
from burnish.config.plugins import is_plugin
from burnish.config.schema import TrainConfig
from burnish.core.batch import Batch
from burnish.core.segments import compact_ids, segment_max, segment_min
from burnish.core.trajectory import Trajectory, with_accuracy
from burnish.data.demonstrations import PromptDemonstrations
from burnish.data.prompt_stream import PromptSample, PromptStream
from burnish.data.row import Row
from burnish.models.policy import AnyPolicy
from burnish.models.tokenizer import Tokenizer
from burnish.rollout.runner import no_demonstrations
from burnish.rollout.scoring import GroupDemonstrations, RolloutBatch
from burnish.run.run import PromptVisit
from burnish.trainers.context import StepResult
from burnish.trainers.mismatch import WorstToken
from burnish.training.learner import Update

# --- What episodes of several turns looked like: their numbers, and who said what, for the tables of samples.


def turn_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Turns an episode, the share that wanted more of them than they may have, environments that failed; nothing of single turns."""
    counts, errors = [len(t.turns) for t in trajectories], sum(t.finish == "error" for t in trajectories)
    cut = sum(t.finish == "turns" for t in trajectories)
    if max(counts, default=0) < 2 and not errors and not cut:
        return {}
    return {
        "rollout/turns_mean": sum(counts) / len(counts),
        "rollout/turns_max": float(max(counts)),
        "rollout/out_of_turns": cut / len(counts),
        "rollout/environment_errors": float(errors),
    }


def turns_json(trajectory: Trajectory, tokenizer: Tokenizer) -> str | None:
    """What was said after the prompt, as JSON: who (model or environment), the text, of a turn its state and what it earned.

    None where there is but one turn and no state, so that the completion says it all.
    """
    turns = trajectory.turns
    if len(turns) < 2 and all(span.state is None for span in turns):
        return None
    sequence, said = trajectory.sequences[-1], list[dict[str, Any]]()
    ends = [span.start for span in turns[1:]] + [len(sequence.tokens)]
    for span, end in zip(turns, ends, strict=True):
        tokens, written = sequence.tokens[span.start : end], sequence.action_mask[span.start : end]
        own = {"who": "model", "text": tokenizer.decode(tokens[written].tolist()), "reward": span.reward}
        said.append(own | ({} if span.state is None else {"state": span.state}))
        if not written.all():
            said.append({"who": "environment", "text": tokenizer.decode(tokens[~written].tolist())})
    return json.dumps(said, ensure_ascii=False)


# --- Demonstrations inside the groups of a run: found before it starts, and what a step says about them.

FindDemonstrations = Callable[[PromptSample, int], list[Trajectory]]


def build_demonstrations(
    config: TrainConfig, policy: AnyPolicy, stream: PromptStream, base: Path | None
) -> tuple[FindDemonstrations, str | None]:
    """What joins the samples of a draw, and a sentence about prompts that nothing joins; nobody where none are asked for."""
    data, each = config.data, config.data.demonstrations_per_group
    if not each:
        return no_demonstrations, None
    longest = max(stage.max_tokens for stage in config.rollout.all_stages())
    if policy.max_positions is not None:
        longest = min(longest, policy.max_positions - stream.longest())
    traces = PromptDemonstrations(data, policy.tokenizer, longest, config.seed, base)
    traces.needs_logp = getattr(config.algorithm.loss, "weight", None) == "author"
    traces.scan(stream.rows())
    return GroupDemonstrations(traces, each, policy.tokenizer), traces.report()


def demonstration_metrics(rollouts: RolloutBatch) -> dict[str, float]:
    """Of a step whose groups may have demonstrations: how many, their tokens, their mean reward and accuracy, and the prompts without."""
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


# --- What a step knew of every token of a sample: its advantage, and how far engine and trainer were apart on it.
#
# Only samples that are kept in a table are looked at, so that a step pays for some dozen sequences, whatever its batch.

OptionalFloats = list[float | None]


class TokenValues(NamedTuple):
    """Of each token the model wrote in the last sequence of a sample; None where there is no such value."""

    advantages: OptionalFloats | None
    """None where all tokens of a sample share its advantage."""
    gap: OptionalFloats | None
    """The trainer's log-prob less the engine's; None of a demonstration, which no engine sampled."""


def token_values(
    usable: Sequence[Trajectory], kept: set[str], batch: Batch | None, trainer_logp: Tensor | None
) -> dict[str, TokenValues]:
    """The values of the trajectories whose ids are `kept`, as far as filters left them in the batch.

    `usable` are the trajectories that the batch's `trajectory_ids` point into, `trainer_logp` [N] the trainer's log-probs before its
    first update, nan where not known.
    """
    if batch is None:
        return {}
    per_token = batch.token.get("advantages")
    if per_token is None and trainer_logp is None:
        return {}
    owners = batch.sequence["trajectory_ids"].tolist()
    chosen = [k for k, owner in enumerate(owners) if usable[owner].id in kept]
    part = batch.with_token(**({} if trainer_logp is None else {"trainer_logp": trainer_logp}))
    part = part.select(torch.tensor(chosen, dtype=torch.int64)).to(torch.device("cpu"))
    found = {}
    for k, index in enumerate(chosen):
        span = slice(int(part.offsets[k]), int(part.offsets[k + 1]))
        written = part.action_mask[span]
        sequence = usable[owners[index]].sequences[-1]
        if part.tokens[span].tolist() != sequence.tokens.tolist():
            continue  # an earlier context of an agent, which no table shows

        def of(column: Tensor, span: slice = span, written: Tensor = written) -> OptionalFloats:
            return [value if math.isfinite(value) else None for value in column[span][written].tolist()]

        advantages = None if per_token is None else of(part.token["advantages"])
        gap = None
        if trainer_logp is not None and not usable[owners[index]].is_demonstration:
            gap = of(part.token["trainer_logp"] - part.token["behaviour_logp"])
        found[usable[owners[index]].id] = TokenValues(advantages, gap)
    return found


MAX_SAMPLE_ROWS = 64
ANSWER_COLUMNS = ("solution", "ground_truth", "label", "target", "final_answer", "expected_answer", "reference_answer")
"""Where rows of other systems keep what is expected, for a reward function that takes it by that name."""
PREPARED_METRIC_NAMES = {"vf_explained_var": "critic/vf_explained_var"}


def training_metrics(
    rollouts: RolloutBatch, result: StepResult, step_s: float, is_shaped: bool = False
) -> dict[str, Any]:
    """All metrics of a training step; `is_shaped` where shapers change its rewards."""
    values = reward_metrics(rollouts) | rollout_metrics(rollouts)
    batch, updates = result.batch, result.updates
    if batch is not None:
        values["rollout/sequences_used"] = batch.num_sequences
        values["rollout/tokens_used"] = int(batch.loss_mask.sum())
        rewards = sampled_sequences(batch).sequence["reward"]
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
    """The mean of every statistic over the updates that have it."""
    names = sorted({name for update in updates for name in update.stats})
    seen = {name: [u.stats[name] for u in updates if name in u.stats] for name in names}
    return {name: sum(found) / len(found) for name, found in seen.items()}


def reward_metrics(rollouts: RolloutBatch) -> dict[str, float]:
    """Mean reward, accuracy where a reward says right or wrong, each part's mean, what timed out and what failed."""
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
    return values


def binary_reward_hint(config: TrainConfig, scored: RolloutBatch) -> str | None:
    """A hint where a user's function gives only 0 and 1 to held-out samples without saying that 1 is correct."""
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
    """Samples whose reward was not there in time."""
    return sum(bool(t.metadata.get("timed_out")) for t in rollouts.trajectories)


def mean_reward(rollouts: RolloutBatch) -> float | None:
    """Of the samples that could be scored, before shaping; None where there is none."""
    rewards = [t.reward for t in rollouts.trajectories if t.reward is not None]
    return sum(rewards) / len(rewards) if rewards else None


def rollout_metrics(rollouts: RolloutBatch) -> dict[str, float]:
    """Tokens that were sampled, those for baselines too, lengths, truncation, and how many groups had nothing to compare."""
    lengths = [t.num_actions for t in rollouts.trajectories]
    groups: dict[tuple[str, int], set[float]] = {}
    for t in rollouts.trajectories:
        if t.reward is not None:
            groups.setdefault((t.prompt_id, t.visit), set()).add(t.reward)
    return {
        "rollout/tokens": float(rollouts.num_tokens),
        "rollout/length_mean": sum(lengths) / len(lengths),
        "rollout/length_max": float(max(lengths)),
        "rollout/truncated": sum(t.truncated and t.finish != "turns" for t in rollouts.trajectories) / len(lengths),
        "rollout/zero_signal": sum(len(g) == 1 for g in groups.values()) / max(1, len(groups)),
    } | turn_metrics(rollouts.trajectories)


def no_signal_text(batch: Batch) -> str:
    """One line on a batch whose groups were all filtered out."""
    groups, num = compact_ids(batch.sequence["group_ids"])
    rewards = batch.sequence["reward"]
    high, low = segment_max(rewards, groups, num), segment_min(rewards, groups, num)
    best, equal = int((low == rewards.max()).sum()), int((high == low).sum())
    return (
        f"{equal} of {num} groups gave equal rewards to all their samples ({best} of them {float(rewards.max()):g}, "
        f"{equal - best} lower): nothing to compare; the prompts are all too easy or all too hard"
    )


def nothing_left_text(batch: Batch) -> str:
    """One line on a batch whose samples were all filtered out of the loss."""
    truncated = int(batch.sequence["truncated"].sum())
    return f"the filters took all {batch.num_sequences} sequences out of the loss ({truncated} of them truncated)"


def used_trajectory_ids(rollouts: RolloutBatch, batch: Batch | None) -> list[str]:
    """Ids of the trajectories whose tokens were in the loss."""
    if batch is None:
        return []
    usable = rollouts.usable
    return [usable[i].id for i in batch.sequence["trajectory_ids"].unique().tolist()]


def prompt_visits(rollouts: RolloutBatch) -> list[PromptVisit]:
    """How each prompt of the step was answered, with those that a filter dropped; one nobody could score has no scores."""
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


def sample_rows(
    rollouts: RolloutBatch,
    batch: Batch | None,
    tokenizer: Tokenizer,
    trainer_logp: Tensor | None = None,
    limit: int = MAX_SAMPLE_ROWS,
) -> list[dict[str, Any]]:
    """The first trajectories as rows of the samples table, whole groups first; `trainer_logp` [N] are log-probs of the batch."""
    advantages = _mean_advantages(rollouts, batch)
    trajectories = rollouts.grouped[:limit]
    shown = {t.id for t in trajectories}
    of_tokens = token_values(rollouts.usable, shown, batch, trainer_logp)
    rows = {(d.prompt.row.id, d.visit): d.prompt for d in rollouts.draws}
    table = []
    for t in trajectories:
        prompt, sequence = rows[t.prompt_id, t.visit], t.sequences[-1]
        written = sequence.tokens[sequence.action_mask].tolist()
        table.append(
            {
                "group": f"{t.prompt_id}#{t.visit}",
                "sample": t.sample,
                "data_source": prompt.row.data_source,
                "prompt": prompt.text,
                "completion": t.completion,
                "answer": expected_answer(prompt.row),
                "reward": t.reward,
                "accuracy": t.accuracy,
                "parts": t.parts,
                "advantage": advantages.get(t.id),
                "truncated": t.truncated,
                "finish": "demonstration" if t.is_demonstration else t.finish,
                "length": t.num_actions,
                "pieces": tokenizer.pieces(written),
                "logp": sequence.behaviour_logp[sequence.action_mask].tolist() if t.has_logp else None,
                **(of_tokens[t.id]._asdict() if t.id in of_tokens else {}),
                "turns": turns_json(t, tokenizer),
                "details": t.metadata.get("details"),
                "extra": t.metadata.get("extra"),
                "error": t.error,
            }
        )
    return table


def expected_answer(row: Row) -> str:
    """What a row expects, to be shown beside what was answered: its answer, or the column in which its reward function looks for one."""
    found = (row.answer, *(row.extra.get(name) for name in ANSWER_COLUMNS))
    answer = next((one for one in found if one is not None), "")
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str)


def worst_token_rows(rollouts: RolloutBatch, worst: Sequence[WorstToken], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The tokens of largest gap as rows of their table."""
    usable = rollouts.usable
    return [
        {
            "group": f"{usable[w.trajectory].prompt_id}#{usable[w.trajectory].visit}",
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
    """The text of a token, of what stands before and of what stands after it.

    The texts are what each part adds to the one before: a decoder may treat the first token of a text specially, and
    writes a character only once all its bytes are there.
    """
    tokens = [*worst.before, worst.token, *worst.after]
    ends = (len(worst.before), len(worst.before) + 1, len(tokens))
    before, to_here, whole = (tokenizer.decode(tokens[:end], skip_special=False) for end in ends)
    here, there = _common_prefix_length(before, to_here), _common_prefix_length(to_here, whole)
    return {"before": before[:here], "text": to_here[here:], "after": whole[there:]}


def _common_prefix_length(one: str, other: str) -> int:
    """How many characters two texts begin with together."""
    return next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _mean_advantages(rollouts: RolloutBatch, batch: Batch | None) -> dict[str, float]:
    """Mean advantage of each trajectory in the batch."""
    if batch is None:
        return {}
    if "advantages" in batch.sequence:
        per_sequence = batch.sequence["advantages"]
    else:
        mask, ids = batch.loss_mask, batch.sequence_ids
        total = torch.zeros(batch.num_sequences, dtype=torch.float64, device=ids.device)
        total.index_add_(0, ids[mask], batch.token["advantages"][mask].double())
        per_sequence = total / ids[mask].bincount(minlength=batch.num_sequences).clamp(min=1)
    usable = rollouts.usable
    owners = batch.sequence["trajectory_ids"].tolist()
    return {usable[i].id: a for i, a in zip(owners, per_sequence.tolist(), strict=True) if math.isfinite(a)}
