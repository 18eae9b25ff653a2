"""Slot `advantage`: records for several turns, and for several roles."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from burnish.algorithms.advantages.base_spec import AdvantageRecord, Ddof, refuse_unused_deviation_options


class GigpoAdvantage(AdvantageRecord):
    """An agent's episode relative to its group, plus each turn relative to all turns from the same state."""

    formula: ClassVar[str] = "A = (R - mean_g)/F + omega (Rs_k - mean over the group's turns in the same state)/F"
    paper: ClassVar[str] = "GiGPO (2505.10978)"
    needs: ClassVar[tuple[str, ...]] = ("groups", "states")
    by_turn: ClassVar[bool] = True
    name: Literal["gigpo"] = "gigpo"
    omega: float = Field(1.0, ge=0)
    """Weight of the turn-level part."""
    gamma: float = Field(0.95, ge=0, le=1)
    """Discount per turn in the turn's return Rs."""
    normalise: Literal["none", "std"] = "none"
    """F: 1, or the standard deviation + 1e-6."""


class HgpoAdvantage(AdvantageRecord):
    """Each turn of an agent relative to turns of its group with the same state, and more so with the same history of states."""

    formula: ClassVar[str] = (
        "A = sum_k w_k (Rs - mean of the cluster)/F, w_k ~ (k+1)^alpha; cluster k: turns of the group with the same last k states"
    )
    paper: ClassVar[str] = "HGPO (recipe of verl-agent)"
    needs: ClassVar[tuple[str, ...]] = ("groups", "states")
    by_turn: ClassVar[bool] = True
    name: Literal["hgpo"] = "hgpo"
    history: int = Field(2, ge=0)
    """Number of earlier states that may be compared too; 0 compares turns of the same state alone, as GiGPO does."""
    alpha: float = Field(1.0, ge=0)
    """How much more a longer common history counts; 0 weighs all clusters equally."""
    gamma: float = Field(0.95, ge=0, le=1)
    """Discount per turn in the turn's return Rs."""
    normalise: Literal["none", "std"] = "std"
    """F: 1, or the cluster's population standard deviation + 1e-6."""
    episode: bool = False
    """Also compare the episode's reward with its group, as cluster 0."""


class MtGrpoAdvantage(AdvantageRecord):
    """Each turn's own reward relative to the same turn of the group, plus the outcome; the last turn has the outcome alone."""

    formula: ClassVar[str] = (
        "A_k = n(r_k) + outcome A_O for k < K, A_K = A_O = n(r_K); n(x) = (x - mean)/(std + 1e-6) over the group's k-th turns"
    )
    paper: ClassVar[str] = "MT-GRPO (2505.11821)"
    needs: ClassVar[tuple[str, ...]] = ("groups", "turns")
    by_turn: ClassVar[bool] = True
    name: Literal["mt_grpo"] = "mt_grpo"
    outcome: float = Field(1.0, ge=0)
    """Weight of the outcome's advantage in turns before the last."""
    std: Literal["group", "none"] = "group"
    """Divide by the standard deviation + 1e-6, or by nothing."""


class RebnAdvantage(AdvantageRecord):
    """The return from each turn on, normalised over all turns of the batch."""

    formula: ClassVar[str] = "A_k = (G_k - mean)/(std + 1e-9) over all turns of the batch, G_k = r_k + gamma G_{k+1}"
    paper: ClassVar[str] = "ReBN of GEM (2510.01051)"
    by_turn: ClassVar[bool] = True
    name: Literal["rebn"] = "rebn"
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per turn."""


class BilevelGaeAdvantage(AdvantageRecord):
    """Generalised advantage estimation from turn to turn, and from token to token inside a turn."""

    formula: ClassVar[str] = (
        "Y_k = B_k + V(e_k), B_k = R_k + turn_gamma V(e_{k+1}) - V(e_k) + turn_gamma turn_lam B_{k+1}; "
        "then GAE(gamma, lam) inside turn k with reward Y_k at its last token e_k"
    )
    paper: ClassVar[str] = "RAGEN (2504.20073), VAGEN (2510.16907)"
    needs: ClassVar[tuple[str, ...]] = ("critic", "turns")
    by_token: ClassVar[bool] = True
    name: Literal["bilevel_gae"] = "bilevel_gae"
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per action token inside a turn."""
    lam: float = Field(1.0, ge=0, le=1)
    """The actor's lambda inside a turn."""
    turn_gamma: float = Field(0.95, ge=0, le=1)
    """Discount per turn."""
    turn_lam: float | None = Field(None, ge=0, le=1)
    """The actor's lambda between turns; null is lam."""
    lam_critic: float | None = Field(None, ge=0, le=1)
    """Both lambdas of the critic's targets; null is those of the actor."""
    whiten: bool = True
    """Whiten the advantages over all tokens in the loss."""
    ddof: Ddof = 1
    """The variance of whitening is divided by the number of tokens minus this."""

    @model_validator(mode="after")
    def _check_unused_options(self) -> BilevelGaeAdvantage:
        if not self.whiten and self.ddof != 1:
            raise ValueError("bilevel_gae: ddof belongs to the whitening, which is off: leave it out")
        return self


