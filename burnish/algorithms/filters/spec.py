"""Slot `filters`: records of group filters, sample filters and resamplers; and the refill (dynamic sampling)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from burnish.config.records import Record, Slot

REFILLED = "; with refill.rounds above 1 this is dynamic sampling: more prompts are drawn for those dropped"


class FilterRecord(Slot):
    """One choice for the slot `filters`."""

    of_groups: ClassVar[bool] = False
    """Whether it drops whole groups before advantages, so that a refill can replace them."""
    reads_reward: ClassVar[bool] = False
    """Whether its result depends on the shaped reward."""
    of_answers: ClassVar[bool] = False
    """Whether it takes whole answers out of the loss or repeats them."""


# --- Group filters, before advantages


class ZeroSignalFilter(FilterRecord):
    """Drops groups whose rewards (or accuracies) are all equal: they have no gradient and only dilute the mean."""

    formula: ClassVar[str] = "keep group g iff max_g x > min_g x or its size is 1, x the metric" + REFILLED
    paper: ClassVar[str] = "DAPO (2503.14476), dynamic sampling"
    needs: ClassVar[tuple[str, ...]] = ("groups",)
    of_groups: ClassVar[bool] = True
    reads_reward: ClassVar[bool] = True
    name: Literal["zero_signal"] = "zero_signal"
    metric: Literal["reward", "accuracy"] = "reward"
    """What must differ within the group: the shaped reward, or the accuracy."""


class DifficultyBandFilter(FilterRecord):
    """Drops groups that are too easy or too hard to learn from."""

    formula: ClassVar[str] = "keep group g iff low <= mean_g accuracy <= high" + REFILLED
    paper: ClassVar[str] = "Online difficulty filtering, Bae et al. (2504.03380); PRIME (2502.01456)"
    needs: ClassVar[tuple[str, ...]] = ("groups", "accuracy")
    of_groups: ClassVar[bool] = True
    name: Literal["difficulty_band"] = "difficulty_band"
    low: float = Field(0.2, ge=0, le=1)
    """The smallest mean accuracy kept."""
    high: float = Field(0.8, ge=0, le=1)
    """The largest mean accuracy kept."""

    @model_validator(mode="after")
    def _check_band(self) -> DifficultyBandFilter:
        if self.low > self.high:
            raise ValueError(f"difficulty_band keeps nothing: low {self.low} is above high {self.high}")
        if self.low == 0 and self.high == 1:
            raise ValueError("difficulty_band from 0 to 1 keeps everything: leave the filter out")
        return self


class TruncationFilter(FilterRecord):
    """Drops groups that contain a truncated sample."""

    formula: ClassVar[str] = "keep group g iff none of its samples is truncated" + REFILLED
    paper: ClassVar[str] = "PRIME (2502.01456)"
    of_groups: ClassVar[bool] = True
    name: Literal["truncation"] = "truncation"


class SnrFilter(FilterRecord):
    """Keeps the groups whose rewards differ most: the others add the noise of the regularisers and little signal of the task."""

    formula: ClassVar[str] = (
        "s_g = std of the group's rewards; groups in order of falling s > 0 while the sum taken is below share * sum(s) - slack; all if share = 1"
        + REFILLED
    )
    paper: ClassVar[str] = "RAGEN-2 (2604.06268)"
    needs: ClassVar[tuple[str, ...]] = ("groups",)
    of_groups: ClassVar[bool] = True
    reads_reward: ClassVar[bool] = True
    name: Literal["snr"] = "snr"
    mode: Literal["linear", "softmax", "top", "relative"] = "linear"
    """linear: groups that hold `share` of the summed spread. softmax: the fewest whose softmax(s) add up to `share`. top: `share` of the
    groups. relative: those with at least `share` of the largest spread."""
    share: float = Field(0.9, gt=0, le=1)
    """How much is kept, in the unit of `mode`."""
    slack: float = Field(0.01, ge=0)
    """Subtracted from the bound of mode linear, so that a group is not kept for the last hundredth."""
    include_zero: bool = True
    """Whether groups without any spread may be kept too: in mode linear only with share 1, in the others where their rule takes them."""
    scale: Literal["none", "share", "sqrt"] = "none"
    """Multiply the advantages by the share of groups that the filters keep, by its square root, or by nothing."""

    rollout_options: ClassVar[tuple[str, ...]] = ("scale",)

    @model_validator(mode="after")
    def _check_slack_is_used(self) -> SnrFilter:
        if self.mode == "linear" and self.share < 1 and not self.include_zero:
            raise ValueError(
                "snr.include_zero=false has no effect: mode linear never keeps such groups with share below 1"
            )
        if self.mode != "linear" and self.slack != 0.01:
            raise ValueError(f"snr.slack has no effect with mode {self.mode}: use mode linear, or leave it out")
        return self


# --- Sample filters, after advantages


class OverlongFilter(FilterRecord):
    """Takes truncated samples out of the loss; they still count in their group's statistics."""

    formula: ClassVar[str] = "loss_mask of a truncated sequence := 0, after advantages"
    paper: ClassVar[str] = "DAPO (2503.14476)"
    of_answers: ClassVar[bool] = True
    name: Literal["overlong"] = "overlong"


