"""Reward models as scorers: the tokens they read, their scores and failures, and process rewards at the ends of steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from burnish.config.data import Reward
from burnish.config.errors import UserError
from burnish.config.loading import algorithm_from_preset
from burnish.config.model import NewModel
from burnish.core.batch import Batch
from burnish.core.trajectory import Trajectory, chain_nodes, pack
from burnish.distributed.roles import build_scorers
from burnish.models.answer_steps import scored_positions
from burnish.models.architecture import new_architecture
from burnish.models.decoder import Decoder, initialise
from burnish.models.heads import SCORE_STATISTICS_FILE, new_score_model
from burnish.models.tokenizer import Tokenizer
from burnish.rewards.reward_parts import STEP_SCORE_AGGREGATIONS, RewardModelOptions, aggregate_step_scores
from burnish.rewards.score_types import PartResult, Score, ScoreRequest, ScoringFailure
from burnish.rewards.scoring import Rewards
from burnish.rollout.scoring import apply_score, restore_scores, scores_to_arrays
from burnish.run.checkpoint.saver import keep_in_place
from burnish.run.checkpoint.snapshot import write_contents
from burnish.trainers.pipeline import AlgorithmPipeline, StepContext
from burnish.training.reward_scorer import ModelScorer

ALPHABET = "0123456789>"
POSITIONS = 16


@pytest.fixture(scope="module")
def scorer_at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = Tokenizer.from_characters(ALPHABET)
    new = NewModel(hidden_size=16, num_layers=1, num_heads=2, mlp_size=24, max_positions=POSITIONS)
    decoder = Decoder(new_architecture(new, tokenizer.vocab_size))
    initialise(decoder, 0, std=0.3)
    folder = tmp_path_factory.mktemp("scorer")
    write_contents(folder, new_score_model(decoder, 1).contents(keep_in_place, None, tokenizer))
    (folder / SCORE_STATISTICS_FILE).write_text(json.dumps({"mean": 0.25, "std": 0.5}))
    return folder


def scorer(folder: Path, tokenizer: Tokenizer | None = None, **options: Any) -> ModelScorer:
    made = RewardModelOptions.of({"path": str(folder), "device": "cpu", **options}, "here")
    return ModelScorer(folder, made, tokenizer or Tokenizer.from_characters(ALPHABET))


def request(id: str, completion: str, tokens: list[int] | None = None, **fields: Any) -> ScoreRequest:
    return ScoreRequest(id, "21>", completion, "sort_digits", "12", {}, tokens=tokens, **fields)


def value(result: PartResult | ScoringFailure) -> float:
    assert isinstance(result, PartResult)
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
    assert isinstance(long, ScoringFailure)
    assert f"24 tokens are more than the {POSITIONS} positions" in long.error
    assert isinstance(strange, ScoringFailure)
    assert "cannot read the answer" in strange.error
    assert isinstance(good, PartResult)
    (read,) = model([request("d", "12", [3, 2, 1, 2, 3], written=[False] * 3 + [True] * 2)])
    assert isinstance(read, PartResult)
    assert read.num_tokens == 5
    with torch.no_grad():
        model.model.head.fill_(float("nan"))
    (broken,) = model([request("c", "12")])
    assert isinstance(broken, ScoringFailure)
    assert "score is nan" in broken.error


def test_alone_and_mixed_with_a_verifier(scorer_at: Path) -> None:
    parts: list[Any] = [{"name": "model", "weight": 2.0, "options": {"path": str(scorer_at), "device": "cpu"}}, "exact"]
    config = Reward(parts=parts, workers=1)
    tokenizer = Tokenizer.from_characters(ALPHABET)
    requests = [request("right", "12"), request("wrong", "21"), request("long", "1" * 20)]
    with Rewards(config) as rewards:
        rewards.attach_scorers(build_scorers(config, tokenizer, None))
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
        rewards.attach_scorers(build_scorers(config, Tokenizer.from_characters(ALPHABET), None))
        rewards.submit([request("a", "12")])
        (score,) = rewards.poll()
        assert rewards.pending == 0
    assert score.accuracy is None
    assert score.reward is not None


def test_a_model_that_raises_fails_its_samples_and_says_why(scorer_at: Path) -> None:
    def broken(requests: Any) -> Any:
        raise MemoryError("no room")

    with Rewards(Reward(parts=[{"name": "model", "options": {"path": "x"}}])) as rewards:
        with pytest.raises(RuntimeError, match="no scorer was attached for it"):
            rewards.score([request("a", "12")])
        rewards.attach_scorers({0: broken})
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
        RewardModelOptions.of(options, "reward.parts[0] (model)")


def test_a_scorer_without_statistics_cannot_be_standardised(scorer_at: Path, tmp_path: Path) -> None:
    for file in scorer_at.iterdir():
        if file.name != SCORE_STATISTICS_FILE:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(UserError, match=r"has no scores\.json"):
        scorer(tmp_path, standardise=True)


# --- process reward models, read at the ends of steps --------------------------------------------------------------------

TOKENS = Tokenizer.from_characters(ALPHABET)
END = TOKENS.eos_ids[0]
STEPS = [0.9, 0.6, 0.7]
ANSWER = [*TOKENS.encode("21>12>34>5"), END]
WRITTEN = [False] * 3 + [True] * 8
ENDS = [5, 8, 10]
"""The second and third `>`, and the end token; the first is the prompt's."""


