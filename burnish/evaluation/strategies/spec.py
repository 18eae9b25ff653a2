"""The records of strategies and of their verifiers, for configs and `--help`. This module does not import torch.

`burnish.evaluation.strategies.registry` has the function of every record under the same name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from burnish.config.records import Record, Slot, choice, name_to_record

LIKELIHOOD, SELF_CERTAINTY, ORACLE = "likelihood", "self_certainty", "oracle"


class VerifierPart(Record):
    """What a strategy compares candidates by. Only `oracle` sees the expected answer."""

    name: str = LIKELIHOOD
    """likelihood (mean log-prob of the sampled tokens), self_certainty (2502.18581), a reward that needs no answer (model, judge, format,
    think_format, language), task (for countdown and proofs, whose questions state all that their check needs), `path/to/file.py:function`,
    `package.module:function`, or oracle."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the reward of that name, such as `path`, `delimiter` and `aggregate` of model."""


Verifier = Annotated[VerifierPart, BeforeValidator(name_to_record)]


class StrategyRecord(Slot):
    """One strategy with its options."""

    verified: ClassVar[bool] = False
    """Whether it compares candidates by a verifier."""

    @property
    def needs_variety(self) -> bool:
        """Whether it compares several answers to one question, which are all alike at temperature 0."""
        return getattr(self, "n", 2) > 1

    @property
    def width(self) -> int:
        """The requests that one search is expected to have at the same time. It sets the size of an engine's batches and no result."""
        return getattr(self, "n", 1)

    @property
    def scores(self) -> bool:
        """Whether any answer is scored with these options."""
        return self.verified

    @property
    def votes(self) -> bool:
        """Whether it counts equal answers with these options, so that several answers without a text to compare say nothing."""
        return getattr(self, "choose", None) == "vote"

    def at_budget(self, budget: int) -> StrategyRecord | None:
        """Return this strategy with the work of `budget` parallel answers, for `burnish eval --scaling`; None if it has no such size.

        The option `n` is that work. A strategy whose work has another option, or another rule, has its own method.
        """
        return self.with_options(n=budget) if "n" in type(self).model_fields else None

    def with_options(self, **options: Any) -> Self | None:
        """Return this strategy with other options; None if they make no sense."""
        try:
            return type(self).model_validate({name: getattr(self, name) for name in self.model_fields_set} | options)
        except ValidationError:
            return None


class Single(StrategyRecord):
    """One answer: the baseline that the cost of every other strategy is compared with."""

    formula: ClassVar[str] = "y ~ p(y | x)"
    name: Literal["single"] = "single"

    @property
    def needs_variety(self) -> bool:
        return False

    def at_budget(self, budget: int) -> StrategyRecord | None:
        """Return itself for a budget of one answer."""
        return self if budget == 1 else None


class Majority(StrategyRecord):
    """Samples n answers and returns the one that most of them agree on (self-consistency)."""

    formula: ClassVar[str] = "argmax_a #{i: answer(y_i) = a}; ties by the first sample"
    paper: ClassVar[str] = "Self-consistency (2203.11171)"
    name: Literal["majority"] = "majority"
    n: int = Field(16, ge=1)
    """Answers sampled."""

    @property
    def votes(self) -> bool:
        return self.n > 1


class WeightedVote(StrategyRecord):
    """Samples n answers and returns the one with the largest sum of the verifier's scores."""

    formula: ClassVar[str] = (
        "argmax_a sum_{i: answer(y_i) = a} w_i; w = score, or exp(score) for log-probs, or (n - rank + 1)^power (Borda)"
    )
    paper: ClassVar[str] = "Weighted self-consistency (2206.02336); Borda votes by self-certainty (2502.18581)"
    verified: ClassVar[bool] = True
    name: Literal["weighted_vote"] = "weighted_vote"
    n: int = Field(16, ge=1)
    """Answers sampled."""
    borda: float | None = Field(None, ge=0)
    """Weigh a vote by (n - rank + 1) to this power, with the best score at rank 1. null weighs it by the score itself."""
    verifier: Verifier = VerifierPart()
    """What scores the answers."""

    @property
    def votes(self) -> bool:
        return self.n > 1


