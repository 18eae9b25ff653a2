"""Divergences between a student and a teacher with another tokenizer, without storing [N, vocab].

Both tokenisations of an answer are cut into groups of tokens that spell the same bytes (`models/token_alignment.py`). A group has a
distribution on each side: the next-token distribution at one of its positions, times the probabilities of its other tokens,

- observed: the first position, times the later tokens as they were written;
- bayesian: the last position, times the earlier tokens as they were written, each at least 1e-8.

The masses are not renormalised. The loss of a group is w_m JSD + w_u L1 (GOLD, TRL): the generalised Jensen-Shannon divergence on
the tokens that both vocabularies have, and on all others the distance of the masses sorted from large to small (ULD, 2402.12030).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from burnish.models.kernels.divergence import generalised_jsd
from burnish.models.kernels.half_products import add_product
from burnish.models.kernels.logprob import head_logprob, product_gradient, row_chunks, scaled_logits

MIN_LOG_FACTOR = math.log(1e-8)
"""The least log-probability of an earlier token in the bayesian form."""


class SharedVocabulary(NamedTuple):
    """Token ids of two vocabularies: the pairs that spell the same, and those of either side without a partner."""

    student: Tensor  # [K]
    teacher: Tensor  # [K]
    student_only: Tensor
    teacher_only: Tensor

    @property
    def share(self) -> float:
        """Shared tokens as a part of the teacher's vocabulary."""
        return self.student.numel() / max(self.teacher.numel() + self.teacher_only.numel(), 1)

    def to(self, device: torch.device) -> SharedVocabulary:
        return SharedVocabulary(*(ids.to(device) for ids in self))


class GroupComparison(NamedTuple):
    """How two groups are compared."""

    vocabulary: SharedVocabulary
    alpha: float = 0.5
    merge: str = "observed"
    """observed or bayesian."""
    compare: str = "hybrid"
    """hybrid, or sorted: all masses sorted, as in ULD."""
    matched_weight: float | None = None
    """w_m; None is the share of the teacher's vocabulary that both have."""
    unmatched_weight: float | None = None
    """w_u; None is 1 - w_m."""


class AlignedGroups(NamedTuple):
    """A teacher's states at T tokens of its own, and the groups 0..G-1 in which they meet M tokens of the student."""

    hidden: Tensor  # [T, hidden]
    weight: Tensor  # [teacher's vocabulary, hidden]
    targets: Tensor  # [T] the teacher's tokens
    teacher_group: Tensor  # [T], rising
    student_group: Tensor  # [M], rising but for -1: a token in no group
    num_groups: int
    comparison: GroupComparison
    softcap: float | None = None
    """The soft cap of the teacher's logits; None for a model without one."""


def group_loss(log_s: Tensor, log_q: Tensor, comparison: GroupComparison) -> Tensor:
    """[G, student's vocabulary] and [G, teacher's vocabulary] log-masses to [G] losses, with gradient to the student."""
    vocabulary = comparison.vocabulary
    if comparison.compare == "sorted":
        student = torch.cat([vocabulary.student, vocabulary.student_only])
        teacher = torch.cat([vocabulary.teacher, vocabulary.teacher_only])
        return sorted_distance(log_s[:, student].exp(), log_q[:, teacher].exp())
    matched = vocabulary.share if comparison.matched_weight is None else comparison.matched_weight
    unmatched = 1 - matched if comparison.unmatched_weight is None else comparison.unmatched_weight
    shared = generalised_jsd(log_s[:, vocabulary.student], log_q[:, vocabulary.teacher], comparison.alpha)
    rest = sorted_distance(log_s[:, vocabulary.student_only].exp(), log_q[:, vocabulary.teacher_only].exp())
    return matched * shared + unmatched * rest


def sorted_distance(s: Tensor, q: Tensor) -> Tensor:
    """[G, A] and [G, B] masses to [G]: sum of |s - q| with both sorted from large to small, the shorter one filled with 0."""
    s, q = (x.sort(-1, descending=True).values for x in (s, q))
    width = max(s.shape[-1], q.shape[-1])
    s, q = (torch.nn.functional.pad(x, (0, width - x.shape[-1])) for x in (s, q))
    return (s - q).abs().sum(-1)


def merged_positions(group: Tensor, num_groups: int, merge: str) -> Tensor:
    """[G] the position of each group whose distribution is taken: the first one (observed) or the last one (bayesian)."""
    inside = (group >= 0).nonzero().squeeze(1)
    ids = torch.arange(num_groups, device=group.device)
    if merge == "observed":
        return inside[torch.searchsorted(group[inside], ids)]
    return inside[torch.searchsorted(group[inside], ids, right=True) - 1]