@pytest.fixture(scope="module")
def model_at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A process reward model that gives the three steps of the answer these chances: of the spec's example."""
    new = NewModel(hidden_size=16, num_layers=1, num_heads=2, mlp_size=24, max_positions=16)
    decoder = Decoder(new_architecture(new, TOKENS.vocab_size)).double()
    initialise(decoder, 0, std=0.3)
    model, folder = new_score_model(decoder, 1), tmp_path_factory.mktemp("model")
    tokens, ends = torch.tensor(ANSWER), torch.tensor(ENDS)
    with torch.no_grad():
        hidden, _ = model.backbone.states(tokens, torch.tensor([0, len(ANSWER)]), ends)
        wanted = torch.logit(torch.tensor(STEPS, dtype=torch.float64))
        model.head.copy_(torch.linalg.lstsq(hidden, wanted[:, None]).solution.t())
    write_contents(folder, model.contents(keep_in_place, None, TOKENS))
    return folder


def options(folder: Path, **more: Any) -> dict[str, Any]:
    return {"path": str(folder), "device": "cpu", "dtype": "float64", "delimiter": ">", **more}


def step_request(tokens: list[int] = ANSWER, written: list[bool] = WRITTEN, **fields: Any) -> ScoreRequest:
    return ScoreRequest("a", "21>", "12>34>5", "sort_digits", "12", {}, tokens=tokens, written=written, **fields)


def score(folder: Path, weight: float = 1.0, **more: Any) -> Score:
    """Through the reward as a run has it: parts, models handed in, the sum."""
    config = Reward.model_validate(
        {"parts": [{"name": "model", "weight": weight, "options": options(folder, **more)}], "workers": 1}
    )
    with Rewards(config) as rewards:
        rewards.attach_scorers(build_scorers(config, TOKENS, None))
        (found,) = rewards.score([step_request()])
    return found


# --- the worked example ------------------------------------------------------------------------------------------------

WORKED = {"last": 0.7, "min": 0.6, "prod": 0.378, "mean": 0.733333}


@pytest.mark.parametrize("how", STEP_SCORE_AGGREGATIONS)
def test_the_worked_example_through_a_real_model(model_at: Path, how: str) -> None:
    assert aggregate_step_scores(STEPS, how) == pytest.approx(WORKED[how], abs=1e-6)
    found = score(model_at, aggregate=how)
    assert found.reward == pytest.approx(WORKED[how], abs=1e-6)
    assert found.accuracy is None
    assert found.parts["model/steps"] == 3
    assert found.details["model"] == "steps 0.900 0.600 0.700"
    assert found.steps == []


def test_without_a_word_the_worst_step_decides(model_at: Path) -> None:
    assert score(model_at).reward == pytest.approx(0.6)


def batch_of(found: Score) -> Batch:
    """A batch of the scored answer, and of one without steps."""
    mask = np.array(WRITTEN)
    nodes = chain_nodes(np.array(ANSWER), mask, np.zeros(11, np.float32), np.where(mask, 0, -1))
    scored = Trajectory("p", 0, 0, nodes, "stop", "12>34>5")
    apply_score(scored, found)
    saved = scores_to_arrays([scored])
    again = Trajectory("p", 0, 0, nodes, "stop", "12>34>5")
    restore_scores([again], saved)  # as a run that was killed finds it in its journal
    other = Trajectory("p", 0, 1, nodes, "stop", "", reward=0.25)
    return pack([again, other])


def test_rewards_of_steps_stand_where_the_steps_end_and_returns_begin_with_them(model_at: Path) -> None:
    found = score(model_at, weight=2.0, aggregate="each")
    assert found.reward == pytest.approx(2 * 2.2)
    assert [position for position, _ in found.steps] == ENDS
    pipeline = AlgorithmPipeline(algorithm_from_preset("reinforce"), num_updates=1)
    batch = pipeline.prepare(pipeline.shape(batch_of(found), 1, 8), StepContext(cast(Any, None)))
    rewards, returns = batch.token["token_rewards"].tolist(), batch.token["advantages"].tolist()
    assert rewards[:11] == pytest.approx([0, 0, 0, 0, 0, 1.8, 0, 0, 1.2, 0, 1.4])
    assert rewards[11:] == pytest.approx([0] * 10 + [0.25])
    assert returns[:11] == pytest.approx([0] * 3 + [4.4] * 3 + [2.6] * 3 + [1.4] * 2)
    assert returns[11:] == pytest.approx([0] * 3 + [0.25] * 8)


