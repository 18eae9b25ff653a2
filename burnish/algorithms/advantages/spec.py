"""Slot `advantage`: records of how rewards become advantages."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from burnish.algorithms.advantages.base_spec import AdvantageRecord, Ddof, Singleton, refuse_unused_deviation_options
from burnish.algorithms.advantages.turn_and_role_spec import (
    BilevelGaeAdvantage,
    GigpoAdvantage,
    HgpoAdvantage,
    HierarchicalGrpoAdvantage,
    MtGrpoAdvantage,
    RaeAdvantage,
    RebnAdvantage,
    StepBroadcastAdvantage,
    TrrPlusPlusAdvantage,
)


class GrpoAdvantage(AdvantageRecord):
    """Reward relative to its group, divided by a standard deviation."""

    formula: ClassVar[str] = (
        "A_i = (r_i - mean_g) / (std_g + eps), the same on every token; a constant group gives exactly 0"
    )
    paper: ClassVar[str] = "DeepSeekMath (2402.03300); std: none is Dr.GRPO (2503.20783)"
    needs: ClassVar[tuple[str, ...]] = ("groups",)
    is_shift_free: ClassVar[bool] = True
    name: Literal["grpo"] = "grpo"
    std: Literal["group", "none", "batch"] = "group"
    """Divide by the group's standard deviation, by nothing (Dr.GRPO), or by the standard deviation of all rewards in the batch."""
    eps: float = Field(1e-6, ge=0)
    """Added to the deviation before dividing."""
    singleton: Singleton = "raw"
    """Advantage of a group of one: its raw reward, or zero."""
    ddof: Ddof = 1
    """The variance is divided by the number of samples minus this."""

    @model_validator(mode="after")
    def _check_deviation_options(self) -> GrpoAdvantage:
        refuse_unused_deviation_options(self.std, self.eps, self.ddof)
        return self


class ReinforceAdvantage(AdvantageRecord):
    """Discounted return-to-go minus a constant."""

    formula: ClassVar[str] = "A_it = sum_{s>=t} gamma^(s-t) r_is - baseline, over action tokens"
    paper: ClassVar[str] = "Williams (1992)"
    by_token: ClassVar[bool] = True
    name: Literal["reinforce"] = "reinforce"
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per action token."""
    baseline: float | Literal["ema"] = 0.0
    """Subtracted from every return: a constant, or `ema`, a moving average (0.9) of earlier steps' mean shaped reward."""


class RlooAdvantage(AdvantageRecord):
    """Reward minus the mean reward of the other samples of the prompt."""

    formula: ClassVar[str] = "A_i = r_i - mean_{j != i} r_j; a constant group gives exactly 0"
    paper: ClassVar[str] = "RLOO (2402.14740)"
    needs: ClassVar[tuple[str, ...]] = ("groups",)
    is_shift_free: ClassVar[bool] = True
    name: Literal["rloo"] = "rloo"
    singleton: Singleton = "raw"
    """Advantage of a group of one: its raw reward, or zero."""


class RemaxAdvantage(AdvantageRecord):
    """Return-to-go minus the reward of the prompt's greedy answer."""

    formula: ClassVar[str] = "A_it = sum_{s>=t} r_is - reward of the greedy answer"
    paper: ClassVar[str] = "ReMax (2310.10505)"
    needs: ClassVar[tuple[str, ...]] = ("greedy",)
    name: Literal["remax"] = "remax"