def merged_log_mass(logp: Tensor, group: Tensor, position: Tensor, merge: str) -> Tensor:
    """[G] log of the product of the probabilities [M] of a group's tokens, without the token at the chosen position."""
    if merge == "bayesian":
        logp = logp.clamp(min=MIN_LOG_FACTOR)
    is_factor = group >= 0
    is_factor = is_factor.index_fill(0, position, False)
    return logp.new_zeros(position.shape[0]).index_add(0, group[is_factor], logp[is_factor])


def head_aligned(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    groups: AlignedGroups,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """log p(target), the entropy, and the loss of a group at its last token, 0 at all others; [M] each."""
    logp, entropy = head_logprob(hidden, weight, targets, temperature, with_entropy=True, softcap=softcap)
    assert entropy is not None
    merge, num = groups.comparison.merge, groups.num_groups
    if num == 0:
        return logp, entropy, logp * 0
    own = merged_positions(groups.student_group, num, merge)
    own_mass = merged_log_mass(logp, groups.student_group, own, merge)
    with torch.no_grad():
        at = merged_positions(groups.teacher_group, num, merge)
        teacher_logp, _ = head_logprob(
            groups.hidden, groups.weight, groups.targets, temperature, softcap=groups.softcap
        )
        mass = merged_log_mass(teacher_logp, groups.teacher_group, at, merge)
        teacher = groups.hidden[at], groups.weight, mass
    softcaps = softcap, groups.softcap
    found = _GroupLoss.apply(hidden[own], weight, own_mass, teacher, groups.comparison, temperature, softcaps)
    last = merged_positions(groups.student_group, num, "bayesian")
    return logp, entropy, torch.zeros_like(logp).index_copy(0, last, found)


class _GroupLoss(torch.autograd.Function):
    """The output heads in chunks of groups. The backward computes each chunk's logits again and differentiates them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        log_mass: Tensor,
        teacher: tuple[Tensor, Tensor, Tensor],
        comparison: GroupComparison,
        temperature: float,
        softcaps: tuple[float | None, float | None],
    ) -> Tensor:
        ctx.temperature, ctx.comparison, ctx.softcaps = temperature, comparison, softcaps
        ctx.save_for_backward(hidden, weight, log_mass, *teacher)
        losses = torch.zeros_like(log_mass)
        for i, j in _chunks(hidden, weight, teacher[1]):
            logits = scaled_logits(hidden[i:j], weight, temperature, softcaps[0])
            part = teacher[0][i:j], teacher[1], teacher[2][i:j]
            losses[i:j] = _losses(logits, log_mass[i:j], part, comparison, temperature, softcaps[1])
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        hidden, weight, log_mass, *teacher = ctx.saved_tensors
        grad_hidden, grad_mass = torch.empty_like(hidden), torch.empty_like(log_mass)
        # Sum the chunks in float32: in a half type the sum would be rounded once per chunk.
        wide = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        for i, j in _chunks(hidden, weight, teacher[1]):
            logits = scaled_logits(hidden[i:j], weight, ctx.temperature, ctx.softcaps[0]).requires_grad_()
            mass = log_mass[i:j].detach().requires_grad_()
            with torch.enable_grad():
                part = teacher[0][i:j], teacher[1], teacher[2][i:j]
                losses = _losses(logits, mass, part, ctx.comparison, ctx.temperature, ctx.softcaps[1])
            grad_logits, grad_mass[i:j] = torch.autograd.grad(losses, (logits, mass), grad[i:j])
            grad_logits = product_gradient(grad_logits, logits.detach(), ctx.temperature, ctx.softcaps[0])
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden[i:j] = grad_logits @ weight
            if grad_weight is not None:
                add_product(grad_weight, grad_logits.t(), hidden[i:j])
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, grad_mass, None, None, None, None


def _chunks(hidden: Tensor, *heads: Tensor) -> list[tuple[int, int]]:
    """(start, stop) groups of each chunk, by the larger of the two vocabularies."""
    return row_chunks(hidden, max(heads, key=lambda head: head.shape[0]))


def _losses(
    logits: Tensor,
    log_mass: Tensor,
    teacher: tuple[Tensor, Tensor, Tensor],
    comparison: GroupComparison,
    temperature: float,
    softcap: float | None,
) -> Tensor:
    """[G] losses of rows of the student's logits."""
    states, head, teacher_mass = teacher
    log_s = logits.log_softmax(-1) + log_mass[:, None]
    with torch.no_grad():
        log_q = scaled_logits(states, head, temperature, softcap).log_softmax(-1) + teacher_mass[:, None]
    return group_loss(log_s, log_q, comparison)
