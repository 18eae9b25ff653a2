"""A measurement: its numbers from known trajectories, and a whole one from a model."""

from pathlib import Path

import numpy as np
import pytest

from burnish.config.schema import Data, Model, NewModel, Reward, RewardPart, Source
from burnish.core.engine import SamplingOptions
from burnish.core.trajectory import TokenSequence, Trajectory
from burnish.data.pool import Prompt
from burnish.data.prompts import Draw, validation_prompts
from burnish.data.rows import Row
from burnish.evaluation.evaluate import Result, evaluate, summarise
from burnish.evaluation.statistics import wilson
from burnish.models.policy import PolicyModel, load_policy
from burnish.rewards.rewards import Rewards
from burnish.rollout.scored import Scored

EVEN = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if "77" in solution_str:
        raise RuntimeError("seven twice")
    return float(len(solution_str) % 2 == 0)
"""


def trajectory(prompt: str, sample: int, accuracy: float | None, length: int, finish: str = "stop") -> Trajectory:
    """A trajectory of one prompt token and `length` written ones; without an accuracy its scorer failed."""
    mask = np.array([False] + [True] * length)
    tokens = TokenSequence(
        np.arange(length + 1), mask, np.zeros(length + 1, np.float32), np.zeros(length + 1, np.int32)
    )
    error = "boom" if accuracy is None else None
    return Trajectory(prompt, 0, sample, [tokens], finish, "text", accuracy, accuracy, {}, error)


def scored(trajectories: list[Trajectory], sources: dict[str, str]) -> Scored:
    draws = [Draw(Prompt(Row(name, "q", source, 7), "Q: q", [0]), 0) for name, source in sources.items()]
    return Scored(draws, trajectories, 0.0, 0.0)


def test_the_numbers_of_known_trajectories() -> None:
    result = summarise(
        scored(
            [
                trajectory("a", 0, 1.0, 2),
                trajectory("a", 1, 0.0, 4, "length"),
                trajectory("b", 0, 0.0, 6),
                trajectory("b", 1, 0.0, 8),
            ],
            {"a": "s", "b": "s"},
        ),
        n=2,
    )
    assert (result.num_prompts, result.num_samples, result.num_failed) == (2, 4, 0)
    assert result.accuracy is not None
    assert result.accuracy.mean == 0.25
    assert result.pass_at == {1: 0.25, 2: 0.5}
    assert (result.length_mean, result.truncated, result.reward_mean) == (5.0, 0.25, 0.25)
    assert result.by_source == {}
    assert result.rows[1]["prompt"] == "Q: q"
    assert (result.rows[1]["id"], result.rows[1]["sample"], result.rows[1]["truncated"]) == ("a", 1, True)
    assert result.rows[1]["answer"] == "7"


def test_a_failed_scorer_is_counted_and_never_a_zero() -> None:
    result = summarise(scored([trajectory("a", 0, 1.0, 1), trajectory("b", 0, None, 1)], {"a": "s", "b": "s"}), n=1)
    assert result.accuracy == wilson(1.0, 1)
    assert (result.num_failed, result.first_error) == (1, "boom")


def test_nothing_scored_is_no_accuracy() -> None:
    result = summarise(scored([trajectory("a", 0, None, 1)], {"a": "s"}), n=1)
    assert (result.accuracy, result.reward_mean, result.pass_at) == (None, None, {})


def test_several_data_sources_are_told_apart() -> None:
    result = summarise(
        scored(
            [trajectory("a", 0, 1.0, 1), trajectory("b", 0, 0.0, 1), trajectory("c", 0, 0.0, 1)],
            {"a": "x", "b": "y", "c": "y"},
        ),
        n=1,
    )
    assert result.by_source == {"x": wilson(1.0, 1), "y": wilson(0.0, 2)}


@pytest.fixture(scope="module")
def policy() -> PolicyModel:
    new = NewModel(hidden_size=16, num_layers=1, num_heads=2, mlp_size=24, max_positions=32)
    return load_policy(Model(new=new, dtype="float64", device="cpu"), None, "0123456789>", seed=1)


@pytest.fixture(scope="module")
def results(policy: PolicyModel, tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    """The same measurement with many rows at once and with three."""
    base: Path = tmp_path_factory.mktemp("plugin")
    (base / "even.py").write_text(EVEN)
    prompts = validation_prompts([Source(task="sort_digits")], policy.tokenizer, Data(), 0, 12)
    sampling = SamplingOptions(max_tokens=12, stop_tokens=policy.tokenizer.eos_ids)
    with Rewards(Reward(parts=[RewardPart(name="even.py:compute_score")], workers=1), base) as rewards:
        return [evaluate(policy, rewards, prompts, 4, sampling, lambda text: None, 0, rows) for rows in (256, 3)]


def test_a_whole_measurement_agrees_with_its_completions(policy: PolicyModel, results: list[Result]) -> None:
    result = results[0]
    assert [(r["id"], r["sample"]) for r in result.rows] == [
        (f"sort_digits/test/{i}", k) for i in range(12) for k in range(4)
    ]
    usable = [r for r in result.rows if "77" not in r["completion"]]
    assert all(r["accuracy"] == float(len(r["completion"]) % 2 == 0) for r in usable)
    assert result.num_failed == 48 - len(usable)
    by_prompt = {r["id"]: [u["accuracy"] for u in usable if u["id"] == r["id"]] for r in usable}
    means = [sum(g) / len(g) for g in by_prompt.values()]
    assert result.accuracy is not None
    assert 0 < result.accuracy.mean < 1
    assert result.accuracy.mean == pytest.approx(sum(means) / len(means))
    lengths = [len(policy.tokenizer.encode(r["completion"])) + (not r["truncated"]) for r in result.rows]
    assert all(r["length"] >= length for r, length in zip(result.rows, lengths, strict=True))  # padding shows no text
    assert result.length_mean == pytest.approx(sum(r["length"] for r in result.rows) / 48)


def test_a_measurement_does_not_depend_on_how_many_rows_run_at_once(results: list[Result]) -> None:
    assert results[0] == results[1]