class BestOfN(StrategyRecord):
    """Samples n answers and returns the one with the highest score."""

    formula: ClassVar[str] = "argmax_i v(x, y_i); ties by the first sample"
    paper: ClassVar[str] = "Best-of-n by a verifier (2110.14168); by step scores (2305.20050)"
    verified: ClassVar[bool] = True
    name: Literal["best_of_n"] = "best_of_n"
    n: int = Field(16, ge=1)
    """Answers sampled."""
    verifier: Verifier = VerifierPart()
    """What scores the answers."""


class Revise(StrategyRecord):
    """Asks the model to improve its answer, several times in one conversation (sequential revision, self-refine)."""

    formula: ClassVar[str] = "y_(t+1) ~ p(y | x, y_0, request_0, ..., y_t, request_t), in each of several chains"
    paper: ClassVar[str] = (
        "Self-Refine (2303.17651); sequential revisions and their choice within and across chains (2408.03314)"
    )
    needs: ClassVar[tuple[str, ...]] = ("chat",)
    verified: ClassVar[bool] = True
    name: Literal["revise"] = "revise"
    rounds: int = Field(2, ge=1)
    """Revisions of each first answer."""
    chains: int = Field(1, ge=1)
    """Conversations in parallel, each with a first answer of its own."""
    feedback: Literal["none", "self", "verifier"] = "none"
    """none: the model is just asked again. self: it first criticises its answer, which takes a turn of its own. verifier: the request quotes
    the verifier's score and its details, such as a judge's reasons; it cannot be likelihood or self_certainty. A chain ends if the verifier failed."""
    request: str | None = Field(None, min_length=1)
    """The text that asks for a revision; null has the one of the feedback. With feedback verifier, {score} and {details} stand for what the
    verifier said."""
    critique: str | None = Field(None, min_length=1)
    """The text that asks for a critique, with feedback self; null has a text of its own."""
    choose: Literal["last", "best", "vote", "by_chain"] = "last"
    """last: a vote of the chains' last answers. best: the answer with the highest score, of all. vote: a vote of all answers. by_chain: votes
    weighed by the scores, first within each chain, then among the winners."""
    stop_when_same: int | None = Field(None, ge=1)
    """End a chain when this many revisions in a row leave the answer unchanged; null does all rounds."""
    verifier: Verifier = VerifierPart()
    """What scores the answers, for feedback verifier and for best and by_chain."""

    @property
    def needs_variety(self) -> bool:
        return self.chains > 1

    @property
    def width(self) -> int:
        return self.chains

    @property
    def scores(self) -> bool:
        return self.feedback == "verifier" or self.choose in ("best", "by_chain")

    @property
    def votes(self) -> bool:
        return self.choose in ("vote", "by_chain") or (self.choose == "last" and self.chains > 1)

    def at_budget(self, budget: int) -> StrategyRecord | None:
        """Return chains of as many answers as the budget has for each of them. A rule that stops none of them is left out."""
        if budget % self.chains:
            return None
        rounds = budget // self.chains - 1
        has_rule = self.stop_when_same is not None and self.stop_when_same < rounds
        return self.with_options(rounds=rounds, stop_when_same=self.stop_when_same if has_rule else None)

    @model_validator(mode="after")
    def _check_feedback(self) -> Revise:
        quotes = [name for name in ("{score}", "{details}") if name in (self.request or "")]
        if self.feedback == "verifier" and self.request is not None and not quotes:
            raise ValueError("revise.request quotes no feedback: with feedback verifier it needs {score} or {details}")
        if self.feedback != "verifier" and quotes:
            raise ValueError(
                f"revise.request has {quotes[0]}, which is for feedback verifier, and feedback is {self.feedback}"
            )
        if self.stop_when_same is not None and self.stop_when_same >= self.rounds:
            raise ValueError(
                f"revise.stop_when_same {self.stop_when_same} ends no chain early, with rounds {self.rounds}: set it below rounds, or leave it out"
            )
        if self.feedback != "self" and self.critique is not None:
            raise ValueError(f"revise.critique is for feedback self, and feedback is {self.feedback}: leave it out")
        if not self.scores and self.verifier != VerifierPart():
            raise ValueError(
                f"revise.verifier has no effect with feedback {self.feedback} and choose {self.choose}: leave it out, or set feedback to "
                "verifier or choose to best"
            )
        return self


