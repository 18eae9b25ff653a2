"""`burnish.train` and its kin: the same runs as the command line's, with Python objects in place of names."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest

import burnish
from burnish.cli.main import main
from burnish.config.model import Model, NewModel
from burnish.models.policy import load_policy
from burnish.run.metrics import MACHINE_PREFIXES
from tests.api.conftest import QUICK
from tests.api.user_functions import above_the_mean, add, backwards, compute_score, share_of_digits
from tests.config.fake_hub import serve_hub, use_hub

ROWS = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(3) for b in range(3)]


def comparable(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith(MACHINE_PREFIXES)} for row in metrics]


def test_every_name_of_the_package_is_there() -> None:
    assert all(getattr(burnish, name) is not None for name in burnish.__all__)
    assert {"train", "sft", "prefer", "reward_model", "evaluate", "Policy", "Run", "Environment"} <= set(dir(burnish))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        burnish.trian  # noqa: B018


def test_the_run_is_that_of_the_command_line(model: Path) -> None:
    run = burnish.train(model=model, data=ROWS, held_out=ROWS[:3], reward="exact", name="python", **QUICK)
    assert (run.status, run.directory, len(run.metrics)) == ("complete", Path("runs/python"), 3)
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Path("validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:3]))
    Path("recipe.yaml").write_text(
        "model: {path: model}\nreward: {parts: exact, workers: 1}\n"
        "data: {train: {path: train.jsonl}, validation: {path: validation.jsonl}, max_prompt_tokens: 16}\n"
        "rollout: {prompts: 4, n: 4, max_tokens: 4}\n"
        "training: {steps: 2, optimizer: {lr: 1.0e-2}}\nrun: {threads: 1, name: command}\n"
    )
    assert main(["train", "recipe.yaml"]) == 0
    assert comparable(run.metrics) == comparable(burnish.Run("runs/command").metrics)
    assert run.report == Path("runs/python/report.html")
    assert {"prompt", "completion", "reward"} <= set(run.samples.columns)
    assert len(run.model.sample("1+1=", n=3, max_tokens=2)) == 3
    assert run.checkpoint.name == "step-000002"
    with pytest.raises(burnish.UserError, match="no column 'reward/maen'; did you mean 'reward/mean'"):
        run.metrics.column("reward/maen")


def test_functions_of_both_conventions_and_a_callback(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share_of_digits, "__module__", "__main__")  # as if it were defined in the script
    seen: list[dict[str, Any]] = []

    def stop_after_the_first(metrics: dict[str, Any]) -> bool:
        seen.append(metrics)
        assert burnish.Run("runs/parts").status == "running"
        return True

    parts = [share_of_digits, burnish.reward(compute_score, weight=0.5, correct_at=1.0)]
    call: dict[str, Any] = {"model": model, "data": {"train": ROWS, "sampler": backwards}, "reward": parts, **QUICK}
    call |= {
        "algorithm": {"preset": "dr_grpo", "advantage": {"name": above_the_mean, "options": {"scale": 2.0}}},
        "name": "parts",
    }
    run = burnish.train(**call, callback=stop_after_the_first)
    assert run.status == "stopped"
    assert [row["step"] for row in seen] == [1]
    assert seen[0]["reward/part/share_of_digits"] == run.metrics[0]["reward/part/share_of_digits"]
    names = [part["name"] for part in run.config["reward"]["parts"]]
    assert names == ["inputs/share_of_digits.py:share_of_digits", "tests.api.user_functions:compute_score"]
    assert run.config["algorithm"]["advantage"]["name"] == "tests.api.user_functions:above_the_mean"
    assert run.samples[0]["group"].startswith("train.jsonl/8")
    assert "def share_of_digits" in (run.directory / "inputs" / "share_of_digits.py").read_text()
    again = burnish.train(**call)  # a script that is run again goes on
    assert (again.status, [row["step"] for row in again.metrics]) == ("complete", [1, 2])
    assert again.resume(steps=3).metrics[-1]["step"] == 3
    assert main(["train", "runs/parts/config.yaml", "training.steps=4"]) == 0  # and so does the command
    assert again.metrics[-1]["step"] == 4
    assert sorted(path.name for path in Path("runs").iterdir()) == ["parts"]
    assert len(burnish.train(**call, fresh=True, steps=1).metrics) == 1
    Path("runs/parts.1").rename("moved")  # the old run is complete in itself, wherever it is
    assert burnish.Run("moved").resume(steps=5).metrics[-1]["step"] == 5
    assert repr(burnish.Run("moved")) == "Run('moved', complete, step 5)"


def test_an_error_in_the_callback_ends_the_run_which_can_go_on(model: Path) -> None:
    def fails(metrics: dict[str, Any]) -> None:
        raise ZeroDivisionError

    call: dict[str, Any] = {"model": model, "data": ROWS, "reward": "exact", "name": "fails", **QUICK}
    with pytest.raises(ZeroDivisionError):
        burnish.train(**call, callback=fails)
    assert burnish.Run("runs/fails").status == "interrupted"
    assert burnish.train(**call).status == "complete"


def test_wrong_arguments_are_refused_before_anything_is_written(model: Path) -> None:
    call: dict[str, Any] = {"model": model, "data": ROWS, "reward": "exact"}
    with pytest.raises(burnish.UserError, match=r"burnish.train has no argument 'stpes'; did you mean 'steps'"):
        burnish.train(**call, stpes=3)
    with pytest.raises(burnish.UserError, match=r"rollout\.promts: unknown key; did you mean 'prompts'"):
        burnish.train(**call, rollout={"promts": 3})
    with pytest.raises(burnish.UserError, match="given twice"):
        burnish.train(model=model, data={"train": ROWS, "validation": ROWS}, held_out=ROWS, reward="exact")
    with pytest.raises(burnish.UserError, match=r"parameters of .*:comparable.* match no known convention"):
        burnish.train(**(call | {"reward": comparable}), name="x")
    with pytest.raises(burnish.UserError, match=r"burnish.evaluate has no argument 'temprature'; did you mean"):
        burnish.evaluate(model, ROWS, "exact", temprature=1)
    with pytest.raises(burnish.UserError, match="model is a object; expected a directory, a Run"):
        burnish.train(**(call | {"model": object()}))
    with pytest.raises(burnish.UserError, match="model is a object; expected a directory or a Run"):
        burnish.evaluate(object(), ROWS, "exact")  # type: ignore[arg-type]
    with pytest.raises(burnish.UserError, match=r"environment: .* cannot be written as JSON"):
        burnish.evaluate(model, ROWS, "exact", environment={"name": object()})
    with pytest.raises(burnish.UserError, match=r"burnish.sft has no argument 'held_out'"):
        burnish.sft(model=model, data=ROWS, held_out=ROWS)
    with pytest.raises(burnish.UserError, match="is not a run"):
        burnish.Run("runs/none")
    assert not list(Path("runs").glob("*"))
    assert not Path("eval-model").exists()


def test_a_recipe_is_loaded_by_its_name_and_by_what_it_extends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert burnish.load_config("sort_digits", "seed=7")["seed"] == 7
    Path("first.yaml").write_text("model: {path: m}\nsft: {data: {path: rows.jsonl}, updates: 3}\n")
    Path("second.yaml").write_text("extends: first.yaml\nseed: 4\n")
    config = burnish.load_config("second.yaml")
    assert (config["sft"]["updates"], config["seed"], config["data"][0]["path"]) == (3, 4, "rows.jsonl")
    with pytest.raises(burnish.UserError, match="there is no recipe 'sort_digit'; did you mean 'sort_digits'"):
        burnish.load_config("sort_digit")


def test_supervised_preferences_reward_model_and_evaluation(model: Path) -> None:
    quick: dict[str, Any] = {"batch_size": 4, "run": {"threads": 1}}
    shown = [{"prompt": row["question"], "completion": row["answer"]} for row in ROWS]
    pairs = [{"prompt": row["question"], "chosen": row["answer"], "rejected": "="} for row in ROWS]
    losses: list[float] = []
    first = burnish.sft(
        model=model, data=shown, updates=2, name="sft", callback=lambda row: losses.append(row["sft/loss"]), **quick
    )
    assert losses == first.metrics.column("sft/loss")
    config = burnish.load_config("runs/sft/config.yaml", "run.name=again")
    assert comparable(burnish.sft(**config).metrics) == comparable(first.metrics)
    stopped = burnish.prefer(
        model=first, data=pairs, held_out=pairs[:4], updates=3, name="dpo", loss="ipo",
        callback=lambda row: row["step"] == 1, **quick,
    )  # fmt: skip
    assert (stopped.status, stopped.config["preference"]["loss"]["name"]) == ("stopped", "ipo")
    assert stopped.resume().status == "complete"
    config = burnish.load_config("runs/dpo/config.yaml", "run.name=shorter", "preference.updates=1")
    assert [Path(source["path"]).name for source in config["held_out"]] == ["held_out.jsonl"]
    assert len(burnish.prefer(**config).metrics) == 2  # with the validation before it
    scorer = burnish.reward_model(model=first, data=pairs, updates=2, name="rm", **quick)
    with pytest.raises(burnish.UserError, match="trained a reward model, which cannot sample"):
        assert scorer.model
    scored = burnish.reward("model", path=scorer.checkpoint)
    run = burnish.train(model=first, data=ROWS, reward=scored, **QUICK)
    assert run.metrics[-1]["reward/mean"] == run.metrics[-1]["reward/part/model"]
    quick = {"n": 2, "temperature": 1.0, "max_tokens": 2, "reward.workers": 1}
    found = burnish.evaluate(stopped, ROWS, compute_score, out="measured", **quick)
    assert (found.metrics["num_prompts"], len(found.completions)) == (9, 18)
    assert found.directory == Path("measured")
    again = burnish.evaluate(stopped, ROWS, compute_score, out="measured", **quick)
    assert again.completions == found.completions  # nothing is sampled again


def test_a_function_of_the_program_is_a_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(add, "__module__", "__main__")  # as if it were defined in the script
    new = NewModel(hidden_size=16, num_layers=1, num_heads=2, mlp_size=24, max_positions=2048)
    letters = string.ascii_letters + string.digits + string.punctuation + " \n"
    Path("model").mkdir()
    load_policy(Model(new=new, device="cpu"), None, letters, seed=1).save(Path("model"))
    tools = [add, burnish.tool("calculator", name="sums")]
    environment = {"call_format": "hermes", "workers": 1}
    call: dict[str, Any] = {"model": "model", "data": ROWS, "reward": "exact", **QUICK}
    run = burnish.train(tools=tools, environment=environment, name="tools", **call)
    assert run.config["environment"]["tools"] == [
        {"name": "inputs/add.py:add", "options": {}},
        {"name": "calculator", "options": {"name": "sums"}},
    ]
    assert run.config["environment"]["max_turns"] == 8
    assert "add" in run.samples[0]["prompt"]  # the model reads its schema
    assert "sums" in run.samples[0]["prompt"]


def test_a_hub_id_is_recorded_with_its_commit(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_hub() as hub:
        use_hub(hub, tmp_path / "cache", monkeypatch)
        commit = hub.commit("org/tiny", model)
        run = burnish.sft(model="org/tiny", data=[{"prompt": "1+1=", "completion": "2"}] * 4, updates=1, name="hub")
    assert run.config["model"]["path"] == f"org/tiny@{commit}"
