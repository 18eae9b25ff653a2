"""No strategy and no verifier but the oracle can read the expected answer, or a column of the row besides the question."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import pytest

from burnish.config.data import Data, Reward, RewardPart, Source
from burnish.config.model import Model, NewModel
from burnish.config.rollout import Rollout
from burnish.core.engine import SamplingOptions
from burnish.core.random_keys import fold
from burnish.data.prompt_pool import Prompt
from burnish.data.prompt_stream import PromptSample, validation_prompts
from burnish.distributed.engine_builder import build_engine
from burnish.evaluation.strategies import build, verifiers
from burnish.evaluation.strategies.build import build_search_runner
from burnish.evaluation.strategies.registry import strategy_record
from burnish.evaluation.strategies.search_tree import SEARCH
from burnish.evaluation.strategies.spec import STRATEGY_RECORDS, StrategyRecord
from burnish.models.policy import PolicyModel, load_policy
from burnish.models.tokenizer import Tokenizer
from burnish.rewards.score_types import Score, ScoreRequest
from tests.evaluation.strategies.toy import TURNS

KEYLESS = ("likelihood", "self_certainty", "plug.py:score", *verifiers.KEYLESS_REWARDS)
ALPHABET = "0123456789>\n. <:again"
OPTIONS: dict[str, dict[str, Any]] = {
    "revise": {"request": "again", "rounds": 1},
    "budget_forcing": {"wait": "again", "think_end": "9", "answer_prompt": ":", "answer_tokens": 2},
}
"""Options that fit the small model, by strategy."""
VERIFIED = {"revise": {"choose": "best"}, "by_difficulty": {"predict": "score"}}
"""Options with which a strategy uses its verifier, where that is not always so."""
REWARD = Reward(parts=[RewardPart(name="exact")], workers=1)


class Unreadable:
    """An answer that raises when it is compared, shown, measured, or sent to another process."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise AssertionError("a strategy or a verifier read the key")

    __eq__ = __hash__ = __bool__ = __len__ = __iter__ = __str__ = __repr__ = __format__ = __reduce_ex__ = _refuse
    __getattr__ = _refuse


class TextRewards:
    """Scores a request by all that is in it, after sending it as if to a worker process."""

    def __init__(self) -> None:
        self.waiting: list[ScoreRequest] = []

    @property
    def pending(self) -> int:
        return len(self.waiting)

    def submit(self, requests: Sequence[ScoreRequest]) -> None:
        self.waiting += pickle.loads(pickle.dumps(list(requests)))

    def poll(self, timeout_s: float | None) -> list[Score]:
        found, self.waiting = self.waiting, []
        scored = [(one, fold(repr((one.prompt, one.completion, one.answer, sorted(one.extra)))) % 97) for one in found]
        return [Score(one.id, value / 97, None) for one, value in scored]

    def close(self) -> None:
        self.waiting.clear()


@pytest.fixture(scope="module")
def policy() -> PolicyModel:
    """A tiny random decoder whose character tokenizer has a chat template."""
    alphabet = "".join(dict.fromkeys(ALPHABET))
    new = NewModel(hidden_size=16, num_layers=1, num_heads=2, mlp_size=24, max_positions=96)
    plain = load_policy(Model(new=new, dtype="float64", device="cpu"), None, alphabet, seed=1)
    return PolicyModel(plain.module, Tokenizer.from_characters(alphabet, chat_template=TURNS), None, "chat")


@pytest.fixture(scope="module")
def prompts(policy: PolicyModel) -> list[Prompt]:
    return validation_prompts([Source(task="sort_digits")], policy.tokenizer, Data(), 0, 3)


