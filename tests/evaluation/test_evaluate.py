"""A whole measurement from a model: it agrees with its completions, goes on where it stopped, and depends on nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from burnish.config.data import Data, Reward, RewardPart, Source
from burnish.config.errors import UserError
from burnish.config.model import Model, NewModel
from burnish.config.rollout import Rollout
from burnish.core.engine import SamplingOptions
from burnish.data.prompt_pool import Prompt
from burnish.data.prompt_stream import validation_prompts
from burnish.distributed.engine_builder import build_engine
from burnish.evaluation.evaluate import evaluate, fingerprint, in_data_order, make_driver, sample_and_score
from burnish.evaluation.result import Result, Row
from burnish.evaluation.settings import load_settings
from burnish.models.policy import PolicyModel, load_policy
from burnish.rewards.scoring import Rewards

EVEN = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if "77" in solution_str:
        raise RuntimeError("seven twice")
    return len(solution_str) % 2 == 0
"""
PARTS = [RewardPart(name="even.py:compute_score")]


@pytest.fixture(scope="module")
def policy() -> PolicyModel:
    new = NewModel(hidden_size=16, num_layers=1, num_heads=2, mlp_size=24, max_positions=32)
    return load_policy(Model(new=new, dtype="float64", device="cpu"), None, "0123456789>", seed=1)


@pytest.fixture(scope="module")
def prompts(policy: PolicyModel) -> list[Prompt]:
    return validation_prompts([Source(task="sort_digits")], policy.tokenizer, Data(), 0, 12)


@pytest.fixture(scope="module")
def sampling(policy: PolicyModel) -> SamplingOptions:
    return SamplingOptions(max_tokens=12, stop_tokens=policy.tokenizer.eos_ids)


@pytest.fixture(scope="module")
def results(
    policy: PolicyModel, prompts: list[Prompt], sampling: SamplingOptions, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Result], list[Row], list[Row]]:
    """The same measurement with many rows at once and with three, and in two parts; what each part kept."""
    base: Path = tmp_path_factory.mktemp("plugin")
    (base / "even.py").write_text(EVEN)
    first: list[Row] = []
    second: list[Row] = []
    with Rewards(Reward(parts=PARTS, workers=1), base) as rewards:
        whole = [evaluate(policy, rewards, prompts, 4, sampling, lambda text: None, 0, rows) for rows in (256, 3)]
        driver = make_driver(policy, build_engine(policy, Rollout()), 0)
        sample_and_score(driver, rewards, prompts[:7], 4, sampling, lambda text: None, first.extend)
        del first[-5:]  # lost in a kill
        done = {(row["id"], row["sample"]) for row in first}
        work = sample_and_score(driver, rewards, prompts, 4, sampling, lambda text: None, second.extend, done=done)
    assert work.num_tokens == sum(row["length"] for row in second)
    return whole, first, second


def test_a_whole_measurement_agrees_with_its_completions(
    policy: PolicyModel, results: tuple[list[Result], list[Row], list[Row]]
) -> None:
    result = results[0][0]
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
    assert result.lengths.mean == pytest.approx(sum(r["length"] for r in result.rows) / 48)
    assert all((r["finish"] != "stop") is r["truncated"] for r in result.rows)


def test_a_measurement_does_not_depend_on_how_many_rows_run_at_once(
    results: tuple[list[Result], list[Row], list[Row]],
) -> None:
    assert results[0][0] == results[0][1]


def test_a_measurement_in_parts_draws_what_is_missing_and_ends_the_same(
    results: tuple[list[Result], list[Row], list[Row]], prompts: list[Prompt]
) -> None:
    whole, first, second = results
    assert len(second) == 48 - len(first)
    got = in_data_order([*first, *second], prompts)
    keys = ("id", "sample", "completion", "accuracy", "length", "truncated")
    assert [[row[k] for k in keys] for row in got] == [[row[k] for k in keys] for row in whole[0].rows]


# The fingerprint: the content of files counts, their paths do not.


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("m", "copy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(bytes(100))
    (tmp_path / "d.jsonl").write_text('{"question": "1", "answer": "1"}\n')
    (tmp_path / "r.py").write_text("def f(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n")
    return tmp_path


def made(model: str = "m", *overrides: str) -> dict[str, Any]:
    loaded = load_settings("d.jsonl", {"reward.parts": ["r.py:f"]}, overrides, {})
    return fingerprint(loaded.resolved, loaded.base, Path(model))


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [key for key in sorted(before.keys() | after.keys()) if before.get(key) != after.get(key)]


def test_what_leaves_completions_as_they_are_does_not_count(folder: Path) -> None:
    assert changed(made(), made("copy", "max_rows=7", "reward.workers=5", "model.device=cpu")) == []


def test_an_environment_whose_file_is_not_there_is_named(folder: Path) -> None:
    own = ("environment.name=game.py:Game", "environment.max_turns=2")
    with pytest.raises(UserError, match=r"environment game\.py:Game: there is no file game\.py in .* or here"):
        made("m", *own)
    (folder / "game.py").write_text("class Game: ...\n")
    before = made("m", *own)
    (folder / "game.py").write_text("class Game: pass\n")
    assert changed(before, made("m", *own)) == ["environment.content of game.py:Game"]


def test_settings_and_contents_count(folder: Path) -> None:
    before = made()
    assert changed(before, made("m", "sampling.temperature=0.5", "seed=3")) == ["sampling.temperature", "seed"]
    (folder / "d.jsonl").write_text('{"question": "2", "answer": "1"}\n')
    (folder / "r.py").write_text((folder / "r.py").read_text().replace("1.0", "0.0"))
    (folder / "m" / "config.json").write_text('{"a": 1}')
    assert changed(before, made()) == ["data.source.content", "model.content", "reward.content of r.py:f"]
