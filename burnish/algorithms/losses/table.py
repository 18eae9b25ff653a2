"""Slot `loss`: what is minimised, by name.

A loss takes a view, the anchor's log-probs [M], advantages [M] and its options, and gives the loss of each token [M] and
marks, as a clip does. A loss that is one number a sequence has it at each of the sequence's tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from burnish.algorithms.losses.classification import bce
from burnish.algorithms.losses.mixed import mixed_offpolicy
from burnish.algorithms.losses.preference import dpo, ipo, kto, orpo, simpo
from burnish.algorithms.losses.regression import dro, omd_sq, sppo_sq
from burnish.algorithms.losses.sequences import logp_of
from burnish.algorithms.losses.supervised import nll
from burnish.algorithms.view import View


def logprob(view: View, anchor: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """[M] -A logp: plain policy gradient. Williams (1992)."""
    return -advantages * logp_of(view), {}


LOSSES: dict[str, Callable[..., tuple[Tensor, dict[str, Tensor]]] | None] = {
    "surrogate": None,  # these two are made of ratio and clip: see `PolicyLoss`
    "sg_logprob": None,
    "logprob": logprob,
    "omd_sq": omd_sq,
    "sppo_sq": sppo_sq,
    "dro": dro,
    "bce": bce,
    "mixed_offpolicy": mixed_offpolicy,
    "nll": nll,
    "dpo": dpo,
    "ipo": ipo,
    "simpo": simpo,
    "orpo": orpo,
    "kto": kto,
}