class VoidTurnsFilter(FilterRecord):
    """Takes an agent's trajectories with a void turn out of the loss; they still count in their group's statistics."""

    formula: ClassVar[str] = (
        "loss_mask of a trajectory := 0 if one of its turns has neither a complete call nor a final answer, after advantages"
    )
    paper: ClassVar[str] = "SimpleTIR (2509.02479)"
    needs: ClassVar[tuple[str, ...]] = ("void_turns",)
    of_answers: ClassVar[bool] = True
    name: Literal["void_turns"] = "void_turns"


class NonStubFilter(FilterRecord):
    """Takes empty answers and stubs out of the loss: a single line of a few characters."""

    formula: ClassVar[str] = (
        "loss_mask of an answer := 0 if it is empty, or one line of fewer than min_chars characters"
    )
    paper: ClassVar[str] = "simple self-distillation (2604.01193)"
    needs: ClassVar[tuple[str, ...]] = ("text_sizes",)
    of_answers: ClassVar[bool] = True
    name: Literal["non_stub"] = "non_stub"
    min_chars: int = Field(10, ge=1)
    """An answer of one line needs this many characters, without spaces around it."""


class PositivesOnlyFilter(FilterRecord):
    """Trains only on samples with a positive reward."""

    formula: ClassVar[str] = "loss_mask of a sequence with r <= 0 := 0, after advantages"
    paper: ClassVar[str] = "RAFT++, A minimalist approach to LLM reasoning (2504.11343)"
    reads_reward: ClassVar[bool] = True
    of_answers: ClassVar[bool] = True
    name: Literal["positives_only"] = "positives_only"


class CppoFilter(FilterRecord):
    """Prunes the samples of each group with the smallest |A| and saves their backward pass."""

    formula: ClassVar[str] = "per group keep the max(1, floor(G (1 - prune))) samples of largest |A|"
    paper: ClassVar[str] = "CPPO (2503.22342)"
    needs: ClassVar[tuple[str, ...]] = ("groups",)
    of_answers: ClassVar[bool] = True
    name: Literal["cppo"] = "cppo"
    prune: float = Field(0.5, gt=0, lt=1)
    """The share of each group that is pruned."""


class ProbMaskFilter(FilterRecord):
    """Trains only on tokens where the old policy was not certain."""

    formula: ClassVar[str] = "loss_mask_t := loss_mask_t and exp(old_t) < below"
    paper: ClassVar[str] = "SPO (2505.23564), probability mask"
    needs: ClassVar[tuple[str, ...]] = ("old",)
    name: Literal["prob_mask"] = "prob_mask"
    below: float = Field(0.9, gt=0, le=1)
    """Tokens of this probability or more leave the loss."""


class SeqErrorFilter(FilterRecord):
    """Takes samples out of the loss for which the log-probs of engine and trainer disagree."""

    formula: ClassVar[str] = (
        "loss_mask of a sequence := 0 if mean_t exp(|behaviour_t - old_t|) > threshold, after advantages"
    )
    paper: ClassVar[str] = "NeMo-RL"
    needs: ClassVar[tuple[str, ...]] = ("old",)
    of_answers: ClassVar[bool] = True
    name: Literal["seq_error"] = "seq_error"
    threshold: float = Field(2.0, gt=1)
    """Largest mean error kept; 1 means that engine and trainer agree on every token."""


class ClipBFilter(FilterRecord):
    """Takes tokens with a negative advantage out of the loss where pushing them down would sharpen the distribution."""

    formula: ClassVar[str] = (
        "loss_mask_t := 0 if A_t < 0 and S_t - mean(S) < -mu std(S), S = p (H + log p), p = exp(behaviour_t), H the entropy at t; all "
        "tokens are kept if std(S) < 1e-12"
    )
    paper: ClassVar[str] = "CLIP_B of Trinity-RFT"
    needs: ClassVar[tuple[str, ...]] = ("old", "entropy")
    name: Literal["clip_b"] = "clip_b"
    mu: float = Field(2.5, ge=0)
    """Deviations below the mean from which on a token is dropped."""


