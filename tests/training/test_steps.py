"""A process reward model read at the ends of steps: where they are, what becomes of the scores, and where rewards end up."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from burnish.algorithms.curriculum.prompt_selection import AGGREGATIONS, aggregate
from burnish.config.data import Reward
from burnish.config.errors import UserError
from burnish.config.loading import from_preset
from burnish.config.model import NewModel
from burnish.core.batch import Batch
from burnish.core.trajectory import TokenSequence, Trajectory, pack
from burnish.distributed.roles import build_scorers
from burnish.models.architecture import from_nothing
from burnish.models.decoder import Decoder, initialise
from burnish.models.heads import new_scorer
from burnish.models.tokenizer import Tokenizer
from burnish.rewards.reward_parts import ScorerOptions
from burnish.rewards.scoring import Rewards
from burnish.rewards.types import Score, ScoreRequest
from burnish.rollout.scoring import apply_score, restore_scores, scores_to_arrays
from burnish.run.checkpoint.contents import write_contents
from burnish.run.checkpoint.saving import leave
from burnish.trainers.pipeline import AlgorithmPipeline
from burnish.training.reward_scorer import ModelScorer
from burnish.training.value_models import step_ends

ALPHABET = "0123456789>"
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
    decoder = Decoder(from_nothing(new, TOKENS.vocab_size)).double()
    initialise(decoder, 0, std=0.3)
    model, folder = new_scorer(decoder, 1), tmp_path_factory.mktemp("model")
    tokens, ends = torch.tensor(ANSWER), torch.tensor(ENDS)
    with torch.no_grad():
        hidden, _ = model.backbone.states(tokens, torch.tensor([0, len(ANSWER)]), ends)
        wanted = torch.logit(torch.tensor(STEPS, dtype=torch.float64))
        model.head.copy_(torch.linalg.lstsq(hidden, wanted[:, None]).solution.t())
    write_contents(folder, model.contents(leave, None, TOKENS))
    return folder


def options(folder: Path, **more: Any) -> dict[str, Any]:
    return {"path": str(folder), "device": "cpu", "dtype": "float64", "delimiter": ">", **more}


def request(tokens: list[int] = ANSWER, written: list[bool] = WRITTEN, **fields: Any) -> ScoreRequest:
    return ScoreRequest("a", "21>", "12>34>5", "sort_digits", "12", {}, tokens=tokens, written=written, **fields)


def score(folder: Path, weight: float = 1.0, **more: Any) -> Score:
    """Through the reward as a run has it: parts, models handed in, the sum."""
    config = Reward.model_validate(
        {"parts": [{"name": "model", "weight": weight, "options": options(folder, **more)}], "workers": 1}
    )
    with Rewards(config) as rewards:
        rewards.hand_in(build_scorers(config, TOKENS, None))
        (found,) = rewards.score([request()])
    return found


# --- the worked example ------------------------------------------------------------------------------------------------

WORKED = {"last": 0.7, "min": 0.6, "prod": 0.378, "mean": 0.733333}


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_the_worked_example_through_a_real_model(model_at: Path, how: str) -> None:
    assert aggregate(STEPS, how) == pytest.approx(WORKED[how], abs=1e-6)
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
    sequence = TokenSequence(np.array(ANSWER), mask, np.zeros(11, np.float32), np.where(mask, 0, -1))
    scored = Trajectory("p", 0, 0, [sequence], "stop", "12>34>5")
    apply_score(scored, found)
    saved = scores_to_arrays([scored])
    again = Trajectory("p", 0, 0, [sequence], "stop", "12>34>5")
    restore_scores([again], saved)  # as a run that was killed finds it in its journal
    other = Trajectory("p", 0, 1, [sequence], "stop", "", reward=0.25)
    return pack([again, other])


def test_rewards_of_steps_stand_where_the_steps_end_and_returns_begin_with_them(model_at: Path) -> None:
    found = score(model_at, weight=2.0, aggregate="each")
    assert found.reward == pytest.approx(2 * 2.2)
    assert [position for position, _ in found.steps] == ENDS
    recipe = AlgorithmPipeline(from_preset("reinforce"), num_updates=1)
    batch = recipe.prepare(recipe.shape(batch_of(found), 1, 8), cast(Any, None)).batch
    rewards, returns = batch.token["token_rewards"].tolist(), batch.token["advantages"].tolist()
    assert rewards[:11] == pytest.approx([0, 0, 0, 0, 0, 1.8, 0, 0, 1.2, 0, 1.4])
    assert rewards[11:] == pytest.approx([0] * 10 + [0.25])
    assert returns[:11] == pytest.approx([0] * 3 + [4.4] * 3 + [2.6] * 3 + [1.4] * 2)
    assert returns[11:] == pytest.approx([0] * 3 + [0.25] * 8)


# --- where steps end -----------------------------------------------------------------------------------------------------


def ends(text: str, delimiter: str = ">", prompt: int = 0, end: bool = True) -> list[int]:
    tokens = [*TOKENS.encode(text), *([END] if end else [])]
    return step_ends(tokens, [k >= prompt for k in range(len(tokens))], TOKENS, delimiter, len(tokens) - 1)


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
    made = ScorerOptions.of(options(model_at, delimiter="9"), "here")
    plain = ScorerOptions.of({**options(model_at), "delimiter": None}, "here")
    (stepped,), (whole,) = (ModelScorer(model_at, one, TOKENS)([request()]) for one in (made, plain))
    assert stepped.value == pytest.approx(torch.tensor(whole.value).sigmoid().item())  # type: ignore[union-attr]


def test_another_tokenizer_reads_the_text_of_the_answer(model_at: Path) -> None:
    other = Tokenizer.from_characters(">9876543210")
    made = ScorerOptions.of(options(model_at, aggregate="prod"), "here")
    (found,) = ModelScorer(model_at, made, other)([request([*other.encode("21>12>34>5"), other.eos_ids[0]])])
    assert found.value == pytest.approx(0.378)  # type: ignore[union-attr]
    each = ScorerOptions.of(options(model_at, aggregate="each"), "here")
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
        ({"delimiter": None, "aggregate": "min"}, "aggregate has no effect without delimiter"),
    ],
)
def test_options_that_cannot_be_obeyed_are_refused(model_at: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        ScorerOptions.of(options(model_at, **given), "here")
