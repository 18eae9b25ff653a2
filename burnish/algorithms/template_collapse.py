"""Template collapse: answers that no longer depend on their prompts, although the policy's entropy is high. RAGEN-2 (2604.06268).

The diagnosis scores answers under the prompts of others. With L_ij = log pi(answer i | prompt j), N prompts, and c(i) the prompt
that answer i was sampled for:

    matched_i = L_{i,c(i)};   marginal_i = logsumexp_j L_ij - log N
    I = mean(matched - marginal), at most log N;   H(Z|X) = -mean(matched);   H(Z) = -mean(marginal)
    z = I / (population std(marginal) + 1e-3);   retrieval = share of answers with argmax_j L_ij = c(i), by chance 1/N

A high H(Z|X) with a low I is template collapse. Both low is entropy collapse. An answer is the first turn of a trajectory, with
its reasoning and its action; its prompt is everything before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from burnish.algorithms.batch_columns import (
    Groups,
    per_trajectory,
    sampled_sequences,
    trajectory_groups,
    turns_of,
    without_replayed,
)
from burnish.core.batch import Batch
from burnish.core.segments import compact_ids, contiguous_sum, offsets_from_lengths

NUM_PROMPTS = 8
"""Prompts that are compared, each with one answer: 64 pairs."""
DEVIATION_EPS = 1e-3


class FirstAnswers(NamedTuple):
    """Where the prompt and the first answer of each of T trajectories are: tokens[begin:start] and tokens[start:end]."""

    begin: Tensor  # [T]
    start: Tensor  # [T]
    end: Tensor  # [T]
    group: Tensor  # [T] `group_ids`


def collapse_metrics(batch: Batch, logprobs: Callable[[Batch], Tensor]) -> dict[str, float]:
    """The metrics `collapse/...` of a batch; `logprobs` returns the policy's log-probs [N] of another batch.

    - `mutual_information`, `entropy_given_prompt`, `entropy`, `z`: the formulas above, with each L_ij divided by the answer's length;
      with the suffix `_seq`, without that division.
    - `retrieval` and `retrieval_chance`.
    - `reward_std`: the mean over groups of the sample deviation of their rewards. Without spread only regularisers have a gradient.
    - `repeated_answers`: share of trajectories whose first answer is also, token for token, one to another prompt.

    The first five need two different prompts. Demonstrations and replayed groups are left out.
    """
    batch = sampled_sequences(without_replayed(batch))
    if batch.num_sequences == 0 or not bool(batch.action_mask.any()):
        return {}
    answers = first_answers(batch)
    found = {"reward_std": reward_std(batch), "repeated_answers": repeated_answers(batch, answers)}
    chosen = distinct_prompts(batch, answers, NUM_PROMPTS)
    if len(chosen) > 1:
        crossed = cross_batch(batch, answers, chosen)
        logp = torch.where(crossed.action_mask, logprobs(crossed), 0.0).double()
        scores = contiguous_sum(logp, crossed.offsets).view(len(chosen), len(chosen)).t()  # [answers, prompts]
        lengths = (answers.end - answers.start)[chosen]
        own = torch.arange(len(chosen), device=scores.device)
        found |= prompt_dependence(scores / lengths[:, None], own)
        found |= {f"{name}_seq": value for name, value in prompt_dependence(scores, own).items() if name != "retrieval"}
        found["retrieval_chance"] = 1 / len(chosen)
    return {f"collapse/{name}": value for name, value in found.items()}


def prompt_dependence(log_probs: Tensor, own: Tensor) -> dict[str, float]:
    """I, H(Z|X), H(Z), z and retrieval of L [answers, prompts], with `own` [answers] the prompt of each answer."""
    matched = log_probs.gather(1, own[:, None]).squeeze(1)
    marginal = log_probs.logsumexp(1) - math.log(log_probs.shape[1])
    information = (matched - marginal).mean()
    return {
        "mutual_information": float(information),
        "entropy_given_prompt": float(-matched.mean()),
        "entropy": float(-marginal.mean()),
        "z": float(information / (marginal.std(correction=0) + DEVIATION_EPS)),
        "retrieval": float((log_probs.argmax(1) == own).double().mean()),
    }


def first_answers(batch: Batch) -> FirstAnswers:
    """The prompt and the first turn of every trajectory that has one."""
    turns = turns_of(batch)
    trajectory = trajectory_groups(batch)[0][turns.sequence_of_turn]
    is_first = torch.ones_like(trajectory, dtype=torch.bool)
    is_first[1:] = trajectory[1:] != trajectory[:-1]
    which = is_first.nonzero().squeeze(1)
    sequence = turns.sequence_of_turn[which]
    start = turns.token_indices[torch.searchsorted(turns.turn_of_token, which)]
    return FirstAnswers(batch.offsets[sequence], start, turns.last[which] + 1, batch.sequence["group_ids"][sequence])


def distinct_prompts(batch: Batch, answers: FirstAnswers, most: int) -> list[int]:
    """The first trajectory of each of the first `most` prompts that differ in their tokens or images."""
    found: dict[tuple[int, ...], int] = {}
    tokens = batch.distinct_tokens()
    for k, (begin, start) in enumerate(zip(answers.begin.tolist(), answers.start.tolist(), strict=True)):
        if len(found) == most:
            break
        found.setdefault(tuple(tokens[begin:start].tolist()), k)
    return list(found.values())


def cross_batch(batch: Batch, answers: FirstAnswers, chosen: list[int]) -> Batch:
    """Every chosen prompt followed by every chosen answer: the answers of the first prompt, then those of the second, ..."""
    spans = [tuple(int(column[k]) for column in answers[:3]) for k in chosen]
    prompts = [batch.tokens[begin:start] for begin, start, _ in spans]
    written = [batch.tokens[start:end] for _, start, end in spans]
    tokens = [part for prompt in prompts for answer in written for part in (prompt, answer)]
    flags = torch.tensor([False, True] * (len(chosen) ** 2), device=batch.tokens.device)
    sizes = torch.tensor([part.numel() for part in tokens], device=batch.tokens.device)
    mask = torch.repeat_interleave(flags, sizes)
    crossed = Batch(
        torch.cat(tokens),
        offsets_from_lengths(sizes.view(-1, 2).sum(1)),
        {"action_mask": mask, "loss_mask": mask},
        {"group_ids": torch.arange(len(chosen), device=batch.tokens.device).repeat_interleave(len(chosen))},
    )
    return crossed.with_pictures(
        [own for begin, start, _ in spans for own in [batch.spans_within(begin, start)] * len(chosen)]
    )


def reward_std(batch: Batch) -> float:
    """The mean over groups of the sample standard deviation of their rewards, one per trajectory; 0 for a group of one."""
    groups = Groups(*compact_ids(per_trajectory(batch, batch.sequence["group_ids"])))
    rewards = per_trajectory(batch, batch.sequence["reward"])
    deviation = groups.deviation(rewards - groups.mean(rewards))
    return float((deviation / groups.size).sum() / groups.num)


def repeated_answers(batch: Batch, answers: FirstAnswers) -> float:
    """The share of first answers that are, token for token, also the first answer to another prompt."""
    tokens, groups = batch.tokens.tolist(), answers.group.tolist()
    spans = zip(answers.start.tolist(), answers.end.tolist(), strict=True)
    texts = [tuple(tokens[start:end]) for start, end in spans]
    asked: dict[tuple[int, ...], set[int]] = {}
    for text, group in zip(texts, groups, strict=True):
        asked.setdefault(text, set()).add(group)
    return sum(len(asked[text]) > 1 for text in texts) / len(texts)
