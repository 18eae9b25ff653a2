"""RL with a reward model, a process reward model or a judge as its reward: metrics, failures, resuming, learning."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.config.loading import load
from burnish.config.schema import RewardModelConfig
from burnish.data.tasks.registry import make_task
from burnish.data.tasks.task import Dice
from burnish.models.export_and_merge import merge_adapter
from burnish.run.metrics import MACHINE_PREFIXES, read_metrics
from burnish.run.samples import read_samples, read_table
from burnish.trainers.reward_model import execute as train_scorer
from tests.rewards.judge_server import Body, Reply, serving
from tests.trainers.test_resume_everything import MOMENTS, dies, killing
from tests.trainers.tiny import TINY, WARM, run_of

BENCH = Path(__file__).parents[2] / "bench" / "reward_model_rl.py"
TWO = {"min_digits": 2, "max_digits": 2}
SCORER = """
model: {new: {hidden_size: 32, num_layers: 2, num_heads: 2, mlp_size: 64, max_positions: 64}, device: cpu}
run: {name: scorer}
reward_model:
  data: {task: sort_digits, options: {num: 400, min_digits: 2, max_digits: 3}}
  held_out: {task: sort_digits, options: {num: 50, min_digits: 2, max_digits: 3}}
  updates: 20
  batch_size: 32
  optimizer: {lr: 5.0e-3, schedule: linear, final: 0.1}