class BudgetForcing(StrategyRecord):
    """Makes the model think longer or shorter: suppresses the end of its thinking, or cuts it and asks for the answer."""

    formula: ClassVar[str] = (
        "end of thinking -> wait, while waits are left or thinking < min; thinking = max -> think_end + answer_prompt"
    )
    paper: ClassVar[str] = "Budget forcing of s1 (2501.19393)"
    name: Literal["budget_forcing"] = "budget_forcing"
    n: int = Field(1, ge=1)
    """Answers sampled so; with several, the most frequent one is returned."""
    waits: int = Field(1, ge=0)
    """How many times the end of the thinking is suppressed, and `wait` written in its place."""
    wait: str = Field("Wait", min_length=1)
    """The text that makes the model go on thinking."""
    think_end: str | None = Field("</think>", min_length=1)
    """The text by which the model ends its thinking, which may begin with a control token. null: all of the answer is thinking, and
    what is suppressed is its end."""
    min_thinking: int | None = Field(None, ge=1)
    """Ends are suppressed until the thinking has this many tokens, even if no waits are left."""
    max_thinking: int | None = Field(None, ge=1)
    """The thinking is cut at this many tokens. null: where the limit of the answer or the budget leaves just `answer_tokens`."""
    answer_prompt: str = "\n\nFinal answer: \\boxed{"
    """The text behind a cut thinking (and its `think_end`) that makes the answer follow."""
    answer_tokens: int = Field(64, ge=1)
    """Most tokens of the answer behind a cut thinking. That many are kept free for it."""

    @property
    def votes(self) -> bool:
        return self.n > 1

    def at_budget(self, budget: int) -> StrategyRecord | None:
        """Return it with one wait less than the budget: each makes the model think on."""
        return self.with_options(waits=budget - 1)

    @model_validator(mode="after")
    def _check_limits(self) -> BudgetForcing:
        if self.min_thinking is not None and self.max_thinking is not None and self.min_thinking > self.max_thinking:
            raise ValueError(
                f"budget_forcing.min_thinking {self.min_thinking} is above max_thinking {self.max_thinking}"
            )
        if not self.think_end and not self.answer_prompt:
            raise ValueError(
                "budget_forcing: a cut thinking needs think_end or answer_prompt, which make the answer follow"
            )
        return self


class EarlyStopping(StrategyRecord):
    """Samples answers in windows until their vote is decided (self-consistency with early stopping)."""

    formula: ClassVar[str] = (
        "certain: v1 - v2 >= n - k (ties by the first sample); unanimous: one answer in the last window; "
        "beta: P(p > 1/2) > confidence, p ~ Beta(v1 + 1, v2 + 1)"
    )
    paper: ClassVar[str] = "ESC (2401.10480) for unanimous; Adaptive-Consistency (2305.11860) for beta"
    name: Literal["early_stopping"] = "early_stopping"
    n: int = Field(16, ge=1)
    """Most answers sampled."""
    window: int = Field(4, ge=1)
    """Answers sampled at the same time, after each of which the rule is applied."""
    rule: Literal["certain", "unanimous", "beta"] = "certain"
    """certain: the answers that are left cannot change the winner, so the result is that of majority with the same n. unanimous: all answers
    of a window are the same. beta: the posterior probability that the first answer stays ahead of the second exceeds `confidence`."""
    confidence: float = Field(0.95, gt=0.5, lt=1)
    """For rule beta."""

    @property
    def width(self) -> int:
        return min(self.window, self.n)

    @property
    def votes(self) -> bool:
        return self.n > 1

    def at_budget(self, budget: int) -> StrategyRecord | None:
        """Return it with `budget` answers at most, in windows that are no larger."""
        given = {"window": min(self.window, budget)} if "window" in self.model_fields_set else {}
        return self.with_options(n=budget, **given)

    @model_validator(mode="after")
    def _check_options(self) -> EarlyStopping:
        if self.window > self.n and "window" in self.model_fields_set:
            raise ValueError(
                f"early_stopping.window {self.window} is above n {self.n}, which is the most that is sampled: set it to {self.n} or less"
            )
        if self.rule != "beta" and self.confidence != type(self).model_fields["confidence"].default:
            raise ValueError(f"early_stopping.confidence is for rule beta, and rule is {self.rule}: leave it out")
        return self


