"""Slot `shaping`: records of changes to the reward between the verifier and the advantages, in the order of the config.

A shaper gives the new reward of each sample, or, if `dense`, rewards of single tokens to add. No shaper changes accuracy.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from burnish.config.records import Slot


class Shaper(Slot):
    """A choice for the slot `shaping`."""

    dense: ClassVar[bool] = False
    """Whether it returns token rewards to add [N] instead of the new reward of each sequence [S]."""
    of_turns: ClassVar[bool] = False
    """Whether its token rewards are of whole turns, so that an advantage of turns can read them too."""

    @property
    def may_be_negative(self) -> bool:
        """Whether a reward of 0 or more can become negative."""
        return True


# --- Length


class SoftOverlongShaper(Shaper):
    """Penalises length gradually over the last tokens before the limit, instead of abruptly at truncation."""

    formula: ClassVar[str] = "r - factor * clip((len - (max_tokens - cache)) / cache, 0, 1)"
    paper: ClassVar[str] = "DAPO (2503.14476), which has max_tokens 20480 and cache 4096"
    name: Literal["soft_overlong"] = "soft_overlong"
    max_tokens: int | None = Field(None, ge=1)
    """The length with the full penalty; null means rollout.max_tokens x environment.max_turns, at most environment.max_tokens."""
    cache: int | None = Field(None, ge=1)
    """How many tokens before max_tokens the penalty begins; null means a fifth of max_tokens, as in DAPO."""
    factor: float = Field(1.0, gt=0)
    """The full penalty."""

    @model_validator(mode="after")
    def _check_cache_fits(self) -> SoftOverlongShaper:
        if self.max_tokens is not None and self.cache is not None and self.cache > self.max_tokens:
            raise ValueError(f"soft_overlong.cache {self.cache} is above max_tokens {self.max_tokens}")
        return self


class KimiLengthShaper(Shaper):
    """Rewards answers that are shorter than the others of the group; for a wrong answer the term is never positive."""

    formula: ClassVar[str] = (
        "r + weight * l, l = 1/2 - (len - min_g) / (max_g - min_g), at most 0 if wrong, 0 if all lengths are equal"
    )
    paper: ClassVar[str] = "Kimi k1.5 (2501.12599)"
    needs: ClassVar[tuple[str, ...]] = ("groups", "accuracy")
    name: Literal["kimi_length"] = "kimi_length"
    weight: float = Field(1.0, gt=0)
    """Weight of the length reward."""
    warmup_steps: int = Field(0, ge=0)
    """Number of first steps without the length reward."""


class LinearLengthShaper(Shaper):
    """Reduces the reward of samples that are long for their group, in proportion to how often the prompt is solved."""

    formula: ClassVar[str] = (
        "r - mean_g(r) (output len / max_g len + input in / max_g in + turns k / max_g k); len tokens written, in tokens read, k turns; "
        "each max at least 1"
    )
    paper: ClassVar[str] = "prime-rl"
    needs: ClassVar[tuple[str, ...]] = ("groups",)
    name: Literal["linear_length"] = "linear_length"
    output: float = Field(0.25, ge=0)
    """Weight of the tokens that the model wrote."""
    input: float = Field(0.1, ge=0)
    """Weight of the tokens that it read and did not write: prompt, tool results, observations."""
    turns: float = Field(0.1, ge=0)
    """Weight of its turns."""

    @model_validator(mode="after")
    def _check_any_weight(self) -> LinearLengthShaper:
        if self.output == self.input == self.turns == 0:
            raise ValueError("linear_length with weights 0 changes nothing: leave it out")
        return self


class CosineShaper(Shaper):
    """Replaces the reward by one of correctness and length: right answers get more if short, wrong answers if long."""

    formula: ClassVar[str] = (
        "x_T + (x_0 - x_T) (1 + cos(pi len / max_tokens)) / 2; exceeded if len + margin >= max_tokens"
    )
    paper: ClassVar[str] = "Demystifying long chain-of-thought (2502.03373)"
    needs: ClassVar[tuple[str, ...]] = ("accuracy",)
    name: Literal["cosine"] = "cosine"
    max_tokens: int | None = Field(None, ge=1)
    """The length at which the curve ends; null means rollout.max_tokens x environment.max_turns, at most environment.max_tokens."""
    correct: tuple[float, float] = (2.0, 1.0)
    """Reward of a right answer of length 0, and of full length."""
    wrong: tuple[float, float] = (-10.0, 0.0)
    """Reward of a wrong answer of length 0, and of full length."""
    exceeded: float = -10.0
    """Reward of an answer that is too long."""
    margin: int = Field(0, ge=0)
    """An answer is too long from this many tokens before max_tokens on; the paper's code has 16."""

    @property
    def may_be_negative(self) -> bool:
        return min(*self.correct, *self.wrong, self.exceeded) < 0


class LcpoExactShaper(Shaper):
    """Replaces the reward: 1 for a right answer, minus a penalty for every token off the length that the prompt asks for."""

    formula: ClassVar[str] = "1[right] - alpha |budget - len|"
    paper: ClassVar[str] = "LCPO, L1 (2503.04697)"
    needs: ClassVar[tuple[str, ...]] = ("accuracy", "budget")
    name: Literal["lcpo_exact"] = "lcpo_exact"
    alpha: float = Field(0.0003, gt=0)
    """Penalty per token above or below the budget."""