"""


def scorer(folder: Path, *overrides: str) -> Path:
    (folder / "scorer.yaml").write_text(SCORER)
    loaded = load(RewardModelConfig, folder / "scorer.yaml", [*overrides, f"run.directory={folder}"])
    outcome = train_scorer(loaded.config, loaded.resolved, loaded.base, "scorer")
    return outcome.model


def part(path: Path, **options: Any) -> str:
    return json.dumps({"name": "model", "options": {"path": str(path), "device": "cpu", **options}})


def without_times(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith(MACHINE_PREFIXES)} for row in read_metrics(path)]


def start_from(model: Path) -> list[str]:
    return ["model.new=null", f"model.path={model}"]


def test_scores_are_a_part_in_metrics_and_samples_and_the_run_repeats_itself(warm: Path, tmp_path: Path) -> None:
    overrides = [
        f"reward.parts=[{part(scorer(tmp_path))}, {{name: task, weight: 0}}]",
        "run.samples_every=1",
        "reward.workers=1",
        *start_from(warm),
    ]
    one, other = (run_of(tmp_path / name, TINY, overrides) for name in ("one", "other"))
    rows = read_metrics(one / "metrics.jsonl")
    assert all(row["reward/mean"] == pytest.approx(row["reward/part/model"]) for row in rows)
    assert all(row["reward/failed"] == 0 and "reward/part/task" in row and "reward/accuracy" in row for row in rows)
    assert len({row["reward/part/model"] for row in rows}) == len(rows)
    assert without_times(one / "metrics.jsonl") == without_times(other / "metrics.jsonl")
    samples = read_table(next((one / "samples").glob("*.parquet")))
    assert {"model", "task"} <= json.loads(samples[0]["parts"]).keys()


def test_a_scorer_of_adapters_rewards_as_the_whole_model_they_make(warm: Path, tmp_path: Path) -> None:
    adapted = scorer(tmp_path, *start_from(warm), "model.lora={rank: 4, base: nf4}")
    assert (adapted / "adapter_config.json").is_file()
    (tmp_path / "merged").mkdir()
    merge_adapter(adapted, tmp_path / "merged", None)
    found = []
    for name, path in (("adapters", adapted), ("merged", tmp_path / "merged")):
        overrides = [f"reward.parts=[{part(path, standardise=True)}]", "training.steps=2", *start_from(warm)]
        rows = read_metrics(run_of(tmp_path / name, TINY, overrides) / "metrics.jsonl")
        assert all(row["reward/failed"] == 0 for row in rows)
        found.append([row["reward/part/model"] for row in rows])
    assert found[0] == pytest.approx(found[1], abs=1e-3)
    assert len(set(found[0])) == 2


def test_a_text_beyond_the_scorers_positions_counts_as_failed(tmp_path: Path) -> None:
    small = scorer(tmp_path, "model.new.max_positions=8", "reward_model.updates=1")
    overrides = [f"reward.parts=[{part(small)}]", "training.steps=2", "rollout.max_tokens=12", "reward.workers=1"]
    rows = read_metrics(run_of(tmp_path / "run", TINY, overrides) / "metrics.jsonl")
    assert max(row["reward/failed"] for row in rows) > 0


def judged_pairs(num_problems: int, num: int) -> str:
    """Right answers of a few problems beside answers the checker refuses: near ones, copies, and any digits at all."""
    task, rows = make_task("sort_digits", TWO, 0), list[str]()
    for index in range(num):
        row, dice = task.row("train", index % num_problems), Dice(0, "judged", index)
        assert isinstance(row.prompt, str)
        digits, other = row.prompt.removesuffix(">"), str(dice.between(0, 9))
        choices = [digits, row.answer[0] + other, other + row.answer[1], other, row.answer + other]
        wrong = [*choices, f"{dice.between(0, 99):02d}", f"{dice.between(0, 9999)}"][dice.between(0, 6)]
        if task.score(wrong, row.answer, row.extra) == 0:
            rows.append(json.dumps({"prompt": row.prompt, "chosen": row.answer, "rejected": wrong}))
    return "\n".join(rows)


def test_a_policy_learns_the_task_from_a_scorer_alone(tmp_path: Path) -> None:
    """Pairs judged by the checker teach the scorer, and the scorer the policy; the checker only measures."""
    text = TINY.replace("max_digits: 3", "max_digits: 2").replace(
        "hidden_size: 16, num_layers: 1", "hidden_size: 32, num_layers: 2"
    )
    warm = WARM.replace("max_digits: 3", "max_digits: 2").replace("updates: 60", "updates: 20")
    start = run_of(tmp_path / "start", text + warm, ["training.steps=1", "reward.workers=1"]) / "warm_start"
    (tmp_path / "pairs.jsonl").write_text(judged_pairs(12, 6000))
    model = scorer(
        tmp_path, *start_from(start), f"reward_model.data=[{{path: {tmp_path}/pairs.jsonl}}]",
        "reward_model.held_out=[]", "reward_model.updates=60", "reward_model.batch_size=64",
    )  # fmt: skip
    overrides = [
        f"reward.parts=[{part(model, clip=2)}, {{name: task, weight: 0}}]", *start_from(start),
        "algorithm.shaping=[{name: stop_properly, coef: -2}]", "training.optimizer.lr=2.0e-3", "training.steps=20",
        "rollout.prompts=12", "rollout.n=8", "reward.workers=1",
    ]  # fmt: skip
    rows = read_metrics(run_of(tmp_path / "rl", text, overrides) / "metrics.jsonl")
    before, after = (sum(row["reward/part/task"] for row in some) / len(some) for some in (rows[:3], rows[-3:]))
    assert after > before + 0.1, (before, after)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rl_against_a_reward_model_learns_on_every_seed(seed: int, tmp_path: Path) -> None:
    """As `bench/reward_model_rl.py` runs it; three to six minutes a seed on a busy core."""
    out = tmp_path / "rows.json"
    command = [sys.executable, str(BENCH), "--seeds", str(seed), "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (row,) = json.loads(out.read_text())["rows"]
    assert row["pairs_accuracy"] >= 0.95
    assert row["before"] <= 0.75
    assert row["after"] >= row["before"] + 0.15


# --- A process reward model, read at the ends of steps -------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scorer(tmp_path_factory.mktemp("scorer"))


def overrides(path: Path, warm: Path, algorithm: str = "reinforce", **options: Any) -> list[str]:
    """Steps of sorted digits that end with a 7: as good as any."""
    start = ["model.new=null", f"model.path={warm}", "reward.workers=1", "run.samples_every=1"]
    part = {"name": "model", "options": {"path": str(path), "device": "cpu", "delimiter": "7", **options}}
    return [f"reward.parts=[{json.dumps(part)}]", f"algorithm={algorithm}", *start]


def logged(folder: Path) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in row.items() if not k.startswith(MACHINE_PREFIXES)}
        for row in read_metrics(folder / "metrics.jsonl")
    ]


def test_the_steps_of_answers_are_in_metrics_and_samples(trained: Path, warm: Path, tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run", TINY, overrides(trained, warm, aggregate="prod"))
    rows = logged(folder)
    assert all(1 <= row["reward/part/model/steps"] < 3 for row in rows)
    assert all(0 < row["reward/part/model"] < 1 for row in rows)
    assert len({row["actor/loss"] for row in rows}) == len(rows)
    samples = read_samples(folder / "samples")
    several = [row for row in samples if json.loads(row["parts"])["model/steps"] > 1]
    assert several
    for row in several:
        chances = [float(word) for word in row["details"].removeprefix("model: steps ").split()]
        assert len(chances) == json.loads(row["parts"])["model/steps"]
        product = 1.0
        for chance in chances:
            product *= chance
        assert row["reward"] == pytest.approx(product, abs=5e-3)


def test_each_aggregation_is_another_reward(trained: Path, warm: Path, tmp_path: Path) -> None:
    runs = [
        logged(run_of(tmp_path / how, TINY, [*overrides(trained, warm, aggregate=how), "training.steps=1"]))
        for how in ("last", "min", "prod", "mean", "each")
    ]
    means = [rows[0]["reward/mean"] for rows in runs]
    assert len(set(means)) == len(means)
    assert len({rows[0]["actor/grad_norm"] for rows in runs}) == len(means)


def test_rewards_of_steps_survive_the_end_of_a_process(trained: Path, warm: Path, tmp_path: Path) -> None:
    each = [*overrides(trained, warm, aggregate="each"), "training.steps=5", "run.save_every=2"]
    expected = run_of(tmp_path / "unbroken", TINY, each)
    for name in ("before the first step", "step done, not committed", "a step after a checkpoint"):
        with killing(MOMENTS[name]):
            assert dies(lambda: run_of(tmp_path / "run", TINY, each)), name
    found = run_of(tmp_path / "run", TINY, each)
    assert logged(found) == logged(expected)
    weights = [folder / "checkpoints" / "step-000005" / "model.safetensors" for folder in (found, expected)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_an_advantage_that_looks_at_the_sum_alone_is_refused(trained: Path, warm: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="advantage grpo uses only their sum: use one with a return for every token"):
        run_of(tmp_path / "run", TINY, overrides(trained, warm, "grpo", aggregate="each"))


# --- A judge ------------------------------------------------------------------------------------------------------------

STEPS, SAMPLES = 2, 16


def verdict(body: Body, number: int) -> Reply:
    """Correct if the answer has a 1 in it; an answer with a 9 cannot be judged."""
    answer = re.search(r"A: (.*)", body["messages"][0]["content"])
    assert answer is not None
    return Reply("hm" if "9" in answer[1] else json.dumps({"correct": "1" in answer[1]}))


def test_the_verdicts_are_the_reward_and_are_told(tmp_path: Path) -> None:
    with serving(verdict) as endpoint:
        options = {"url": endpoint.url, "model": "m", "template": "Q: {question}\nA: {answer}", "parse_retries": 1}
        part = json.dumps({"name": "judge", "options": {**options, "cache": str(tmp_path / "kept")}})
        overrides = [f"reward.parts=[{part}]", f"training.steps={STEPS}", "run.samples_every=1"]
        run = run_of(tmp_path / "one", TINY, overrides)
        asked = len(endpoint.asked)
        again = run_of(tmp_path / "two", TINY, overrides)
        assert len(endpoint.asked) == asked  # every answer is in the cache
    rows = read_metrics(run / "metrics.jsonl")
    samples = [s for file in sorted((run / "samples").glob("*.parquet")) for s in read_table(file)]
    assert len(samples) == STEPS * SAMPLES
    right = [float("1" in s["completion"] and "9" not in s["completion"]) for s in samples]
    assert [s["reward"] for s in samples] == right
    assert sum(row["reward/part/judge"] for row in rows) * SAMPLES == sum(right)
    unread = sum("9" in s["completion"] for s in samples)
    assert unread > 0
    assert round(sum(row["reward/part/judge/parse_fail"] for row in rows) * SAMPLES) == unread
    assert all(row["reward/failed"] == 0 for row in rows)
    assert [row["reward/mean"] for row in read_metrics(again / "metrics.jsonl")] == [row["reward/mean"] for row in rows]


def test_an_endpoint_that_is_gone_is_a_failure_the_run_tells(tmp_path: Path) -> None:
    with serving(verdict) as endpoint:
        pass
    options = {"url": endpoint.url, "model": "m", "retries": 0}
    part = json.dumps({"name": "judge", "options": options})
    with pytest.raises(
        UserError, match=rf"step 1: not one of {SAMPLES} samples could be scored(.|\n)*Connection refused"
    ):
        run_of(tmp_path / "run", TINY, [f"reward.parts=[{part}]", "training.steps=1"])


def test_a_trained_judge_compares_a_policys_answers_with_the_expected_ones(tmp_path: Path) -> None:
    """A judge that learnt to name A whatever it reads: every answer gets a half, and no vote is consistent."""
    dice = Dice(0, "questions")

    def text(least: int, most: int) -> str:
        return "".join("0123456789>"[dice.between(0, 10)] for _ in range(dice.between(least, most)))

    asked = [f"{text(2, 3)}>{text(0, 4)}:A {text(0, 4)}:B?" for _ in range(400)]
    rows = [{"prompt": question, "completion": "<answer>[[A]]</answer>"} for question in asked]
    (tmp_path / "verdicts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    taught = [
        "data.train=[{task: pair_verdict, options: {min_digits: 2, max_digits: 2}}]",
        f"warm_start={{data: [{{path: '{tmp_path}/verdicts.jsonl'}}], updates: 100, batch_size: 32, optimizer: {{lr: 1.0e-2}}}}",
    ]
    judge = run_of(tmp_path / "judge", TINY, [*taught, "training.steps=1", "reward.workers=1"]) / "warm_start"
    options = {"path": str(judge), "parser": "pair", "template": "{question}{first}:A {second}:B?", "max_tokens": 24}
    part = json.dumps({"name": "judge", "options": {**options, "device": "cpu"}})
    run = run_of(tmp_path / "policy", TINY, [f"reward.parts=[{part}, {{name: task, weight: 0}}]", "training.steps=2"])
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["reward/mean"] for row in rows] == [0.5] * 2
    assert [row["reward/part/judge/consistent"] for row in rows] == [0] * 2
    assert [row["reward/part/judge/parse_fail"] for row in rows] == [0] * 2