class StepValueSearch(StrategyRecord):
    """Samples n answers, continues them from their steps, and notes how often each step ends right: data for step reward models."""

    formula: ClassVar[str] = (
        "v(step) = mean score of `rollouts` continuations behind it; the answer with the highest score is returned"
    )
    paper: ClassVar[str] = "Math-Shepherd (2312.08935); bisection: OmegaPRM (2406.06592)"
    verified: ClassVar[bool] = True
    name: Literal["step_values"] = "step_values"
    n: int = Field(4, ge=1)
    """Answers sampled."""
    rollouts: int = Field(8, ge=1)
    """Continuations of a step."""
    step: str = Field("\n\n", min_length=1)
    """The text, or the name of the special token, that ends a step."""
    order: Literal["every", "bisect"] = "every"
    """every: all steps. bisect: those that a search for the first wrong step of a wrong answer visits."""
    verifier: Verifier = VerifierPart(name=ORACLE)
    """What scores the continuations."""

    @property
    def width(self) -> int:
        """Return the continuations of one step of each answer. There may be as many of every other step."""
        return self.n * self.rollouts

    def at_budget(self, budget: int) -> StrategyRecord | None:
        """Return None: it makes data, and its answers are those of best_of_n."""
        return None


class StepSearch(StrategyRecord):
    """A search over the steps of answers: partial answers are scored, and the tokens go to the promising ones."""

    verified: ClassVar[bool] = True
    step: str | None = Field("\n\n", min_length=1)
    """The text, or the name of the special token, that ends a step. A process reward model has the same one as its `delimiter`."""
    step_tokens: int | None = Field(None, ge=1)
    """Most tokens of a step; null sets no limit. With step null, every step has this many."""
    verifier: Verifier = VerifierPart()
    """What scores partial and finished answers, such as a process reward model whose `aggregate` is last, min, prod or mean."""

    @property
    def scores_steps(self) -> bool:
        """Whether the verifier scores partial answers, rather than finished ones alone."""
        return True

    @model_validator(mode="after")
    def _check_step(self) -> StepSearch:
        if self.step is None and self.step_tokens is None:
            raise ValueError(f"{self.name}: nothing ends a step; give step (a text) or step_tokens (a number)")
        return self


class BeamSearch(StepSearch):
    """Keeps the best partial answers after every step and samples the next step of each: beam search against a process reward model."""

    formula: ClassVar[str] = (
        "m_0 = M; step t: sample m_t n / M children of the kept paths, in equal parts; of the distinct paths take the m_t with the highest v; "
        "keep the open ones: m_(t+1) = m_t - #finished among them; end at m = 0; answer = argmax or weighted vote over all finished paths"
    )
    paper: ClassVar[str] = "Beam search against a process reward model (2408.03314), whose width M is n / beams here"
    name: Literal["beam_search"] = "beam_search"
    n: int = Field(16, ge=1)
    """Candidates at each step; a multiple of beams."""
    beams: int = Field(4, ge=1)
    """M: partial answers that are kept after each step. Each gets n / M children."""
    choose: Literal["best", "vote"] = "best"
    """best: the finished answer with the highest score. vote: the answer with the largest sum of scores of finished answers."""

    @model_validator(mode="after")
    def _check_beams(self) -> BeamSearch:
        check_multiple("beam_search", self.n, "beams", self.beams)
        return self


class Dvts(StepSearch):
    """Runs several independent greedy beams, so that candidates stay diverse (diverse verifier tree search)."""

    formula: ClassVar[str] = (
        "in each of M subtrees, step t: sample n / M children of the path, go on with argmax v; end when it has finished; "
        "answer = argmax or weighted vote over all finished paths of all subtrees"
    )
    paper: ClassVar[str] = "DVTS (Beeching et al. 2024, Scaling test-time compute with open models)"
    name: Literal["dvts"] = "dvts"
    n: int = Field(16, ge=1)
    """Candidates at each step in all subtrees; a multiple of subtrees."""
    subtrees: int = Field(4, ge=1)
    """M: independent subtrees. Each has n / M candidates at each step."""
    choose: Literal["best", "vote"] = "best"
    """best: the finished answer with the highest score. vote: the answer with the largest sum of scores of finished answers."""

    @model_validator(mode="after")
    def _check_subtrees(self) -> Dvts:
        check_multiple("dvts", self.n, "subtrees", self.subtrees)
        return self