class LcpoMaxShaper(Shaper):
    """Replaces the reward: a right answer gets more the shorter it is, and 0 from some tokens above the length that the prompt allows."""

    formula: ClassVar[str] = "1[right] clip(alpha (budget - len) + delta, 0, 1)"
    paper: ClassVar[str] = "LCPO, L1-Max (2503.04697)"
    needs: ClassVar[tuple[str, ...]] = ("accuracy", "budget")
    name: Literal["lcpo_max"] = "lcpo_max"
    alpha: float = Field(0.0003, gt=0)
    """Change of the reward per token."""
    delta: float = Field(0.5, ge=0, le=1)
    """Reward of a right answer that uses the whole budget."""

    @property
    def may_be_negative(self) -> bool:
        return False


# --- Repetition


class RepetitionShaper(Shaper):
    """Penalises the share of repeated n-grams."""

    formula: ClassVar[str] = "r + penalty * (1 - unique n-grams / all n-grams)"
    paper: ClassVar[str] = "Demystifying long chain-of-thought (2502.03373)"
    name: Literal["repetition"] = "repetition"
    ngram: int = Field(40, ge=1)
    """Length of the n-grams in tokens."""
    penalty: float = Field(-1.0, lt=0)
    """Penalty of an answer that only repeats one n-gram."""


class RepetitionDenseShaper(Shaper):
    """Penalises the tokens of repeated n-grams, with a discount of their own."""

    formula: ClassVar[str] = (
        "token t of an n-gram seen before: p_t = penalty; adds R_t - R_{t+1}, R_t = sum_{s>=t} gamma^(s-t) p_s"
    )
    paper: ClassVar[str] = "Demystifying long chain-of-thought (2502.03373)"
    dense: ClassVar[bool] = True
    name: Literal["repetition_dense"] = "repetition_dense"
    ngram: int = Field(40, ge=1)
    """Length of the n-grams in tokens."""
    penalty: float = Field(-0.05, lt=0)
    """Penalty of each token in a repeated n-gram."""
    gamma: float = Field(0.99, ge=0, le=1)
    """Discount of these penalties, independent of the advantage's."""


# --- Turns


class InformationGainShaper(Shaper):
    """Rewards each turn before the last with how much likelier it made the known answer."""

    formula: ClassVar[str] = (
        "turn k < K: + weight (p_k - p_{k-1}), p_k = exp(mean log-prob of the answer's tokens behind the context after turn k and `before`)"
    )
    paper: ClassVar[str] = "IGPO (2510.14967), the reward alone: its normalisation is not settled"
    needs: ClassVar[tuple[str, ...]] = ("turns", "answers")
    rollout_options: ClassVar[tuple[str, ...]] = ("before",)
    dense: ClassVar[bool] = True
    of_turns: ClassVar[bool] = True
    name: Literal["information_gain"] = "information_gain"
    before: str = "<answer>"
    """Text between the context and the answer: how the model begins a final answer."""
    weight: float = Field(1.0, gt=0)
    """Factor of the gains. The last turn keeps the outcome's reward."""


# --- Outcome


class StopProperlyShaper(Shaper):
    """Reduces the reward of truncated samples."""

    formula: ClassVar[str] = "truncated: r * coef if coef >= 0, else coef"
    paper: ClassVar[str] = "ProRL (2505.24864)"
    name: Literal["stop_properly"] = "stop_properly"
    coef: float = Field(0.5, lt=1)
    """0 to 1: the share of its reward that a truncated sample keeps. Negative: its reward."""

    @property
    def may_be_negative(self) -> bool:
        return self.coef < 0


class T1PenaltyShaper(Shaper):
    """Penalises answers that are truncated, repeat themselves or mix scripts, whether right or wrong."""

    formula: ClassVar[str] = "-1 if truncated, or repeated n-grams > share, or part < script_low; else r"
    paper: ClassVar[str] = "T1 (2501.11651)"
    name: Literal["t1_penalty"] = "t1_penalty"
    ngram: int = Field(20, ge=1)
    """Length of the n-grams in tokens."""
    share: float = Field(0.2, ge=0, lt=1)
    """Largest allowed share of repeated n-grams."""
    script_part: str | None = None
    """The reward part that measures how much of the answer is in the right script, such as language; null skips this check."""
    script_low: float = 0.8
    """Smallest value of that part without a penalty."""

    @model_validator(mode="after")
    def _check_script_low_is_used(self) -> T1PenaltyShaper:
        if self.script_part is None and self.script_low != 0.8:
            raise ValueError("t1_penalty.script_low has no effect without script_part: name the reward part it is for")
        return self


class SignedShaper(Shaper):
    """Replaces the reward: one value for right answers and one for wrong answers."""

    formula: ClassVar[str] = "right if accuracy is 1, else wrong"
    paper: ClassVar[str] = "DAPO (2503.14476)"
    needs: ClassVar[tuple[str, ...]] = ("accuracy",)
    name: Literal["signed"] = "signed"
    right: float = 1.0
    """Reward of a right answer."""
    wrong: float = -1.0
    """Reward of a wrong answer."""

    @property
    def may_be_negative(self) -> bool:
        return min(self.right, self.wrong) < 0


SHAPER_RECORDS: tuple[type[Shaper], ...] = (
    SoftOverlongShaper,
    KimiLengthShaper,
    LinearLengthShaper,
    CosineShaper,
    RepetitionShaper,
    RepetitionDenseShaper,
    InformationGainShaper,
    LcpoExactShaper,
    LcpoMaxShaper,
    StopProperlyShaper,
    T1PenaltyShaper,
    SignedShaper,
)
