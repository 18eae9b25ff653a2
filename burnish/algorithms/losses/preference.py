"""Slot `loss`: preferences between answers.

A pair is a group of two sequences, one of them `chosen` (a bool sequence column). Its loss stands on both, so that the
mean over sequences is the mean over pairs. Log-probs under the reference are the token column `ref_logp`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from burnish.algorithms.losses.sequences import logp_of, over_sequences
from burnish.algorithms.view import View
from burnish.core.segments import segment_count, segment_sum

Result = tuple[Tensor, dict[str, Tensor]]


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: float | Tensor = 0.0) -> Tensor:
    """[P] -log sigmoid(r_c - r_r - margin): how surprising the preference is, given a score of each answer."""
    return -logsigmoid(chosen - rejected - margin)


def dpo(
    view: View,
    anchor: Tensor,
    advantages: Tensor,
    beta: float = 0.1,
    smoothing: float = 0.0,
    average: bool = False,
) -> Result:
    """[M] -(1-e) log sigmoid(beta h) - e log sigmoid(-beta h), h = (logp_c - ref_c) - (logp_r - ref_r) over whole answers.

    e is the share of preferences taken to be the wrong way round. With `average` the log-ratios are means over each answer's
    tokens, so that length does not decide (as in Tulu 3, 2411.15124). DPO (2305.18290).
    """
    pairs, num = pairs_of(view)
    drift = _drift(view)
    h = chosen_minus_rejected(view, view.mean(drift) if average else view.sum(drift), pairs, num)
    loss = -(1 - smoothing) * logsigmoid(beta * h) - smoothing * logsigmoid(-beta * h)
    return _on_both(view, pairs, loss, beta * h)


def ipo(view: View, anchor: Tensor, advantages: Tensor, beta: float = 0.1, average: bool = True) -> Result:
    """[M] (h - 1 / (2 beta))^2 with h as in DPO, of log-ratios summed or averaged over each answer. IPO (2310.12036)."""
    pairs, num = pairs_of(view)
    drift = _drift(view)
    h = chosen_minus_rejected(view, view.mean(drift) if average else view.sum(drift), pairs, num)
    return _on_both(view, pairs, (h - 1 / (2 * beta)) ** 2, h)


def simpo(view: View, anchor: Tensor, advantages: Tensor, beta: float = 2.0, margin: float = 0.5) -> Result:
    """[M] -log sigmoid(beta (mean logp_c - mean logp_r) - margin): no reference. SimPO (2405.14734)."""
    pairs, num = pairs_of(view)
    h = beta * chosen_minus_rejected(view, view.mean(logp_of(view)), pairs, num)
    return _on_both(view, pairs, -logsigmoid(h - margin), h)


def orpo(view: View, anchor: Tensor, advantages: Tensor, coef: float = 0.1) -> Result:
    """[M] -mean logp_c - coef log sigmoid(log odds_c - log odds_r), odds = p / (1 - p) of p = exp(mean logp).

    Imitation of the chosen answer and preference in one: no reference. ORPO (2403.07691).
    """
    pairs, num = pairs_of(view)
    mean = view.mean(logp_of(view))
    chosen = torch.where(view.sequence["chosen"], mean, torch.zeros_like(mean))
    likelihood = segment_sum(chosen, pairs, num)
    h = chosen_minus_rejected(view, log_odds(mean), pairs, num)
    return _on_both(view, pairs, -likelihood - coef * logsigmoid(h), h)


def log_odds(logp: Tensor) -> Tensor:
    """log(p / (1 - p)) of log p. A probability of 1 has infinite odds; short of that by one rounding they are finite."""
    certain = logp.clamp(max=-torch.finfo(logp.dtype).eps)
    return certain - torch.log(-torch.expm1(certain))


def kto(
    view: View,
    anchor: Tensor,
    advantages: Tensor,
    beta: float = 0.1,
    desirable: float = 1.0,
    undesirable: float = 1.0,
) -> Result:
    """[M] desirable (1 - sigmoid(beta (u - z0))) for good answers, undesirable (1 - sigmoid(beta (z0 - u))) for bad ones.

    u = logp - ref of an answer; z0 = max(0, mean u of mismatched rows), without gradient. Reads the bool sequence
    columns `desirable` and `mismatched` (an answer behind another prompt, there for z0 alone: it has no loss, and the
    mean is over the others). KTO (2402.01306).
    """
    alive, mismatched = view.lengths > 0, view.sequence["mismatched"]
    judged, others = alive & ~mismatched, alive & mismatched
    if not bool(judged.any()) or not bool(others.any()):
        raise ValueError(
            f"kto got {int(judged.sum())} answers and {int(others.sum())} mismatched rows with a token in the loss; it needs "
            "both in every mini-batch: the mismatched rows say how far the policy is from the reference"
        )
    u = view.sum(_drift(view))
    z0 = (u.detach() * others).sum().div(others.sum()).clamp(min=0)
    good = desirable * (beta * (z0 - u)).sigmoid()
    bad = undesirable * (beta * (u - z0)).sigmoid()
    loss = torch.where(view.sequence["desirable"], good, bad)
    loss = torch.where(judged, loss, torch.zeros_like(loss)) * (alive.sum() / judged.sum())
    return view.spread(loss), {"kto_z0": view.spread(z0.expand_as(u))}


def pairs_of(view: View) -> tuple[Tensor, int]:
    """[S] the pair of each sequence, and the number of pairs; an incomplete one is an error."""
    names, pairs = torch.unique(view.sequence["group_ids"], return_inverse=True)
    num = names.numel()
    whole = segment_count(pairs, num) == 2
    whole &= segment_count(pairs, num, view.sequence["chosen"]) == 1
    whole &= segment_count(pairs, num, view.lengths > 0) == 2
    if not bool(whole.all()):
        broken = names[~whole]
        raise ValueError(
            f"{broken.numel()} of {num} groups are not pairs (the first is group {int(broken[0])}): each needs one chosen "
            "and one rejected answer, both with a token in the loss"
        )
    return pairs, num


def chosen_minus_rejected(view: View, values: Tensor, pairs: Tensor, num: int) -> Tensor:
    """[S] to [P]: the chosen answer's value less the rejected one's, with gradient."""
    return segment_sum(torch.where(view.sequence["chosen"], values, -values), pairs, num)


def _drift(view: View) -> Tensor:
    return logp_of(view) - view.column("ref_logp")


def _on_both(view: View, pairs: Tensor, loss: Tensor, margin: Tensor) -> Result:
    """A loss per pair at the tokens of both answers, with how often and how much the chosen one is ahead."""
    ahead = margin.detach()
    marks = {"pref_accuracy": (ahead > 0).to(loss.dtype), "pref_margin": ahead}
    spread = {name: over_sequences(view, mark.index_select(0, pairs)) for name, mark in marks.items()}
    return view.spread(loss.index_select(0, pairs)), spread
