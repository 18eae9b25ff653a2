"""Slot `ratio`: how much likelier the policy makes a token than the anchor (the old policy) did.

Functions of a view and the anchor's log-probs [M], giving ratios [M] with gradient. With l = logp - anchor, a token's l
is clamped to +-20 and a sequence's to at most 10 before the exponential, with no gradient where that acts, so that one
absurd token or sequence cannot overflow a batch.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from burnish.algorithms.view import View

MAX_TOKEN = 20.0
MAX_SEQUENCE = 10.0


def log_ratio(view: View, anchor: Tensor) -> Tensor:
    """[M] l = logp - anchor, as it is."""
    assert view.logp is not None, "a policy's view has log-probs"
    return view.logp - anchor


def clamped(log_ratios: Tensor) -> Tensor:
    """[M] l as every loss with a token ratio sees it."""
    return log_ratios.clamp(-MAX_TOKEN, MAX_TOKEN)


def token(view: View, anchor: Tensor) -> Tensor:
    """[M] r_t = exp(l_t): PPO's ratio, one for each token."""
    return clamped(log_ratio(view, anchor)).exp()


def sequence(view: View, anchor: Tensor) -> Tensor:
    """[M] s_i = exp(mean_t l_it) at each token of sequence i: the geometric mean of its ratios.

    The gradient goes through the mean, to every token of the sequence. GSPO (2507.18071).
    """
    return view.spread(view.mean(log_ratio(view, anchor)).clamp(max=MAX_SEQUENCE).exp())


def seq_token(view: View, anchor: Tensor) -> Tensor:
    """[M] s_it = sg(s_i) exp(logp_it - sg(logp_it)): the value of `sequence`, the gradient of each token alone.

    With advantages that are constant in a sequence it has the loss and gradient of `sequence`; with others each token
    keeps its own. GSPO-token (2507.18071).
    """
    assert view.logp is not None, "a policy's view has log-probs"
    mean = view.spread(view.mean(log_ratio(view, anchor).detach()))
    return (mean + view.logp - view.logp.detach()).clamp(max=MAX_SEQUENCE).exp()


def seq_prod(view: View, anchor: Tensor) -> Tensor:
    """[M] exp(sum_t l_it) at each token of sequence i: the ratio of whole sequences, whatever their length."""
    return view.spread(view.sum(log_ratio(view, anchor)).clamp(max=MAX_SEQUENCE).exp())


RATIOS: dict[str, Callable[[View, Tensor], Tensor] | None] = {
    "token": token,
    "sequence": sequence,
    "seq_token": seq_token,
    "seq_prod": seq_prod,
    "none": None,  # the loss uses log-probs directly
}