class Rebase(StepSearch):
    """Shares the children of every step out by the softmax of the scores (reward-balanced search)."""

    formula: ClassVar[str] = (
        "B_0 = n, B_t = B_(t-1) - #finished at step t; W_j = B_t softmax(v / T)_j children of open path j, rounded from the best path down: "
        "W_j = ceil(b e_j / sum_{k >= j} e_k) with e = exp(v / T) and b what is left of B_t, so that sum_j W_j = B_t"
    )
    paper: ClassVar[str] = "REBASE (2408.00724); the rounding is that of its published program"
    name: Literal["rebase"] = "rebase"
    n: int = Field(16, ge=1)
    """Answers that are finished if no budget ends the search, and paths that are open at the beginning."""
    temperature: float = Field(0.2, gt=0)
    """T: a low one gives all children to the best path, a high one equal numbers to all."""
    choose: Literal["best", "vote"] = "vote"
    """best: the finished answer with the highest score. vote: the answer with the largest sum of scores of finished answers."""


class Mcts(StepSearch):
    """Grows a tree of steps by Monte-Carlo tree search: every simulation selects a leaf, evaluates it and backs its value up."""

    formula: ClassVar[str] = (
        "select argmax_a Q(s,a) + c P(a|s) sqrt(max(1, N(s))) / (1 + N(s,a)) (puct) or Q(s,a) + c sqrt(ln max(1, N(s)) / N(s,a)) (uct); "
        "P = exp(mean log-prob of the step), normalised among siblings; Q = mean or max of the values backed up, and Q(s) where N(s,a) = 0; "
        "a leaf is expanded at its second visit; a node has ceil(children * N(s)^w) sampled steps"
    )
    paper: ClassVar[str] = (
        "AlphaZero-like tree search for language models (2309.17179); rollouts as in rStar (2408.06195)"
    )
    name: Literal["mcts"] = "mcts"
    simulations: int = Field(32, ge=1)
    """Selected leaves in all. One that ends in a finished answer again costs no tokens."""
    children: int = Field(4, ge=1)
    """Steps that are sampled behind a node when it is expanded. Equal ones become one node."""
    widening: float = Field(0.0, ge=0, le=1)
    """w: a node with N visits has children * N^w sampled steps, rounded up (progressive widening). 0 adds none after the expansion, so
    a right step that was not among the first ones is never found."""
    parallel: int = Field(4, ge=1)
    """Leaves selected in one iteration, under a virtual loss, so that the engine has that many evaluations and expansions at once."""
    select: Literal["puct", "uct"] = "puct"
    """puct weighs exploration by the prior of a step. uct visits every child once before it compares them."""
    exploration: float = Field(1.0, ge=0)
    """c: the weight of exploration, for scores between 0 and 1. Scores that are log-probs count as probabilities."""
    value: Literal["verifier", "rollout"] = "verifier"
    """verifier: the score of the partial answer. rollout: the scores of answers completed from it. A finished answer has its own score."""
    rollouts: int = Field(1, ge=1)
    """Answers completed from a leaf with value rollout. They are candidates, and their steps become children without new tokens."""
    backup: Literal["mean", "max"] = "mean"
    """Q of a node: the mean or the largest of the values found at it and behind it."""
    choose: Literal["best", "visits", "vote"] = "best"
    """best: the finished answer with the highest score. visits: the end of the most visited path. vote: the answer with the largest sum of
    scores of finished answers."""

    @property
    def scores_steps(self) -> bool:
        return self.value == "verifier"

    @property
    def width(self) -> int:
        """Return the expansions or rollouts of one iteration."""
        return min(self.parallel, self.simulations) * max(self.children, self.rollouts)

    def at_budget(self, budget: int) -> StrategyRecord | None:
        """Return this search with `budget` simulations."""
        return type(self).model_validate({**self.model_dump(exclude_unset=True), "simulations": budget})

    @model_validator(mode="after")
    def _check_rollouts(self) -> Mcts:
        if self.value == "verifier" and self.rollouts != 1:
            raise ValueError(
                f"mcts: rollouts={self.rollouts} has no effect with value verifier; set value to rollout, or leave rollouts out"
            )
        return self