def with_answers(prompts: Sequence[Prompt], answers: Sequence[Any]) -> list[Prompt]:
    return [
        replace(prompt, row=replace(prompt.row, answer=answer, extra={"solution": answer}))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def chosen(policy: PolicyModel, prompts: Sequence[Prompt], record: StrategyRecord) -> list[Any]:
    """What a strategy chose for each question and what it reports, without times."""
    runner = build_search_runner(
        record, policy, build_engine(policy, Rollout(max_rows=8)), REWARD, [p.row for p in prompts], seed=3
    )
    sampling = SamplingOptions(max_tokens=10, stop_tokens=policy.tokenizer.eos_ids)
    found = []
    for t in runner.run([PromptSample(p, 0) for p in prompts], 1, sampling, "eval"):
        search = {name: value for name, value in t.metadata[SEARCH].items() if name != "wall_s"}
        found.append((t.prompt_id, [node.tokens.tolist() for node in t.nodes], t.completion, t.error, search))
    runner.close()
    return sorted(found, key=lambda one: str(one[0]))


def cases() -> list[tuple[str, str | None]]:
    return [
        (name, verifier)
        for record in STRATEGY_RECORDS
        for name in [str(record.model_fields["name"].default)]
        for verifier in (KEYLESS if record.verified else (None,))
    ]


@pytest.mark.parametrize(("name", "verifier"), cases())
def test_the_choice_is_the_same_for_answers_that_are_permuted_or_cannot_be_read(
    name: str,
    verifier: str | None,
    policy: PolicyModel,
    prompts: list[Prompt],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verifiers, "_scored", lambda reward, tokenizer, base: TextRewards())
    monkeypatch.setattr(build, "step_delimiter", lambda part, base: None)  # `model` has no directory here
    options: dict[str, Any] = dict(OPTIONS.get(name, {}))
    if verifier is not None:
        options |= {**VERIFIED.get(name, {}), "verifier": {"name": verifier}}
    if verifier == "judge":
        judge = {"url": "http://localhost:1", "model": "m", "template": "{question} {answer}", "parser": "score"}
        options["verifier"]["options"] = judge
    record = strategy_record(name, **options)
    record = record.at_budget(4) or record
    plain = chosen(policy, with_answers(prompts, ["12", "34", "56"]), record)
    assert len(plain) == 3
    assert all(error is None for *_, error, _ in plain)
    assert chosen(policy, with_answers(prompts, ["56", "12", "34"]), record) == plain
    assert chosen(policy, with_answers(prompts, [Unreadable() for _ in prompts]), record) == plain


def test_the_oracle_does_read_it_so_the_test_above_can_fail(
    policy: PolicyModel, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifiers, "_scored", lambda reward, tokenizer, base: TextRewards())
    record = strategy_record("best_of_n", n=4, verifier={"name": "oracle"})
    plain = chosen(policy, with_answers(prompts, ["12", "34", "56"]), record)
    assert chosen(policy, with_answers(prompts, ["56", "12", "34"]), record) != plain
    with pytest.raises(AssertionError, match="read the key"):
        chosen(policy, with_answers(prompts, [Unreadable() for _ in prompts]), record)


def test_a_check_of_what_the_question_states_reads_no_other_column(
    policy: PolicyModel, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The answer of a countdown row is its target, which its question states.
    monkeypatch.setattr(verifiers, "_scored", lambda reward, tokenizer, base: TextRewards())

    def rows(solution: Any) -> list[Prompt]:
        extra = {"task": "countdown", "numbers": [1, 2, 3], "solution": solution}
        return [replace(prompt, row=replace(prompt.row, answer=6, extra=extra)) for prompt in prompts]

    record = strategy_record("best_of_n", n=4, verifier={"name": "task"})
    assert chosen(policy, rows(Unreadable()), record) == chosen(policy, rows("1+2+3"), record)


@pytest.mark.parametrize("record", STRATEGY_RECORDS)
def test_a_record_is_valid_with_all_of_its_options_written_out(record: type[StrategyRecord]) -> None:
    # `burnish eval` checks the settings again after it has resolved them for the machine.
    assert record.model_validate(record().model_dump()) == record()