class StepBroadcastAdvantage(AdvantageRecord):
    """The reward of a run's last step relative to its group, given to all steps of the run."""

    formula: ClassVar[str] = (
        "A = (R_last - mean_g)/(std + eps) in every step of a run, divided by its number of steps with step_norm"
    )
    paper: ClassVar[str] = "step-wise GRPO of Trinity-RFT; rLLM"
    needs: ClassVar[tuple[str, ...]] = ("groups", "turns")
    is_shift_free: ClassVar[bool] = True
    name: Literal["step_broadcast"] = "step_broadcast"
    std: Literal["group", "none", "batch"] = "group"
    """Divide by the group's standard deviation, by nothing, or by that of all last rewards of the batch."""
    eps: float = Field(1e-6, ge=0)
    """Added to the deviation before dividing."""
    step_norm: bool = False
    """Divide by the number of steps of the run."""
    min_std: float | None = Field(None, ge=0)
    """Groups whose standard deviation is at most this get 0; null: only groups of equal rewards."""

    @model_validator(mode="after")
    def _check_deviation_options(self) -> StepBroadcastAdvantage:
        refuse_unused_deviation_options(self.std, self.eps)
        return self


class RaeAdvantage(AdvantageRecord):
    """The reward above the moving average of the sample's role, which is part of the run's state."""

    formula: ClassVar[str] = (
        "A_i = r_i - b_role, then b_role <- alpha b_role + (1 - alpha) r_i, in the order of sampling; b starts at 0"
    )
    paper: ClassVar[str] = "SPIRAL (2506.24119), role-conditioned advantage estimation"
    needs: ClassVar[tuple[str, ...]] = ("roles",)
    name: Literal["rae"] = "rae"
    alpha: float = Field(0.95, ge=0, lt=1)
    """Decay of the moving average; 0 compares each sample with the one before it."""


class HierarchicalGrpoAdvantage(AdvantageRecord):
    """The reward above the mean of the same role: in the same episode for some roles, in the same group for the others."""

    formula: ClassVar[str] = (
        "A = r - mean of the peers: same role, and the same episode in episode_roles, else the same group"
    )
    paper: ClassVar[str] = "proposer and solvers of prime-rl"
    needs: ClassVar[tuple[str, ...]] = ("groups", "roles")
    is_shift_free: ClassVar[bool] = True
    name: Literal["hierarchical_grpo"] = "hierarchical_grpo"
    episode_roles: list[str] = Field(min_length=1)
    """Roles that are compared within an episode, normally [solver]: attempts at one proposed problem."""


class TrrPlusPlusAdvantage(AdvantageRecord):
    """Reward relative to all samples of the batch with the same role, divided by their standard deviation."""

    formula: ClassVar[str] = (
        "A_i = (r_i - mean_k) / (std_k + eps), k the role of sample i, over the batch; exactly 0 if the role has one sample or equal rewards"
    )
    paper: ClassVar[str] = "Absolute Zero (2505.03335), task-relative REINFORCE++"
    needs: ClassVar[tuple[str, ...]] = ("roles",)
    name: Literal["trr_plus_plus"] = "trr_plus_plus"
    eps: float = Field(1e-8, ge=0)
    """Added to the deviation before dividing."""
    ddof: Ddof = 1
    """The variance is divided by the number of samples minus this."""