class ReinforcePlusPlusAdvantage(AdvantageRecord):
    """Return-to-go, whitened over the whole batch."""

    formula: ClassVar[str] = "A = whiten(sum_{s>=t} gamma^(s-t) r_is) over all tokens in the loss"
    paper: ClassVar[str] = "REINFORCE++ (2501.03262)"
    by_token: ClassVar[bool] = True
    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per action token."""
    ddof: Ddof = 1
    """The variance is divided by the number of tokens minus this: 1 as in verl, 0 as in OpenRLHF."""


class ReinforcePlusPlusBaselineAdvantage(AdvantageRecord):
    """Reward relative to its group, whitened over the whole batch."""

    formula: ClassVar[str] = "A = whiten(r_i - mean_g) over all tokens in the loss"
    paper: ClassVar[str] = "REINFORCE++-baseline (2501.03262)"
    needs: ClassVar[tuple[str, ...]] = ("groups",)
    is_shift_free: ClassVar[bool] = True
    name: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    ddof: Ddof = 1
    """The variance is divided by the number of tokens minus this: 1 as in verl, 0 as in OpenRLHF."""
    singleton: Singleton = "raw"
    """Value of a group of one before whitening: its raw reward, or zero."""


class OpoAdvantage(AdvantageRecord):
    """Reward minus the group's length-weighted mean reward: the on-policy baseline of least variance."""

    formula: ClassVar[str] = "A_i = r_i - sum_g |o_j| r_j / sum_g |o_j|; a constant group gives exactly 0"
    paper: ClassVar[str] = "OPO (2505.23585)"
    needs: ClassVar[tuple[str, ...]] = ("groups",)
    is_shift_free: ClassVar[bool] = True
    name: Literal["opo"] = "opo"
    singleton: Singleton = "raw"
    """Advantage of a group of one: its raw reward, or zero."""


class GpgAdvantage(AdvantageRecord):
    """Reward relative to its group, scaled up to make up for groups without signal."""

    formula: ClassVar[str] = (
        "A_i = N/(N-M) (r_i - mean_g), M of the N samples being in constant groups; a group of one is no constant group, A = r there"
    )
    paper: ClassVar[str] = "GPG (2504.02546)"
    needs: ClassVar[tuple[str, ...]] = ("groups",)
    is_shift_free: ClassVar[bool] = True
    name: Literal["gpg"] = "gpg"
    normalise: Literal["none", "std"] = "none"
    """Divide by nothing, or by the group's standard deviation."""
    eps: float = Field(1e-6, ge=0)
    """Added to the deviation before dividing."""

    @model_validator(mode="after")
    def _check_deviation_options(self) -> GpgAdvantage:
        refuse_unused_deviation_options(self.normalise, self.eps)
        return self


class GrpoPasskAdvantage(AdvantageRecord):
    """The advantage of the unique best sample of a prompt is its lead over the second best; all others have 0."""

    formula: ClassVar[str] = "A_best = (r_best - r_second) / (std_g + eps), 0 for all others and where the best tie"
    needs: ClassVar[tuple[str, ...]] = ("groups",)
    is_shift_free: ClassVar[bool] = True
    name: Literal["grpo_passk"] = "grpo_passk"
    std: Literal["group", "none"] = "group"
    """Divide by the group's standard deviation, or by nothing."""
    eps: float = Field(1e-6, ge=0)
    """Added to the deviation before dividing."""

    @model_validator(mode="after")
    def _check_deviation_options(self) -> GrpoPasskAdvantage:
        refuse_unused_deviation_options(self.std, self.eps)
        return self


class RaftAdvantage(AdvantageRecord):
    """Trains on samples with a positive reward only."""

    formula: ClassVar[str] = "A_i = max(r_i, 0)"
    paper: ClassVar[str] = "RAFT++ of Minimal-RL (2504.11343)"
    name: Literal["raft"] = "raft"


class ReinforceRejAdvantage(AdvantageRecord):
    """The reward itself; 0 for prompts whose samples all have the same reward."""

    formula: ClassVar[str] = "A_i = r_i, but 0 in a constant group"
    paper: ClassVar[str] = "Reinforce-Rej of Minimal-RL (2504.11343)"
    needs: ClassVar[tuple[str, ...]] = ("groups",)
    name: Literal["reinforce_rej"] = "reinforce_rej"