# --- where steps end -----------------------------------------------------------------------------------------------------


def ends(text: str, delimiter: str = ">", prompt: int = 0, end: bool = True) -> list[int]:
    tokens = [*TOKENS.encode(text), *([END] if end else [])]
    return scored_positions(tokens, [k >= prompt for k in range(len(tokens))], TOKENS, delimiter)


def test_a_step_ends_with_its_delimiter_and_the_last_with_the_answer() -> None:
    assert ends("12>34>5") == [2, 5, 7]
    assert ends("12>34>5", prompt=3) == [5, 7]
    assert ends("12>34>5", end=False) == [2, 5, 6]
    assert ends("1234") == [4]


def test_what_is_blank_is_no_step() -> None:
    assert ends("12>>34") == [2, 6]
    assert ends(">12>34") == [3, 6]
    assert ends("12>34>") == [2, 6], "the end token belongs to the step before it"
    assert ends(">>>") == [3]


def test_a_delimiter_of_several_tokens_or_of_a_special_one() -> None:
    assert ends("129934991", delimiter="99") == [3, 7, 9]
    assert ends("12", delimiter=TOKENS.decode([END], skip_special=False)) == [2]


def test_one_step_is_the_whole_answer_as_a_chance(model_at: Path) -> None:
    made = RewardModelOptions.of(options(model_at, delimiter="9"), "here")
    plain = RewardModelOptions.of({**options(model_at), "delimiter": None}, "here")
    (stepped,), (whole,) = (ModelScorer(model_at, one, TOKENS)([step_request()]) for one in (made, plain))
    assert stepped.value == pytest.approx(torch.tensor(whole.value).sigmoid().item())  # type: ignore[union-attr]


def test_another_tokenizer_reads_the_text_of_the_answer(model_at: Path) -> None:
    other = Tokenizer.from_characters(">9876543210")
    made = RewardModelOptions.of(options(model_at, aggregate="prod"), "here")
    (found,) = ModelScorer(model_at, made, other)([step_request([*other.encode("21>12>34>5"), other.eos_ids[0]])])
    assert found.value == pytest.approx(0.378)  # type: ignore[union-attr]
    each = RewardModelOptions.of(options(model_at, aggregate="each"), "here")
    with pytest.raises(UserError, match="has another tokenizer: use last, min, prod or mean"):
        ModelScorer(model_at, each, other)


def test_standardised_and_clipped_scores_become_chances(model_at: Path) -> None:
    (model_at / "scores.json").write_text('{"mean": 1.0, "std": 2.0}')
    try:
        found = score(model_at, aggregate="last", standardise=True)
        clipped = score(model_at, aggregate="min", clip=0.1)
    finally:
        (model_at / "scores.json").unlink()
    raw = torch.logit(torch.tensor(STEPS, dtype=torch.float64))
    assert found.reward == pytest.approx(torch.sigmoid((raw[2] - 1) / 2).item())
    assert clipped.reward == pytest.approx(torch.tensor(0.1, dtype=torch.float64).sigmoid().item())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"aggregate": "max"}, "'max' is not one of last, min, prod, mean, each"),
        ({"delimiter": ""}, "delimiter should be a text"),
    ],
)
def test_options_that_cannot_be_obeyed_are_refused(model_at: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        RewardModelOptions.of(options(model_at, **given), "here")


def test_an_aggregation_without_delimiter_is_refused_before_the_model_is_loaded(model_at: Path) -> None:
    plain = {key: value for key, value in options(model_at, aggregate="min").items() if key != "delimiter"}
    config = Reward.model_validate({"parts": [{"name": "model", "options": plain}], "workers": 1})
    with pytest.raises(UserError, match="aggregate has no effect without delimiter"):
        build_scorers(config, TOKENS, None, kinds=())


def test_text_after_the_answer_moves_no_score() -> None:
    """A template may write a line break after the end of a turn: rows have it, the policy's own tokens do not."""
    tokens, more = [*TOKENS.encode("1>2"), END], TOKENS.encode(">")
    written = [True] * len(tokens)
    assert scored_positions([*tokens, *more], [*written, False], TOKENS, ">") == [1, 3]
    assert scored_positions(tokens, written, TOKENS, ">") == [1, 3]
