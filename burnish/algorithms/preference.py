"""Preferences as the learner sees them: a loss record over answers in pairs or with labels, and what is told of it.

A mini-batch holds two sequences of each unit, with the same `group_ids`. Of pairs these are the chosen answer and the
rejected one (bool sequence column `chosen`). Of labelled answers (KTO) they are the answer (`desirable` says which are
good) and another prompt's answer behind the same prompt (`mismatched`), which shows how far the policy has moved. The
reference is the sequence column `ref_logp`: the mean log-prob of each answer's tokens under it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from burnish.algorithms.losses.preference import chosen_minus_rejected, log_odds, pairs_of
from burnish.algorithms.losses.sequences import logp_of
from burnish.algorithms.losses.table import LOSSES
from burnish.algorithms.view import View

ROUNDING = 16
"""Units in the last place of a log-prob by which two passes over the same answer may differ."""


@dataclass(frozen=True)
class PreferenceLoss:
    """A preference loss by name; the mean over pairs, or over labelled answers, with the weights of `seq-mean-token-mean`."""

    needs: ClassVar[frozenset[str]] = frozenset()
    name: str = "dpo"
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_paired(self) -> bool:
        """Whether it compares two answers to one prompt; else it values single ones."""
        return self.name != "kto"

    @property
    def scope(self) -> str:
        """Pairs add up; z0 of KTO is of the whole batch."""
        return "groups" if self.is_paired else "batch"

    def __call__(self, view: View) -> tuple[Tensor, dict[str, Tensor]]:
        function = LOSSES[self.name]
        assert function is not None, "preferences have neither ratio nor clip"
        logp = logp_of(view)
        nobody = torch.zeros_like(logp)  # these losses read neither an anchor nor advantages
        per_token, _ = function(view, nobody, nobody, **self.options)
        return (view.column("weight") * per_token).sum(), {}


def implicit_rewards(view: View, loss: PreferenceLoss) -> Tensor:
    """[S] how good the policy takes each answer to be, in the units of the loss's margin.

    dpo, ipo, kto: beta (logp - ref), of the whole answer or its mean over tokens as the loss has it. simpo: beta mean logp.
    orpo: log odds of exp(mean logp).
    """
    logp, beta = logp_of(view), loss.options.get("beta", 1.0)
    if loss.name == "orpo":
        return log_odds(view.mean(logp))
    if loss.name == "simpo":
        return beta * view.mean(logp)
    drift = logp - view.column("ref_logp")
    return beta * (view.mean(drift) if loss.options.get("average", False) else view.sum(drift))


def measures(view: View, loss: PreferenceLoss) -> dict[str, float]:
    """Means over a whole batch: implicit rewards and summed log-probs of either kind of answer, their margin, the accuracy.

    The accuracy of pairs is how often the chosen answer has the higher implicit reward; that of labelled answers how often
    a good one is above z0 and a bad one below. A tie is half right; what is no more than rounding is one, as before the
    first update, when policy and reference are the same.
    """
    rewards, logp = implicit_rewards(view, loss), view.sum(logp_of(view))
    if loss.is_paired:
        pairs, num = pairs_of(view)
        ahead = chosen_minus_rejected(view, rewards, pairs, num)
        better = view.sequence["chosen"]
        kinds = {"chosen": better, "rejected": ~better}
    else:
        judged, good = ~view.sequence["mismatched"], view.sequence["desirable"]
        z0 = rewards[~judged].mean().clamp(min=0)
        ahead = torch.where(good, rewards - z0, z0 - rewards)[judged]
        kinds = {"good": judged & good, "bad": judged & ~good}
    rounding = ROUNDING * torch.finfo(logp.dtype).eps * float(logp.abs().max()) * loss.options.get("beta", 1.0)
    found = {"accuracy": _wins(ahead, rounding), "margin": float(ahead.mean())}
    for kind, which in kinds.items():
        if bool(which.any()):  # a batch may have no bad answer in it
            found |= {f"reward_{kind}": float(rewards[which].mean()), f"logp_{kind}": float(logp[which].mean())}
    return found if loss.is_paired else found | {"z0": float(z0)}


def _wins(ahead: Tensor, rounding: float) -> float:
    return float(((ahead > rounding).double() + 0.5 * (ahead.abs() <= rounding)).mean())