class GaeAdvantage(AdvantageRecord):
    """Generalised advantage estimation from a critic's values."""

    formula: ClassVar[str] = "A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t; returns = A + V"
    paper: ClassVar[str] = "GAE (1506.02438); lam_critic: VC-PPO (2503.01491); length_adaptive: VAPO (2504.05118)"
    needs: ClassVar[tuple[str, ...]] = ("critic",)
    by_token: ClassVar[bool] = True
    name: Literal["gae"] = "gae"
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per action token."""
    lam: float = Field(1.0, ge=0, le=1)
    """The actor's lambda: 1 uses returns to the end of the answer, 0 the critic's value of the next token."""
    lam_critic: float | None = Field(None, ge=0, le=1)
    """Lambda of the critic's targets; null is the actor's."""
    length_adaptive: float | None = Field(None, gt=0)
    """alpha of lam = 1 - 1/(alpha * length), at least 0, in place of the actor's lam; null keeps lam."""
    whiten: bool = True
    """Whiten the advantages over all tokens in the loss."""
    ddof: Ddof = 1
    """The variance of whitening is divided by the number of tokens minus this."""

    @model_validator(mode="after")
    def _check_unused_options(self) -> GaeAdvantage:
        if self.length_adaptive is not None and self.lam != 1.0:
            raise ValueError("gae: length_adaptive takes the place of lam, so give one of the two")
        if not self.whiten and self.ddof != 1:
            raise ValueError("gae: ddof belongs to the whitening, which is off: leave it out")
        return self


class GdpoAdvantage(AdvantageRecord):
    """Each reward part normalised in its group, then summed and whitened."""

    formula: ClassVar[str] = (
        "A = whiten(sum_k weight_k (r_k - mean_g r_k) / (std_g r_k + eps)) over all tokens in the loss"
    )
    paper: ClassVar[str] = "GDPO (2601.05242)"
    needs: ClassVar[tuple[str, ...]] = ("groups",)
    reads_reward: ClassVar[bool] = False
    name: Literal["gdpo"] = "gdpo"
    std: Literal["group", "none"] = "group"
    """Divide each part by its standard deviation in the group, or by nothing."""
    eps: float = Field(1e-6, ge=0)
    """Added to the deviation before dividing."""
    weights: dict[str, float] = Field({})
    """Weight of reward parts by name; a part that is not named has weight 1."""
    ddof: Ddof = 1
    """The variance of whitening is divided by the number of tokens minus this."""

    @model_validator(mode="after")
    def _check_deviation_options(self) -> GdpoAdvantage:
        refuse_unused_deviation_options(self.std, self.eps)
        return self


class OtbAdvantage(AdvantageRecord):
    """Return-to-go minus the optimal baseline of each position in the group."""

    formula: ClassVar[str] = (
        "A_t = G_t - sum_g G_t W_t / sum_g W_t, W_t = running sum of 1 - 2 pi_t + sum_v pi_v^2 over action tokens"
    )
    needs: ClassVar[tuple[str, ...]] = ("old", "sum_p2", "groups")
    by_token: ClassVar[bool] = True
    name: Literal["otb"] = "otb"
    tail: Literal["raw", "zero"] = "raw"
    """Advantage beyond the end of all other answers of the group: the raw return, or zero."""


class SoftmeanAdvantage(AdvantageRecord):
    """Reward above the soft mean of its group."""

    formula: ClassVar[str] = "A_i = r_i - (1/beta) log mean_g exp(beta r)"
    paper: ClassVar[str] = "Kimi k1.5 (2501.12599) with beta = 1/tau; reward form of SPPO (2405.00675)"
    needs: ClassVar[tuple[str, ...]] = ("groups",)
    is_shift_free: ClassVar[bool] = True
    name: Literal["softmean"] = "softmean"
    beta: float = Field(1.0, gt=0)
    """Sharpness: near 0 the baseline is the group's mean, for large beta its maximum."""


class WinRateAdvantage(AdvantageRecord):
    """The probability of beating another sample of the prompt, minus one half."""

    formula: ClassVar[str] = "A_i = mean_{j != i} P(i beats j) - 1/2; P from the rewards is 1, 1/2 for a tie, or 0"
    paper: ClassVar[str] = "SPPO (2405.00675)"
    needs: ClassVar[tuple[str, ...]] = ("groups",)
    is_shift_free: ClassVar[bool] = True
    name: Literal["win_rate"] = "win_rate"


class MaxRlAdvantage(AdvantageRecord):
    """Reward relative to its group, divided by the group's mean reward: prompts that are rarely solved count more."""

    formula: ClassVar[str] = "A_i = (r_i - mean_g) / mean_g; 0 if mean_g is 0; rewards must be 0 or more"
    paper: ClassVar[str] = "Maximum-likelihood RL (2602.02710); SkyRL adds 1e-6 to the divisor"
    needs: ClassVar[tuple[str, ...]] = ("groups",)
    name: Literal["max_rl"] = "max_rl"
    singleton: Singleton = "zero"
    """Advantage of a group of one: zero as in prime-rl, or its raw reward as in SkyRL."""


