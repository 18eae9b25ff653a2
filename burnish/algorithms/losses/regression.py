"""Slot `loss`: squared losses, which pull a log-ratio towards a multiple of the advantage.

They stay valid on samples of an older policy: their minimum does not depend on who sampled. `z_i` is the sum of a
sequence's log-ratios to the anchor, with gradient and unclamped.
"""

from __future__ import annotations

from torch import Tensor

from burnish.algorithms.losses.sequences import logp_of, sequence_log_ratio
from burnish.algorithms.ratios import log_ratio
from burnish.algorithms.view import View

MOST_LOGGED = 50.0
"""z grows with length: metrics, and only they, see it clipped here."""


def omd_sq(view: View, anchor: Tensor, advantages: Tensor, tau: float = 0.1) -> tuple[Tensor, dict[str, Tensor]]:
    """[M] online mirror descent, one number a sequence: -A z + tau/2 z^2, whose minimum is tau z = A.

    This is (A - tau z)^2 / (2 tau) without its constant. A is the reward without its group's mean (advantage grpo with
    std none), or without tau log mean exp(r / tau) (softmean with beta 1 / tau). Kimi k1.5 (2501.12599).
    """
    z = sequence_log_ratio(view, anchor)
    return view.spread(-view.mean(advantages) * z + 0.5 * tau * z**2), _marks(view, z)


def sppo_sq(view: View, anchor: Tensor, advantages: Tensor, eta: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    """[M] self-play preference optimisation, one number a sequence: (z - eta A)^2.

    A is P_i - 1/2, P_i the probability to beat the other samples (advantage win_rate), or a reward without its soft
    mean (softmean). SPPO (2405.00675).
    """
    z = sequence_log_ratio(view, anchor)
    return view.spread((z - eta * view.mean(advantages)) ** 2), _marks(view, z)


def dro(view: View, anchor: Tensor, advantages: Tensor, beta: float = 0.1) -> tuple[Tensor, dict[str, Tensor]]:
    """[M] -A logp + beta/2 l^2 with l = logp - anchor, unclamped: mirror descent token by token.

    Offline regularised RL (2405.19107).
    """
    return -advantages * logp_of(view) + 0.5 * beta * log_ratio(view, anchor) ** 2, {}


def _marks(view: View, z: Tensor) -> dict[str, Tensor]:
    return {"seq_log_ratio": view.spread(z.detach().clamp(-MOST_LOGGED, MOST_LOGGED))}
