"""A trained scorer as a reward: which tokens it reads, what it does with scores, what becomes of failures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from burnish.config.data import Reward
from burnish.config.errors import UserError
from burnish.config.model import NewModel
from burnish.distributed.roles import build_scorers
from burnish.models.architecture import from_nothing
from burnish.models.decoder import Decoder, initialise
from burnish.models.heads import STATISTICS, new_scorer
from burnish.models.tokenizer import Tokenizer
from burnish.rewards.reward_parts import ScorerOptions
from burnish.rewards.scoring import Rewards
from burnish.rewards.types import Failure, Result, ScoreRequest
from burnish.run.checkpoint.contents import write_contents
from burnish.run.checkpoint.saving import leave
from burnish.training.reward_scorer import ModelScorer

ALPHABET = "0123456789>"
POSITIONS = 16


@pytest.fixture(scope="module")
def scorer_at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = Tokenizer.from_characters(ALPHABET)
    new = NewModel(hidden_size=16, num_layers=1, num_heads=2, mlp_size=24, max_positions=POSITIONS)
    decoder = Decoder(from_nothing(new, tokenizer.vocab_size))
    initialise(decoder, 0, std=0.3)
    folder = tmp_path_factory.mktemp("scorer")
    write_contents(folder, new_scorer(decoder, 1).contents(leave, None, tokenizer))
    (folder / STATISTICS).write_text(json.dumps({"mean": 0.25, "std": 0.5}))
    return folder


def scorer(folder: Path, tokenizer: Tokenizer | None = None, **options: Any) -> ModelScorer:
    made = ScorerOptions.of({"path": str(folder), "device": "cpu", **options}, "here")
    return ModelScorer(folder, made, tokenizer or Tokenizer.from_characters(ALPHABET))


def request(id: str, completion: str, tokens: list[int] | None = None, **fields: Any) -> ScoreRequest:
    return ScoreRequest(id, "21>", completion, "sort_digits", "12", {}, tokens=tokens, **fields)


def value(result: Result | Failure) -> float:
    assert isinstance(result, Result)
    assert result.value is not None
    return result.value


def test_tokens_of_the_same_tokenizer_are_read_as_they_are(scorer_at: Path) -> None:
    model = scorer(scorer_at)
    assert model.reads_tokens
    tokenizer = model.tokenizer
    given = [*tokenizer.encode("21>12"), tokenizer.eos_ids[0]]
    # The text says something else: only the tokens count.
    (by_tokens,) = model([request("a", "999", given)])
    ((raw,),) = model.scores([given], [[len(given) - 1]])
    assert value(by_tokens) == raw
    (by_text,) = model([request("a", "12")])  # without tokens, the text in the scorer's own template: the same sequence
    assert value(by_text) == raw
    (unfinished,) = model([request("a", "12", truncated=True)])
    assert value(unfinished) == pytest.approx(model.scores([given[:-1]], [[len(given) - 2]])[0][0], abs=1e-6)


def test_another_tokenizer_means_text_in_the_scorers_template(scorer_at: Path) -> None:
    other = Tokenizer.from_characters(">9876543210")  # the same characters under other numbers
    model = scorer(scorer_at, other)
    assert not model.reads_tokens
    foreign = [*other.encode("21>12"), other.eos_ids[0]]
    own = [*model.tokenizer.encode("21>12"), model.tokenizer.eos_ids[0]]
    assert foreign != own
    assert value(model([request("a", "12", foreign)])[0]) == model.scores([own], [[len(own) - 1]])[0][0]


def test_standardising_and_clipping(scorer_at: Path) -> None:
    (raw,) = scorer(scorer_at)([request("a", "12")])
    (scaled,) = scorer(scorer_at, standardise=True)([request("a", "12")])
    assert value(scaled) == pytest.approx((value(raw) - 0.25) / 0.5)
    (cut,) = scorer(scorer_at, clip=1e-3)([request("a", "12")])
    assert abs(value(cut)) == 1e-3


def test_the_order_and_the_budget_change_rounding_at_most(scorer_at: Path) -> None:
    requests = [request(f"r{i}", "1234567"[: i % 7 + 1]) for i in range(20)]
    whole = [value(r) for r in scorer(scorer_at)(requests)]
    small = [value(r) for r in scorer(scorer_at, token_budget=11)(requests)]
    assert whole == pytest.approx(small, abs=1e-5)
    assert [value(r) for r in scorer(scorer_at)(requests[::-1])][::-1] == whole
    assert value(scorer(scorer_at, dtype="bfloat16")(requests)[0]) != whole[0]


def test_what_cannot_be_scored_is_a_failure_of_that_sample_alone(scorer_at: Path) -> None:
    model = scorer(scorer_at)
    long, strange, good = model([request("a", "1" * 20), request("b", "one"), request("c", "12")])
    assert isinstance(long, Failure)
    assert f"24 tokens are more than the {POSITIONS} positions" in long.error
    assert isinstance(strange, Failure)
    assert "cannot read the answer" in strange.error
    assert isinstance(good, Result)
    with torch.no_grad():
        model.model.head.fill_(float("nan"))
    (broken,) = model([request("c", "12")])
    assert isinstance(broken, Failure)
    assert "score is nan" in broken.error


def test_alone_and_mixed_with_a_verifier(scorer_at: Path) -> None:
    parts: list[Any] = [{"name": "model", "weight": 2.0, "options": {"path": str(scorer_at), "device": "cpu"}}, "exact"]
    config = Reward(parts=parts, workers=1)
    tokenizer = Tokenizer.from_characters(ALPHABET)
    requests = [request("right", "12"), request("wrong", "21"), request("long", "1" * 20)]
    with Rewards(config) as rewards:
        rewards.hand_in(build_scorers(config, tokenizer, None))
        scores = rewards.score(requests)
        assert rewards.weights == {"model": 2.0, "exact": 1.0}
        counters = rewards.counters
    raw = [value(r) for r in scorer(scorer_at)(requests[:2])]
    assert [s.parts["model"] for s in scores[:2]] == pytest.approx(raw, abs=1e-6)
    assert scores[0].reward == pytest.approx(2 * raw[0] + 1)
    assert scores[1].reward == pytest.approx(2 * raw[1])
    assert [s.accuracy for s in scores[:2]] == [1.0, 0.0]  # the verifier's: a score has no zero
    assert scores[2].reward is None
    assert scores[2].error is not None
    assert "reward part 'model' failed on row 'long'" in scores[2].error
    assert counters["scorer_failed"] == 1


def test_alone_it_says_nothing_of_right_or_wrong(scorer_at: Path) -> None:
    config = Reward(parts=[{"name": "model", "options": {"path": str(scorer_at), "device": "cpu"}}])
    with Rewards(config) as rewards:
        rewards.hand_in(build_scorers(config, Tokenizer.from_characters(ALPHABET), None))
        rewards.submit([request("a", "12")])
        (score,) = rewards.poll()
        assert rewards.pending == 0
    assert score.accuracy is None
    assert score.reward is not None


def test_a_model_that_raises_fails_its_samples_and_says_why(scorer_at: Path) -> None:
    def broken(requests: Any) -> Any:
        raise MemoryError("no room")

    with Rewards(Reward(parts=[{"name": "model", "options": {"path": "x"}}])) as rewards:
        with pytest.raises(RuntimeError, match="nobody handed one in"):
            rewards.score([request("a", "12")])
        rewards.hand_in({0: broken})
        scores = rewards.score([request("a", "12"), request("b", "21")])
    assert [s.reward for s in scores] == [None, None]
    assert all(s.error is not None and "MemoryError: no room" in s.error for s in scores)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give options.path"),
        ({"path": "x", "clips": 1}, "unknown option 'clips'"),
        ({"path": "x", "clip": 0}, "clip should be a number above 0"),
        ({"path": "x", "dtype": "int8"}, "dtype 'int8' is not one of"),
        ({"path": "x", "token_budget": 0}, "token_budget should be"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ScorerOptions.of(options, "reward.parts[0] (model)")


def test_a_scorer_without_statistics_cannot_be_standardised(scorer_at: Path, tmp_path: Path) -> None:
    for file in scorer_at.iterdir():
        if file.name != STATISTICS:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(UserError, match=r"has no scores\.json"):
        scorer(tmp_path, standardise=True)