class AsymreAdvantage(AdvantageRecord):
    """Reward relative to a baseline below the group's mean, for samples of an older policy."""

    formula: ClassVar[str] = "A_i = r_i - (mean_g + delta); a constant group has A = -delta, a group of one A = r"
    paper: ClassVar[str] = "AsymRE, as in Trinity-RFT"
    needs: ClassVar[tuple[str, ...]] = ("groups",)
    is_shift_free: ClassVar[bool] = True
    name: Literal["asymre"] = "asymre"
    delta: float = Field(-0.1, lt=0)
    """How far the baseline lies from the mean; below 0, because at 0 or above REINFORCE is unstable on stale samples."""


class OpmdAdvantage(AdvantageRecord):
    """Reward relative to its group's mean or soft mean, for the loss opmd."""

    formula: ClassVar[str] = "A_i = r_i - b; b = mean_g or tau log mean_g exp(r / tau); a group of one has b = 0"
    paper: ClassVar[str] = "OPMD, as in Trinity-RFT"
    needs: ClassVar[tuple[str, ...]] = ("groups",)
    is_shift_free: ClassVar[bool] = True
    name: Literal["opmd"] = "opmd"
    baseline: Literal["mean", "logavgexp"] = "mean"
    """The baseline: the group's mean, or its soft mean at temperature tau."""
    tau: float = Field(1.0, gt=0)
    """Temperature of baseline logavgexp: near 0 the baseline is the group's maximum. The loss opmd has the same tau."""

    @model_validator(mode="after")
    def _check_tau_is_used(self) -> OpmdAdvantage:
        if self.baseline == "mean" and self.tau != 1.0:
            raise ValueError("opmd.tau belongs to baseline logavgexp: for the step size set algorithm.loss.tau")
        return self


class OfflineValueAdvantage(AdvantageRecord):
    """Reward above the optimal value of its prompt, which samples of the initial policy estimate once before training."""

    formula: ClassVar[str] = (
        "A_i = r_i - V*(x), V* = beta log mean_n exp(r_n / beta) over samples of the initial policy; prompts without a reward above 0 "
        "are left out"
    )
    paper: ClassVar[str] = "A*-PO (2505.20686)"
    needs: ClassVar[tuple[str, ...]] = ("prompt_values",)
    rollout_options: ClassVar[tuple[str, ...]] = ("samples", "beta")
    name: Literal["offline_value"] = "offline_value"
    samples: int = Field(8, ge=1)
    """Answers of the initial policy to each prompt, before the first step."""
    beta: float = Field(0.5, gt=0)
    """Temperature of the value: near 0 it is the best of the rewards, for large beta their mean."""


class PrimeRlooAdvantage(AdvantageRecord):
    """Leave-one-out returns of implicit process rewards, plus the leave-one-out outcome."""

    formula: ClassVar[str] = (
        "A_it = process_coef sum_{s>=t} (p_is - mean_{j != i} mean_t p_jt) + outcome_coef (r_i - mean_{j != i} r_j), then whitened"
    )
    paper: ClassVar[str] = "PRIME (2502.01456)"
    needs: ClassVar[tuple[str, ...]] = ("groups", "process", "accuracy")
    name: Literal["prime_rloo"] = "prime_rloo"
    process_coef: float = Field(5.0, ge=0)
    """Weight of the process rewards."""
    outcome_coef: float = Field(5.0, ge=0)
    """Weight of the outcome."""
    norm: Literal["none", "batch"] = "batch"
    """Leave process rewards unchanged, or divide them by their largest absolute return in the batch."""
    whiten: bool = True
    """Whiten the advantages over all tokens in the loss."""
    ddof: Ddof = 1
    """The variance of whitening is divided by the number of tokens minus this."""


