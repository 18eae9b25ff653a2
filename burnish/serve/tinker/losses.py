"""The losses that Tinker's client names, as its documentation defines them (tinker-docs.thinkingmachines.ai/tinker/losses).

Every loss is a sum over the tokens of a sequence, never a mean: a client that wants a mean puts it into weights or advantages.
With log p of the model and log q of the sampler, r = p / q and sg the value without gradient:

    cross_entropy         - sum_t w_t log p_t
    importance_sampling   - sum_t r_t A_t
    ppo                   - sum_t min(r_t A_t, clip(r_t, low, high) A_t)                 Schulman et al., 1707.06347
    cispo                 - sum_t sg[clip(r_t, low, high)] log p_t A_t                   MiniMax, 2506.13585
    dro                   - sum_t (log p_t A_t - beta / 2 (log p_t - log q_t)^2)         Richemond et al., 2405.19107
    gspo                  ppo with r_t = sg[s] p_t / sg[p_t], s = exp(mean over M of log p - log q)     Zheng et al., 2507.18071

`low` and `high` are bounds of the ratio, 0.8 and 1.2 unless given in `loss_fn_config` or for each token. M are the tokens that
`sequence_ratio_mask` marks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from burnish.config.errors import did_you_mean
from burnish.serve.tinker.requests import BadRequest

CLIP_LOW, CLIP_HIGH = 0.8, 1.2
TARGETS = "target_tokens"
Inputs = Mapping[str, Tensor]
"""Tensors of one sequence by name, [N] or [N, K]."""
Options = Mapping[str, float | str]


def cross_entropy(logp: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """Weighted negative log-likelihood; log-probs and weights are [N] or [N, K]."""
    return -(logp * inputs["weights"]).sum()


def importance_sampling(logp: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """Policy gradient with the ratio to the sampler, not clipped."""
    return -(_ratio(logp, inputs) * inputs["advantages"]).sum()


def ppo(logp: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """The clipped objective, token by token."""
    return -_clipped_objective(_ratio(logp, inputs), inputs, options).sum()


def cispo(logp: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """Log-likelihood weighted by the clipped ratio, which has no gradient."""
    low, high = _bounds(inputs, options)
    weight = torch.minimum(torch.maximum(_ratio(logp.detach(), inputs), low), high)
    return -(weight * logp * inputs["advantages"]).sum()


def dro(logp: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """Policy gradient with a quadratic penalty on the log-ratio."""
    penalty = 0.5 * _number(options, "beta") * (logp - inputs["logprobs"]).square()
    if "weights" in inputs:
        penalty = penalty * inputs["weights"]
    return -(logp * inputs["advantages"] - penalty).sum()


def gspo(logp: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """The clipped objective with the sequence's ratio as value and the token's gradient (GSPO-token)."""
    in_ratio = inputs["sequence_ratio_mask"] != 0  # of at least one token, which was checked with the request
    mean = (logp.detach() - inputs["logprobs"])[in_ratio].mean()
    return -_clipped_objective((mean + logp - logp.detach()).exp(), inputs, options).sum()


def _ratio(logp: Tensor, inputs: Inputs) -> Tensor:
    return (logp - inputs["logprobs"]).exp()


def _clipped_objective(ratio: Tensor, inputs: Inputs, options: Options) -> Tensor:
    low, high = _bounds(inputs, options)
    clipped = torch.minimum(torch.maximum(ratio, low), high)
    return torch.minimum(ratio * inputs["advantages"], clipped * inputs["advantages"])


def _bounds(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
    """Bounds of the ratio: those of each token, of the request, or the defaults."""
    like = inputs["logprobs"]
    defaults = {"clip_low_threshold": CLIP_LOW, "clip_high_threshold": CLIP_HIGH}
    low, high = (
        inputs[name] if name in inputs else like.new_full(like.shape, _number(options, name, default))
        for name, default in defaults.items()
    )
    return low, high


def _number(options: Options, name: str, default: float = 0.0) -> float:
    """A number that `find_loss` has checked."""
    return float(options.get(name, default))


@dataclass(frozen=True)
class LossSpec:
    """A loss with the tensors that it reads and its options."""

    function: Callable[[Tensor, Inputs, Options], Tensor]
    needs: tuple[str, ...]
    optional: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    needs_options: bool = False
    """Whether the options have no default."""


CLIP_NAMES = ("clip_low_threshold", "clip_high_threshold")
POLICY_NEEDS = ("logprobs", "advantages")
LOSSES: dict[str, LossSpec] = {
    "cross_entropy": LossSpec(cross_entropy, ("weights",)),
    "importance_sampling": LossSpec(importance_sampling, POLICY_NEEDS),
    "ppo": LossSpec(ppo, POLICY_NEEDS, CLIP_NAMES, CLIP_NAMES),
    "cispo": LossSpec(cispo, POLICY_NEEDS, CLIP_NAMES, CLIP_NAMES),
    "dro": LossSpec(dro, POLICY_NEEDS, (), ("beta",), needs_options=True),
    "gspo": LossSpec(gspo, (*POLICY_NEEDS, "sequence_ratio_mask"), CLIP_NAMES, CLIP_NAMES),
}
NOT_SERVED = {
    "stable_reinforce": "it reads what Tinker's own sampler records of a sequence (record_stability_info), in no documented form",
    "custom": "this server runs no uploaded losses; `forward_backward_custom` with a function runs on the client and works",
}
"""Losses that the client names and this server refuses, with the reason."""
IGNORED_INPUTS = ("mask",)
"""Tensors that clients may add for themselves."""


def find_loss(name: str, options: Options) -> LossSpec:
    """The loss of a name; BadRequest if it or one of its options is not known."""
    if name in NOT_SERVED:
        raise BadRequest(f"the loss {name} is not served here: {NOT_SERVED[name]}")
    if name not in LOSSES:
        raise BadRequest(f"there is no loss {name!r}, but {', '.join(LOSSES)}{did_you_mean(name, LOSSES)}")
    spec = LOSSES[name]
    if unknown := [key for key in options if key not in spec.options]:
        known = f"; it has {', '.join(spec.options)}" if spec.options else "; it has none"
        raise BadRequest(f"loss_fn_config: {name} has no option {unknown[0]!r}{known}")
    if missing := [key for key in spec.options if spec.needs_options and key not in options]:
        raise BadRequest(f"loss_fn_config has no {missing[0]}, which {name} needs")
    if texts := [key for key, value in options.items() if isinstance(value, str)]:
        raise BadRequest(f"loss_fn_config.{texts[0]} is the text {options[texts[0]]!r}; expected a number")
    return spec


def read_names(name: str, given: Mapping[str, object]) -> list[str]:
    """The tensors of a sequence that a loss reads; BadRequest if one is missing, or if one is given that it does not read.

    `weights` of a policy loss multiply the advantages, and the penalty of dro: 0 leaves a token out.
    """
    spec = LOSSES[name]
    extra = () if name == "cross_entropy" else ("weights",)
    if missing := [key for key in (TARGETS, *spec.needs) if key not in given]:
        raise BadRequest(f"loss_fn_inputs has no {missing[0]}, which {name} needs")
    known = (TARGETS, *spec.needs, *spec.optional, *extra, *IGNORED_INPUTS)
    if unknown := [key for key in given if key not in known]:
        raise BadRequest(
            f"loss_fn_inputs.{unknown[0]} is not read by {name}: remove it, or use another loss{did_you_mean(unknown[0], known)}"
        )
    return [key for key in (*spec.needs, *spec.optional, *extra) if key in given]


def sequence_loss(spec: LossSpec, logp: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """The loss of one sequence from its log-probs, which carry the gradient."""
    if "weights" in inputs and "advantages" in inputs:
        inputs = {**inputs, "advantages": inputs["advantages"] * inputs["weights"]}
    return spec.function(logp, inputs, options)
