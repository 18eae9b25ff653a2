"""`burnish train` from end to end on tiny models: outputs, failing rewards and plug-ins."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from burnish.cli.main import main
from burnish.run.metrics import parse_line
from burnish.run.samples import read_samples
from tests.cli.train_recipes import FROM_FILES, make_model, metrics, train

pytestmark = pytest.mark.usefixtures("here")


def test_a_reward_that_needs_no_answer_takes_rows_without_one(model: Path) -> None:
    rows = [{"prompt": f"{i}+", "agent_name": "single_turn_agent", "images": []} for i in range(3)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (
        train("files.yaml", "data.train.path=rows.jsonl", "data.validation=[]", "reward.parts=plug.py:count_zeros") == 0
    )


def test_a_run_leaves_metrics_samples_a_model_and_a_report(
    monkeypatch: pytest.MonkeyPatch, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if the extra [plot] were not installed
    assert train("files.yaml") == 0
    assert capsys.readouterr().out.splitlines()[-2].startswith("held-out accuracy before RL: 0.")
    rows = metrics()
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["mismatch/mean"] <= 1e-5 and row["mismatch/max"] <= 1e-3 for row in rows[1:])
    assert all(row["actor/updates"] == 1 for row in rows[1:])
    run = Path("runs/r")
    assert {s["kind"] for s in read_samples(run / "samples")} == {"train", "validation-greedy"}
    assert "<html" in (run / "report.html").read_text()
    assert not (run / "curves.png").exists()
    assert main(["sample", "runs/r", "1+1=", "--max-tokens", "4"]) == 0


def test_a_plug_in_that_exits_is_named_and_the_run_is_not_done(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("new.yaml", "algorithm.advantage=plug.py:exits") == 2
    assert "plug.py, line " in (said := capsys.readouterr().err)
    assert "(exits) called sys.exit(0) before the command was done" in said


def test_kl_entropy_mini_batches_and_epochs_together() -> None:
    kl = "algorithm.kl={loss: {coef: 0.01}, reward: {coef: 0.01}, reference: frozen}"
    assert train("new.yaml", kl, "algorithm.entropy.coef=0.01", "training.mini_batches=3", "training.epochs=2") == 0
    last = metrics()[-1]
    assert last["actor/updates"] == 6
    assert last["actor/kl_ref"] > 0
    assert last["actor/entropy"] > 0
    assert last["actor/ppo_kl"] != 0


def test_float64_and_a_note_about_top_p(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("new.yaml", "model.dtype=float64", "rollout.top_p=0.5") == 0
    assert "truncated distribution" in "".join(capsys.readouterr())
    assert metrics()[-1]["mismatch/mean"] > 1e-3


def test_the_cache_is_told_with_its_numbers_and_8_bits_show_in_the_gap(capsys: pytest.CaptureFixture[str]) -> None:
    gaps = []
    for dtype in ("auto", "fp8"):
        assert train("new.yaml", "rollout.cache_gib=0.001", f"rollout.cache_dtype={dtype}", f"run.name={dtype}") == 0
        assert "KV cache: 0.00 GiB, " in "".join(capsys.readouterr())
        last = Path(f"runs/{dtype}/metrics.jsonl").read_text().splitlines()[-1]
        gaps.append(abs(parse_line(last)["mismatch/mean"]))
    assert gaps[0] < 1e-6 < 1e-5 < gaps[1]
    assert train("new.yaml", "rollout.cache_gib=0.000001", "run.name=small") == 2
    assert "rollout.cache_gib=1e-06: " in capsys.readouterr().err


def test_a_model_of_transformers_trains_on_a_file(here: Path) -> None:
    make_model(here / "model", kind="gpt2")
    weights = (here / "model/model.safetensors").read_bytes()
    assert train("files.yaml", "reward.parts=plug.py:count_zeros") == 0
    rows = metrics()
    assert all(row["mismatch/mean"] <= 1e-5 and row["mismatch/max"] <= 1e-3 for row in rows[1:])
    assert rows[-1]["actor/grad_norm"] > 0
    assert (here / "runs/r/checkpoints/step-000002/model.safetensors").read_bytes() != weights


def test_samples_whose_reward_raises_leave_the_loss_and_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("new.yaml", "reward.parts=plug.py:fails_on_short", "training.steps=1", "rollout.prompts=6") == 0
    shown = "".join(capsys.readouterr())
    assert "ValueError: too short to be scored" in shown
    assert "the completion (its last 400 characters): '" in shown
    last = metrics()[-1]
    assert 0 < last["reward/failed"] < 24
    assert last["rollout/sequences_used"] == 24 - last["reward/failed"]
    failed = [s for s in read_samples(Path("runs/r/samples")) if s["error"] is not None]
    assert len(failed) == last["reward/failed"]
    assert all(s["reward"] is None and s["advantage"] is None and len(s["completion"]) < 6 for s in failed)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "before the first step 9 of 9 held-out samples could not be scored; fix the reward. First: "),
        (["data.validation=[]"], "step 1: not one of 16 samples could be scored; fix the reward and run the same command again. First: "),
    ],
)  # fmt: skip
def test_a_reward_that_always_raises_ends_the_run_at_once(
    model: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], message: str
) -> None:
    assert train("files.yaml", "reward.parts=plug.py:always_fails", *overrides) == 2
    shown = "".join(capsys.readouterr())
    assert message in shown
    assert shown.count("ValueError: never works") == 1
    assert not list(Path("runs/r").glob("checkpoints/step-*"))


def test_a_reward_that_is_too_slow_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    Path("slow.py").write_text(
        "import time\n\ndef slow(data_source, solution_str, ground_truth, extra_info):\n    time.sleep(9)\n    return 1.0\n"
    )
    small = ("data.validation=[]", "training.steps=1", "rollout.prompts=1", "rollout.n=2")
    assert train("new.yaml", "reward.parts=slow.py:slow", "reward.timeout_s=0.5", *small) == 0
    shown = "".join(capsys.readouterr())
    assert "step 1: 2 of 2 samples took a reward longer than reward.timeout_s=0.5 and count as wrong" in shown
    assert metrics()[-1]["reward/answer_timeout"] == 2


def test_a_step_without_signal_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("new.yaml", "reward.parts=plug.py:constant", "algorithm.filters=[zero_signal]") == 0
    assert "step 1: no update, 3 of 3 groups gave equal rewards" in "".join(capsys.readouterr())
    assert metrics()[-1]["actor/updates"] == 0


def test_a_data_source_and_a_sampler_of_ones_own(model: Path) -> None:
    source = "data.train=[{plugin: 'plug.py:rows', options: {count: 6}}]"
    assert train("files.yaml", source, "data.sampler=plug.py:backwards") == 0
    events = [json.loads(line) for line in Path("runs/r/journal/events.jsonl").read_text().splitlines()]
    assert next(e for e in events if e["event"] == "drawn")["ids"] == ["rows/5#0", "rows/4#0", "rows/3#0", "rows/2#0"]


def test_an_advantage_a_loss_and_a_filter_of_ones_own() -> None:
    slots = (
        "algorithm.advantage={name: 'plug.py:half', options: {scale: 0.5}}",
        "algorithm.loss=plug.py:squared",
        "algorithm.ratio=none",
        "algorithm.clip=none",
        "algorithm.filters=['plug.py:first_only']",
    )
    assert train("new.yaml", *slots) == 0
    assert all(row["rollout/sequences_used"] == 1 and row["actor/updates"] == 1 for row in metrics()[1:])


def test_an_environment_of_ones_own_speaks_twice_and_gives_the_reward() -> None:
    environment = "environment={name: 'games.py:Twice', max_turns: 2, options: {goal: 2}}"
    assert train("new.yaml", environment, "training.steps=1", "rollout.prompts=12") == 0
    samples = read_samples(Path("runs/r/samples"))
    own = [s for s in samples if json.loads(s["parts"]).keys() == {"environment"}]
    assert own
    assert all(">" in s["completion"] for s in own)


def test_the_last_lines_of_a_graded_reward_tell_its_mean_and_what_the_best_was_chosen_by(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graded = ("reward.parts=plug.py:count_zeros", "validation.limit=4", "validation.modes.again={}")
    assert train("files.yaml", *graded) == 0
    shown = capsys.readouterr().out
    assert "accuracy" not in shown
    assert "        step 2 is the best: validation/greedy/reward_mean " in shown
    assert "held-out reward, greedy          step 0 -> step 2" in shown
    last = [line.split(": ")[0] for line in shown.splitlines()[-2:]]
    assert last == ["held-out reward before RL", "held-out reward after RL"]
    assert main(["export", "runs/r", "out"]) == 0
    assert "(its best: validation/greedy/reward_mean " in capsys.readouterr().out
    Path("files.yaml").write_text(FROM_FILES + "validation: {modes: {other: {}}}\n")
    assert train("files.yaml", *graded[:2]) == 0  # the run is complete, so it was never measured in this mode
    assert capsys.readouterr().out.splitlines()[-2:] == shown.splitlines()[-2:]


def test_a_function_that_gives_only_zeros_and_ones_is_told_how_to_say_that_one_is_correct(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("sign.py").write_text(
        "def sign(data_source, solution_str, ground_truth, extra_info):\n    return float(int(ground_truth) % 2)\n"
    )
    assert train("files.yaml", "reward.parts=sign.py:sign", "training.steps=1") == 0
    shown = capsys.readouterr().out
    assert shown.count("if 1 means correct, reward.parts.0.correct_at=1") == 1
    assert (
        train("files.yaml", "reward.parts={name: sign.py:sign, correct_at: 1}", "run.name=s", "training.steps=1") == 0
    )
    shown = capsys.readouterr().out
    assert "correct_at" not in shown
    assert "held-out accuracy after RL: 0." in shown