class BalanceFilter(FilterRecord):
    """Drops samples of negative advantage at random until a group has no more of them than of positive ones."""

    formula: ClassVar[str] = "per group drop max(0, #(A < 0) - #(A > 0)) of the samples with A < 0, drawn by their keys"
    paper: ClassVar[str] = "REC (2509.24203), as in Trinity-RFT"
    needs: ClassVar[tuple[str, ...]] = ("groups",)
    of_answers: ClassVar[bool] = True
    name: Literal["balance"] = "balance"


class TreeEdgesFilter(FilterRecord):
    """Trains on a few edges of each tree that have a nonzero advantage; each replay of a tree uses other edges."""

    formula: ClassVar[str] = (
        "of the edges with A != 0, in an order drawn once per tree: numbers most * use to most * (use + 1) - 1, use = earlier uses of the tree"
    )
    paper: ClassVar[str] = "SPO-tree (2505.23564)"
    needs: ClassVar[tuple[str, ...]] = ("tree",)
    name: Literal["tree_edges"] = "tree_edges"
    most: int = Field(32, ge=1)
    """Largest number of edges of one tree in the loss of a step."""


# --- Resamplers, after advantages


class PfPpoFilter(FilterRecord):
    """Resamples each group with replacement, favouring extreme rewards, where a learned reward model is most reliable."""

    formula: ClassVar[str] = "G draws per group, p_i proportional to w_i + 1e-8; power: w = |r|^power"
    paper: ClassVar[str] = "PF-PPO, policy filtration (2409.06957)"
    needs: ClassVar[tuple[str, ...]] = ("groups",)
    reads_reward: ClassVar[bool] = True
    of_answers: ClassVar[bool] = True
    name: Literal["pf_ppo"] = "pf_ppo"
    mode: Literal["power", "best_worst", "best_random", "best"] = "power"
    """The weights: |r|^power; 1 for best and worst, else 0; 0.4 for the best and 0.1 for others; the best only."""
    power: float = Field(2.0, ge=0)
    """The exponent of mode power."""

    @model_validator(mode="after")
    def _check_power_is_used(self) -> PfPpoFilter:
        if self.mode != "power" and self.power != 2.0:
            raise ValueError(f"pf_ppo.power has no effect with mode {self.mode}: use mode power, or leave it out")
        return self


class PairsFilter(FilterRecord):
    """Keeps the best and the worst sample of each group, as a pair for a preference loss."""

    formula: ClassVar[str] = (
        "per group chosen = argmax r, rejected = argmin r; no pair if the two are equal in reward or in every token"
    )
    paper: ClassVar[str] = "Online DPO (2402.04792)"
    needs: ClassVar[tuple[str, ...]] = ("groups",)
    reads_reward: ClassVar[bool] = True
    name: Literal["pairs"] = "pairs"


FILTER_RECORDS: tuple[type[FilterRecord], ...] = (
    ZeroSignalFilter,
    DifficultyBandFilter,
    TruncationFilter,
    SnrFilter,
    OverlongFilter,
    VoidTurnsFilter,
    NonStubFilter,
    PositivesOnlyFilter,
    CppoFilter,
    ProbMaskFilter,
    SeqErrorFilter,
    ClipBFilter,
    BalanceFilter,
    TreeEdgesFilter,
    PfPpoFilter,
    PairsFilter,
)


class Refill(Record):
    """Draws more prompts in a step for the groups that group filters drop (DAPO, 2503.14476; PRIME, 2502.01456)."""

    rounds: int = Field(1, ge=1)
    """Largest number of generation rounds in a step; 1 never refills."""
    oversample: int = Field(1, ge=1)
    """Prompts drawn per round, as a multiple of rollout.prompts; surplus groups are dropped."""
    enough: float = Field(1.0, gt=0, le=1)
    """The rounds end when this share of rollout.prompts groups is kept."""
    short: Literal["error", "partial", "fill"] = "partial"
    """If groups are still missing after the last round: stop with an error, train on what there is, or use dropped groups too (PRIME)."""

    @model_validator(mode="after")
    def _check_options_have_effect(self) -> Refill:
        if self.rounds == 1 and self.enough != 1.0 and self.short != "error":
            raise ValueError("refill.enough ends the rounds early, and there is only one: raise refill.rounds")
        if self.rounds == 1 and self.oversample == 1 and self.short == "fill":
            raise ValueError("refill.short=fill would put every dropped group back: raise refill.rounds or oversample")
        return self