class SpoChainAdvantage(AdvantageRecord):
    """The increase of the Monte-Carlo value over the token's segment."""

    formula: ClassVar[str] = "A(tokens of segment k) = V(border k+1) - V(border k); V(end) = reward"
    paper: ClassVar[str] = "SPO (2505.23564)"
    needs: ClassVar[tuple[str, ...]] = ("borders",)
    rollout_options: ClassVar[tuple[str, ...]] = ("below", "every", "rollouts")
    name: Literal["spo_chain"] = "spo_chain"
    below: float = Field(0.9, gt=0, le=1)
    """Tokens that were sampled with a probability below this are cut points."""
    every: int = Field(5, ge=1)
    """A segment begins at every k-th cut point, with k this number."""
    rollouts: int = Field(9, ge=1)
    """Number of answers continued from each border between segments; their mean reward is the value of the border."""


class SpoTreeAdvantage(AdvantageRecord):
    """The value of a node in a tree of rollouts minus the value of its parent."""

    formula: ClassVar[str] = "A = V(child) - V(parent); V(leaf) = reward, V(node) = mean of its children"
    paper: ClassVar[str] = "SPO (2505.23564)"
    needs: ClassVar[tuple[str, ...]] = ("groups", "tree")
    rollout_options: ClassVar[tuple[str, ...]] = ("branches", "segment")
    name: Literal["spo_tree"] = "spo_tree"
    branches: list[PositiveInt] = Field(default_factory=lambda: [6, 6], min_length=1)
    """Continuations per node of each level below the first, which has rollout.n nodes: rollout.n=6 and [6, 6] make a 6-6-6 tree."""
    segment: int = Field(30, ge=1)
    """Tokens per edge; an edge of the last level continues to the end of its answer."""
    normalise: Literal["none", "std"] = "none"
    """Divide by nothing, or by the siblings' population standard deviation + 1e-8."""


class DistillationAdvantage(AdvantageRecord):
    """The KL to a teacher as the advantage of each token, optionally plus the group-relative reward."""

    formula: ClassVar[str] = (
        "A_it = -kl.reward.coef KL_it W_it + outcome (r_i - mean_g), KL_it = log p - log q for estimator k1, p the policy, q the teacher, "
        "W_it = 1 + prefix_weight (1 - sum_{s<t} |KL_is| / sum_s |KL_is|)"
    )
    paper: ClassVar[str] = (
        "GKD (2306.13649), MiniLLM (2306.08543), On-policy distillation (Thinking Machines, 2025); prefix weight: IW-OPD (2606.22600)"
    )
    name: Literal["distillation"] = "distillation"
    outcome: float = Field(0.0, ge=0)
    """Weight of the reward relative to its group; 0 learns from the teacher alone."""
    prefix_weight: float = Field(0.0, ge=0)
    """How much more the first token counts than the last: weights fall from 1 + prefix_weight to 1 as the teacher's disagreement adds up."""


class NoAdvantage(AdvantageRecord):
    """Zeros, for losses that do not use advantages."""

    formula: ClassVar[str] = "A = 0"
    reads_reward: ClassVar[bool] = False
    name: Literal["none"] = "none"


ADVANTAGE_RECORDS: tuple[type[AdvantageRecord], ...] = (
    GrpoAdvantage,
    ReinforceAdvantage,
    RlooAdvantage,
    RemaxAdvantage,
    ReinforcePlusPlusAdvantage,
    ReinforcePlusPlusBaselineAdvantage,
    OpoAdvantage,
    GpgAdvantage,
    GrpoPasskAdvantage,
    RaftAdvantage,
    ReinforceRejAdvantage,
    GaeAdvantage,
    GdpoAdvantage,
    OtbAdvantage,
    SoftmeanAdvantage,
    WinRateAdvantage,
    MaxRlAdvantage,
    AsymreAdvantage,
    OpmdAdvantage,
    OfflineValueAdvantage,
    PrimeRlooAdvantage,
    GigpoAdvantage,
    HgpoAdvantage,
    MtGrpoAdvantage,
    RebnAdvantage,
    StepBroadcastAdvantage,
    BilevelGaeAdvantage,
    RaeAdvantage,
    HierarchicalGrpoAdvantage,
    SpoChainAdvantage,
    SpoTreeAdvantage,
    DistillationAdvantage,
    TrrPlusPlusAdvantage,
    NoAdvantage,
)