def check_multiple(strategy: str, n: int, key: str, parts: int) -> None:
    """Raise unless n is a multiple of the number of parts."""
    if n % parts:
        near = sorted({max(1, n // parts) * parts, (n // parts + 1) * parts})
        raise ValueError(
            f"{strategy}: n={n} is not a multiple of {key}={parts}, so the candidates cannot be shared out equally; "
            f"set n to {' or '.join(map(str, near))}"
        )


INNER_RECORDS: tuple[type[StrategyRecord], ...] = (
    Single,
    Majority,
    WeightedVote,
    BestOfN,
    Revise,
    BudgetForcing,
    EarlyStopping,
    BeamSearch,
    Dvts,
    Rebase,
    Mcts,
)
"""Strategies that `by_difficulty` can choose among."""

if TYPE_CHECKING:
    InnerStrategy: TypeAlias = Any
else:
    InnerStrategy = choice(*INNER_RECORDS, plugin=False)


class DifficultyLevel(Record):
    """The strategy for questions of one difficulty."""

    at_least: float | None = None
    """Smallest predicted value of a question of this level; null, for the last level, takes all that are left."""
    strategy: InnerStrategy
    """The strategy for these questions: any but by_difficulty and plug-ins. It has the verifier of by_difficulty."""


class ByDifficulty(StrategyRecord):
    """Predicts from a few samples how hard a question is, and gives it the strategy for such questions (compute-optimal scaling)."""

    formula: ClassVar[str] = (
        "d = share of the largest answer, or mean score, of the probe; the first level with d >= at_least"
    )
    paper: ClassVar[str] = "Compute-optimal scaling by predicted difficulty (2408.03314)"
    verified: ClassVar[bool] = True
    name: Literal["by_difficulty"] = "by_difficulty"
    probe: int = Field(4, ge=1)
    """Answers sampled first. They count among the samples of the level's strategy, except of one that searches over steps."""
    predict: Literal["agreement", "score"] = "agreement"
    """agreement: the share of the probe that has its most frequent answer. score: the mean of the verifier's scores. High is easy."""
    levels: list[DifficultyLevel] = Field(
        [DifficultyLevel(at_least=0.75, strategy=Majority(n=4)), DifficultyLevel(strategy=Majority(n=16))], min_length=1
    )
    """From easy to hard: the first level whose `at_least` the prediction reaches is taken. By default a majority of 4 from 0.75 on, else of 16."""
    verifier: Verifier = VerifierPart()
    """What scores the probe (predict score), and the answers of all levels' strategies."""

    @property
    def width(self) -> int:
        return max(self.probe, *(level.strategy.width for level in self.levels))

    @property
    def scores(self) -> bool:
        return self.predict == "score" or any(level.strategy.scores for level in self.levels)

    @property
    def votes(self) -> bool:
        return self.predict == "agreement" or any(level.strategy.votes for level in self.levels)

    def at_budget(self, budget: int) -> StrategyRecord | None:
        """Return it with the budget for its largest level, shares of it for the others, and a probe that is no larger than any level."""
        sizes = [getattr(level.strategy, "n", 0) for level in self.levels]
        if not all(sizes):
            return None
        shares = [max(1, budget * size // max(sizes)) for size in sizes]
        sized = [level.strategy.at_budget(n) for level, n in zip(self.levels, shares, strict=True)]
        if None in sized:
            return None
        levels = [level.model_copy(update={"strategy": one}) for level, one in zip(self.levels, sized, strict=True)]
        return self.with_options(levels=levels, probe=min(self.probe, *shares))

    @model_validator(mode="after")
    def _check_levels(self) -> ByDifficulty:
        *limits, last = [level.at_least for level in self.levels]
        given = [limit for limit in limits if limit is not None]
        if last is not None or len(given) < len(limits):
            raise ValueError(
                "by_difficulty.levels: the last level, and no other, has at_least null, so that every question has a level"
            )
        if any(easier <= harder for easier, harder in zip(given, given[1:], strict=False)):
            raise ValueError(f"by_difficulty.levels go from easy to hard, so at_least must fall, and is {given}")
        for level in self.levels:
            own = getattr(level.strategy, "verifier", self.verifier)
            if "verifier" in level.strategy.model_fields_set and own != self.verifier:
                raise ValueError(
                    f"by_difficulty.levels: {level.strategy.name} has a verifier ({own.name}) of its own, but all levels have one: give it "
                    "as by_difficulty.verifier"
                )
        if not self.scores and self.verifier != VerifierPart():
            raise ValueError(
                "by_difficulty.verifier has no effect: predict is agreement, and no level's strategy compares scores"
            )
        return self


STRATEGY_RECORDS: tuple[type[StrategyRecord], ...] = (*INNER_RECORDS, ByDifficulty, StepValueSearch)

if TYPE_CHECKING:
    Strategy = Slot
else:
    Strategy = choice(*STRATEGY_RECORDS)
