"""Verifiers: what strategies compare candidates by. None of them but `oracle` gets the expected answer.

A verifier scores `ScoreRequest`s that hold a question and a path, and nothing else of the row. Rewards that need no answer (a reward
model, a judge, a user's function, the rules of a format) run in the machinery that scores training, so a verifier costs one line of
config. `likelihood` and `self_certainty` need the policy alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from burnish.config.data import Reward, RewardPart
from burnish.config.errors import UserError, unknown_name_error
from burnish.config.plugins import is_plugin
from burnish.config.records import Slot
from burnish.core.segments import offsets_from_lengths
from burnish.data.row import Row
from burnish.distributed.roles import build_scorers
from burnish.evaluation.strategies.spec import (
    LIKELIHOOD,
    ORACLE,
    SELF_CERTAINTY,
    ByDifficulty,
    StepSearch,
    VerifierPart,
)
from burnish.models.decoder import Decoder
from burnish.models.policy import PolicyModel, find_directory
from burnish.models.tokenizer import Tokenizer
from burnish.rewards.judge_options import JudgeOptions
from burnish.rewards.reward_parts import JUDGE, MODEL, RewardModelOptions, check_parts
from burnish.rewards.score_types import Score, ScoreRequest
from burnish.rewards.scoring import Rewards
from burnish.training.reward_scorer import delimiter_to_read

KEYLESS_REWARDS = (MODEL, JUDGE, "format", "think_format", "language")
"""Rewards that read the completion, and at most the question."""
STATED = {"countdown": ("numbers",), "proofs": ()}
"""Generated tasks whose question states all that their check needs, and the columns that it is in: numbers and a target, or a theorem."""
PACK_TOKENS = 8192
"""Most tokens in one forward pass of `self_certainty`."""
OPTION, REWARD_OPTION = "strategy.verifier", "reward.parts[0]"
"""The option that a verifier has in a config, and the one that its reward has in messages about rewards."""
LOGIT_ROWS = 256
"""Positions whose logits are in memory at the same time."""


class Verifier(Protocol):
    """Scores paths in the background."""

    is_local: bool
    """Whether scores are computed in this process when they are polled, so that many should be polled at once."""

    @property
    def pending(self) -> int:
        """Requests that were submitted and not returned."""

    def submit(self, requests: Sequence[ScoreRequest]) -> None:
        """Start scoring."""

    def poll(self, timeout_s: float | None) -> list[Score]:
        """Return the finished scores; wait at most `timeout_s` for the first."""

    def close(self) -> None:
        """Release processes and models."""


class LocalVerifier:
    """A verifier that computes all waiting scores at once in this process, when it is polled. It reads all tokens of each path."""

    is_local = True

    def __init__(self, compute: Callable[[Sequence[ScoreRequest]], Sequence[float]]) -> None:
        self._compute = compute
        self._waiting: list[ScoreRequest] = []

    @property
    def pending(self) -> int:
        return len(self._waiting)

    def submit(self, requests: Sequence[ScoreRequest]) -> None:
        self._waiting += requests

    def poll(self, timeout_s: float | None) -> list[Score]:
        requests, self._waiting = self._waiting, []
        values = self._compute(requests) if requests else []
        return [
            Score(one.id, value, None, num_tokens=len(list(one.tokens or ())))
            for one, value in zip(requests, values, strict=True)
        ]

    def close(self) -> None:
        self._waiting.clear()


class RewardVerifier:
    """A reward as a verifier. `rows` are the rows by the id of their question, for the oracle and for checks of what a question states."""

    def __init__(
        self,
        rewards: Rewards,
        rows: Mapping[str, Row] | None = None,
        is_oracle: bool = False,
        is_local: bool = False,
    ) -> None:
        self._rewards, self._rows, self._is_oracle, self.is_local = rewards, rows, is_oracle, is_local

    @property
    def pending(self) -> int:
        return self._rewards.pending

    def submit(self, requests: Sequence[ScoreRequest]) -> None:
        scored = [self._with_row(request) for request in requests]
        with self._errors():
            self._rewards.submit(scored)

    def poll(self, timeout_s: float | None) -> list[Score]:
        with self._errors():
            scores = self._rewards.poll(timeout_s)
        if self._is_oracle:
            # Details of a check against the key may state the key, and strategies quote details to the model.
            return [replace(score, details={}) for score in scores]
        return [score if score.error is None else replace(score, error=_of_verifier(score.error)) for score in scores]

    def close(self) -> None:
        self._rewards.close()

    def _errors(self) -> AbstractContextManager[None]:
        return nullcontext() if self._is_oracle else errors_of_verifier()

    def _with_row(self, request: ScoreRequest) -> ScoreRequest:
        if self._rows is None:
            return request
        row = self._rows[question_of(request.id)]
        columns = row.extra if self._is_oracle else _stated_columns(row)
        return replace(request, answer=row.answer, extra=dict(columns), nested=row.nested, style=row.style)


def _of_verifier(message: str) -> str:
    return message.replace(REWARD_OPTION, OPTION)


@contextmanager
def errors_of_verifier() -> Iterator[None]:
    """Errors of the reward that is a verifier name the option of the verifier."""
    try:
        yield
    except UserError as error:
        raise UserError(_of_verifier(str(error))) from error


def question_of(request: str) -> str:
    """Return the id of the question of a score request, whose id begins with the name of its search (`Search.name`)."""
    return request.rpartition("#")[0]


def _stated_columns(row: Row) -> dict[str, Any]:
    """Return the columns of a row that its question states. A row of another task is an error."""
    task = row.extra.get("task")
    if task not in STATED:
        raise UserError(
            f"row {row.id}: verifier task checks what the question states, which is so for the tasks {', '.join(STATED)}, and not for "
            f"{task or row.data_source!r}; use a model, a judge or a function of yours, or verifier oracle, which reads the answer"
        )
    return {name: row.extra[name] for name in ("task", *STATED[task])}


def build_verifier(
    part: VerifierPart, policy: PolicyModel, reward: Reward, base: Path | None, rows: Mapping[str, Row]
) -> Verifier | None:
    """Return the verifier of a config; None for `likelihood`, which needs nothing but the sampled log-probs.

    `reward` is that of the evaluation: the oracle scores with it, and the others take its workers and limits. Everything about the
    options that can be wrong is found here.
    """
    _check_options(part, policy, rows)
    if part.name == LIKELIHOOD:
        return None
    if part.name == SELF_CERTAINTY:
        return LocalVerifier(SelfCertainty(policy.module))
    if part.name == ORACLE:
        return RewardVerifier(_scored(reward, policy.tokenizer, base), rows, is_oracle=True)
    if part.name == "task":
        with errors_of_verifier():
            return RewardVerifier(_scored(_with_part(reward, "task", {}), policy.tokenizer, base), rows)
    return keyless_verifier(part, reward, policy.tokenizer, base)


def check_verifier(
    part: VerifierPart, policy: PolicyModel, reward: Reward, base: Path | None, rows: Mapping[str, Row]
) -> None:
    """Raise a `UserError` for what is wrong with a verifier or with a row that it cannot score. No model is loaded."""
    _check_options(part, policy, rows)
    if part.name == ORACLE:
        _check_scored(reward, policy.tokenizer, base)
    elif part.name not in (LIKELIHOOD, SELF_CERTAINTY, "task"):
        with errors_of_verifier():
            _check_scored(_with_part(reward, part.name, part.options), policy.tokenizer, base)


def _check_options(part: VerifierPart, policy: PolicyModel, rows: Mapping[str, Row]) -> None:
    where = f"{OPTION} ({part.name})"
    if part.name in (LIKELIHOOD, SELF_CERTAINTY, ORACLE, "task") and part.options:
        raise UserError(f"{where} has no options, got {', '.join(part.options)}")
    if part.name == SELF_CERTAINTY:
        SelfCertainty(policy.module)
    elif part.name == "task":
        for row in rows.values():
            _stated_columns(row)
    elif part.name not in (LIKELIHOOD, ORACLE):
        _check_keyless(part)


def _check_keyless(part: VerifierPart) -> None:
    where = f"{OPTION} ({part.name})"
    if not is_plugin(part.name) and part.name not in KEYLESS_REWARDS:
        known = [LIKELIHOOD, SELF_CERTAINTY, *KEYLESS_REWARDS, "task", ORACLE, "path/to/file.py:function"]
        raise unknown_name_error("verifier", part.name, known)
    if part.name == JUDGE and JudgeOptions.of(part.options, where).shows_expected:
        raise UserError(
            f"{where}: the judge's template shows the expected answer ({{expected}}), which a strategy may not see: give options.template "
            "a text with {question} and {answer}, and options.parser score or boxed"
        )


def keyless_verifier(part: VerifierPart, reward: Reward, tokenizer: Tokenizer, base: Path | None) -> RewardVerifier:
    """Return a reward that needs no answer as a verifier. `reward` has the workers and limits."""
    _check_keyless(part)
    with errors_of_verifier():
        scored = _scored(_with_part(reward, part.name, part.options), tokenizer, base)
        return RewardVerifier(scored, is_local=part.name == MODEL)


def step_delimiter(part: VerifierPart, base: Path | None) -> str | None:
    """Return what ends the steps that a verifier scores; None for one that scores any text."""
    if part.name != MODEL:
        return None
    with errors_of_verifier():
        options = RewardModelOptions.of(part.options, f"{REWARD_OPTION} ({MODEL})")
        return delimiter_to_read(find_directory(options.path, base, with_weights=False), options)


def check_steps(strategy: Slot, delimiter: str | None) -> None:
    """Refuse a search whose partial answers end elsewhere than the steps that its verifier scores."""
    inner = [level.strategy for level in strategy.levels] if isinstance(strategy, ByDifficulty) else []
    for one in (strategy, *inner):
        if isinstance(one, StepSearch) and one.scores_steps and delimiter not in (None, one.step):
            ends = (
                "after step_tokens alone (step is null)" if one.step is None else f"with {one.step!r} (strategy.step)"
            )
            raise UserError(
                f"{one.name}: its steps end {ends}, and the step reward model that scores them reads steps that end with {delimiter!r}: it would "
                f"score texts of a kind that it has not learnt; set step to {delimiter!r}, or search with another model"
            )


def _check_scored(reward: Reward, tokenizer: Tokenizer, base: Path | None) -> None:
    check_parts(reward.parts, base)
    build_scorers(reward, tokenizer, base, ())


def _with_part(reward: Reward, name: str, options: Mapping[str, Any]) -> Reward:
    return reward.model_copy(update={"parts": [RewardPart(name=name, options=dict(options))], "sandbox": "namespaces"})


def _scored(reward: Reward, tokenizer: Tokenizer, base: Path | None) -> Rewards:
    rewards = Rewards(reward, base)
    try:
        rewards.attach_scorers(build_scorers(reward, tokenizer, base))
    except BaseException:
        rewards.close()
        raise
    return rewards


class SelfCertainty:
    """Mean over an answer's tokens of the KL divergence from the uniform to the model's distribution (2502.18581).

    With V tokens in the vocabulary, a token has -log V - (1/V) sum_j log p_j. It is at temperature 1 and needs no verifier.
    """

    def __init__(self, module: Any) -> None:
        """`module` is that of the policy. A module of another kind than `Decoder` is refused."""
        if not isinstance(module, Decoder):
            raise UserError("verifier self_certainty needs a model of a native family (docs/models.md); use likelihood")
        self._module: Decoder = module

    @torch.inference_mode()
    def __call__(self, requests: Sequence[ScoreRequest]) -> list[float]:
        """Return the score of each request, packed into passes of at most `PACK_TOKENS` tokens."""
        sizes = [len(list(one.tokens or ())) for one in requests]
        found: list[float] = []
        start = 0
        while start < len(requests):
            end, total = start + 1, sizes[start]
            while end < len(requests) and total + sizes[end] <= PACK_TOKENS:
                total += sizes[end]
                end += 1
            found += self._pass(requests[start:end])
            start = end
        return found

    def _pass(self, requests: Sequence[ScoreRequest]) -> list[float]:
        device = next(self._module.parameters()).device
        rows = [list(one.tokens or ()) for one in requests]
        offsets = offsets_from_lengths(torch.tensor([len(row) for row in rows], device=device))
        # Each answer token is predicted at the position before it.
        counts = [len(row) - one.num_prompt for row, one in zip(rows, requests, strict=True)]
        starts = offsets.tolist()
        positions = [
            starts[k] + one.num_prompt - 1 + i
            for k, (one, count) in enumerate(zip(requests, counts, strict=True))
            for i in range(count)
        ]
        tokens = torch.tensor([token for row in rows for token in row], device=device)
        hidden, _ = self._module.states(tokens, offsets, torch.tensor(positions, device=device))
        values = [self._certainty(part) for part in hidden.split(LOGIT_ROWS)]
        each = torch.cat(values).split(counts) if values else []
        return [float(one.mean()) if len(one) else 0.0 for one in each]

    def _certainty(self, hidden: Tensor) -> Tensor:
        logits = self._module.logits(hidden)
        logp = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        return -logp.mean(-1) - math.log(logp.shape[-1])
