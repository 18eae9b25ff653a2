"""`burnish train` from end to end, on models so small that a run takes a moment; and everything it must refuse."""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from burnish.cli.main import main
from burnish.config.loading import dump, load
from burnish.config.schema import TrainConfig
from burnish.models.tokenizer import Tokenizer
from burnish.run.metrics import parse_line
from burnish.run.run_directory import RunDirectory
from burnish.run.samples import read_samples

RECIPE = """
model: {new: {hidden_size: 16, num_layers: 1, num_heads: 2, mlp_size: 24, max_positions: 32}, device: cpu}
data: {train: {task: sort_digits}, max_prompt_tokens: 16}
reward: {parts: {name: 'plug.py:count_zeros'}, workers: 1}
rollout: {prompts: 3, n: 4, max_tokens: 6}
algorithm: dr_grpo
training: {steps: 2, optimizer: {lr: 1.0e-3}}
run: {threads: 1, directory: runs, name: r}
"""
FROM_FILES = """
model: {path: model, device: cpu}
data: {train: {path: sums.jsonl}, validation: {path: sums.jsonl}, max_prompt_tokens: 16}
reward: {parts: number, workers: 1}
rollout: {prompts: 4, n: 4, max_tokens: 4}
training: {steps: 2, optimizer: {lr: 1.0e-2}}
run: {threads: 1, directory: runs, name: r}
"""
PLUGINS = """
import os, signal
from pathlib import Path

def count_zeros(data_source, solution_str, ground_truth, extra_info):
    return solution_str.count("0") + 0.1 * len(solution_str)

def fails_on_short(data_source, solution_str, ground_truth, extra_info):
    if len(solution_str) < 6:
        raise ValueError("too short to be scored")
    return float(solution_str.count("0"))

def always_fails(data_source, solution_str, ground_truth, extra_info):
    raise ValueError("never works")

def breaks(data_source, solution_str, ground_truth, extra_info):
    count = Path(__file__).with_name("count")
    number = int(count.read_text()) if count.exists() else 0
    count.write_text(str(number + 1))
    if number >= 24 and Path(__file__).with_name("broken").exists():
        raise ValueError("broken from step 3 on")
    return len(solution_str) / 10

def exits(batch):
    raise SystemExit(0)

def constant(data_source, solution_str, ground_truth, extra_info):
    return 1.0

def rows(count):
    return [{"prompt": f"{i}>", "answer": str(i)} for i in range(count)]

def no_rows():
    return 5

def backwards(size, seed, epoch):
    return reversed(range(size))

def half(batch, scale):
    return scale * (batch.sequence["reward"] - batch.sequence["reward"].mean())

def a_list(batch):
    return [0.0] * batch.num_sequences

def squared(logp, anchor, advantages):
    return -advantages * (logp - anchor).exp() ** 2

def first_only(batch):
    return batch.sequence["reward"].new_ones(batch.num_sequences).cumsum(0) == 1

def a_number(batch):
    return 3

def signalled(batch):
    flag = Path(__file__).with_name("flag")
    if flag.exists():
        number = int(flag.read_text())
        flag.unlink()
        os.kill(os.getpid(), number)
    return batch.sequence["reward"] - batch.sequence["reward"].mean()
"""
ENVIRONMENTS = """
from burnish.environments.base import Done, Turn

class Twice:
    def __init__(self, prompt, tokenizer, goal):
        self.prompt, self.again, self.goal = prompt, tuple(tokenizer.encode(">")), goal
        self.turns = 0
    def start(self):
        return Turn(tuple(self.prompt.tokens))
    def observe(self, completion, text):
        self.turns += 1
        return Done(float(len(text) - self.goal)) if self.turns == 2 else Turn(self.again)

class Forgetful(Twice):
    def observe(self, completion, text):
        return None

class Babble(Twice):
    def start(self):
        return Turn((1, 9999))
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with recipes and plug-ins to work in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "new.yaml").write_text(RECIPE)
    (tmp_path / "files.yaml").write_text(FROM_FILES)
    (tmp_path / "plug.py").write_text(PLUGINS)  # without torch, which every process that scores would import
    (tmp_path / "games.py").write_text(ENVIRONMENTS)
    sums = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(3) for b in range(3)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    return tmp_path


@pytest.fixture
def model(here: Path) -> Path:
    return make_model(here / "model")


def make_model(path: Path, vocab_size: int = 16, kind: str = "llama") -> Path:
    """A tiny Hugging Face directory with a character tokenizer of 16 tokens."""
    import torch
    import transformers as tf

    torch.manual_seed(0)
    ends = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    if kind == "llama":
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = tf.LlamaConfig(vocab_size=vocab_size, max_position_embeddings=32, **sizes, **ends)
        inner = tf.LlamaForCausalLM(config)
    else:
        config = tf.GPT2Config(vocab_size=vocab_size, n_positions=32, n_embd=16, n_layer=1, n_head=2, **ends)
        inner = tf.GPT2LMHeadModel(config)
    inner.save_pretrained(path)
    Tokenizer.from_characters("0123456789>+= ").save(path)
    return path


def train(recipe: str, *overrides: str) -> int:
    return main(["train", recipe, *overrides])


def metrics() -> list[dict]:
    """Every line of metrics.jsonl; each is strict JSON."""
    lines = Path("runs/r/metrics.jsonl").read_text().splitlines()
    for line in lines:
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    return [parse_line(line) for line in lines]


def refused(capsys: pytest.CaptureFixture[str], recipe: str, *overrides: str) -> str:
    """The message of a command that must fail, and leave nothing of a run behind."""
    assert train(recipe, *overrides) == 2
    message = capsys.readouterr().err
    assert message.startswith("burnish: error: ")
    assert not Path("runs/r").exists()
    return message


# --- a run ---------------------------------------------------------------------------------------------------------------


def test_a_dry_run_prints_the_plan_and_makes_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("new.yaml", "--dry-run", "training.steps=7") == 0
    out = capsys.readouterr().out
    assert "steps: 7" in out
    assert "12 (3 prompts x 4 samples)" in out
    assert not (here / "runs").exists()


def test_a_dry_run_names_what_the_run_would_stop_at(capsys: pytest.CaptureFixture[str]) -> None:
    missing = ("data.train.path=nowhere.jsonl", "reward.parts=gone.py:f", "model.path=nobody")
    assert train("files.yaml", "--dry-run", *missing) == 2
    stops = [line for line in capsys.readouterr().out.splitlines() if line.startswith("this run would not start: ")]
    assert [any(word in line for line in stops) for word in ("nowhere.jsonl", "gone.py:f", "nobody")] == [True] * 3
    assert train("new.yaml", "--dry-run") == 0
    assert "would not start" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("reward.parts=math",), "reward math needs math_verify, which is not installed: pip install 'burnish[math]'"),
        (
            ("run.trackers=[wandb]",),
            "run.trackers=wandb needs wandb, which is not installed: pip install 'burnish[track]'",
        ),
        (
            ("data.validation=[{task: reasoning-gym/sum}]", "validation.limit=4"),
            "task reasoning-gym/sum needs reasoning_gym, which is not installed: pip install 'burnish[tasks]'",
        ),
        (("data.train.path=none.jsonl",), "none.jsonl:1: the row has no answer, and reward.parts[0] (number)"),
        (("data.train.path=picture.jsonl",), "picture.jsonl:1: column 'images' has a value"),
        (("model.path=org/name",), "`hf download org/name --local-dir models/name` fetches it"),
        (("rollout.prompts=200000", "rollout.max_rows=1000000"), "this run does not fit."),
        (("run.name=old", "rollout.n=2"), "run runs/old exists with another config:\n  rollout.n: 4 there, 2 now"),
        (("validation.by=nowhere",), "validation.by=nowhere: no held-out row has that column"),
        (("data.template.kind=chat",), "no chat template"),
        (("rollout.max_tokens=500",), "the model is made for 32 positions"),
        (("data.max_prompt_tokens=1",), "data.max_prompt_tokens"),
        (("data.sampler=plug.py:backward",), "plug.py defines no 'backward'"),
        (("environment.name=nomodule:Game",), "plug-in 'nomodule:Game': no such module"),
        (("environment.name=games.py:Twice", "environment.max_turns=2", "environment.options.gaol=3"), "'gaol'"),
        (("algorithm.advantage={name: plug.py:half, options: {scalle: 2}}",), "unknown option 'scalle'"),
        (("rollout.engine=transformers",), "rollout.engine=transformers needs model.backend=transformers"),
        (("model.path=model/untokenized",), "untokenized"),
    ],
)
def test_a_dry_run_fails_where_the_run_would(
    overrides: tuple[str, ...],
    words: str,
    here: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("math_verify", "wandb", "reasoning_gym"):
        monkeypatch.setitem(sys.modules, name, None)  # as where it is not installed
    monkeypatch.setattr("burnish.memory_plan.from_config._host_bytes", lambda: 2**29)
    (here / "none.jsonl").write_text('{"question": "1+1="}\n')
    (here / "picture.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "images": ["a.png"]}\n')
    (model / "untokenized").mkdir()
    (model / "untokenized/config.json").write_bytes((model / "config.json").read_bytes())
    RunDirectory.create(Path("runs"), "old", dump(load(TrainConfig, here / "files.yaml").config)).close()
    before = sorted(here.rglob("*"))
    capsys.readouterr()
    assert train("files.yaml", "--dry-run", *overrides) == 2
    out = capsys.readouterr().out
    assert words in out
    assert out.splitlines()[-1] == "dry run: 1 problem, the run would not start"
    assert [path for path in sorted(here.rglob("*")) if path.name != "__pycache__" and path.suffix != ".pyc"] == before
    assert train("files.yaml", *overrides) == 2


def test_a_dry_run_says_whether_the_run_fits_and_how_often_it_draws_each_row(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    capsys.readouterr()
    assert train("files.yaml", "--dry-run", "training.steps=90") == 0
    out = capsys.readouterr().out
    assert (
        "data: sums.jsonl has 9 rows; 90 steps draw 360 prompts of it, each row 40 times (an epoch is 2.2 steps)" in out
    )
    assert "memory: the run fits" in out
    assert out.splitlines()[-1] == "dry run: the run would start"
    monkeypatch.setattr("burnish.memory_plan.from_config._host_bytes", lambda: 2**28)  # less than torch itself takes
    assert train("files.yaml") == 2
    assert "this run does not fit." in capsys.readouterr().err
    assert not Path("runs/r").exists()


@pytest.mark.parametrize("section", ["train", "validation"])
@pytest.mark.parametrize(
    "reward", ["math", "exact", "number", "choice", "qa", "{name: rule_scores, options: {rule: simple_rl}}"]
)
def test_rows_without_an_answer_are_refused_before_the_model_is_loaded(
    section: str, reward: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"question": "1+1=", "answer": "2"}, {"question": "2+2=", "solution": "4"}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    message = refused(
        capsys, "files.yaml", f"data.{section}.path=rows.jsonl", f"reward.parts={reward}"
    )  # no model is there
    assert "rows.jsonl:2: the row has no answer, and reward.parts[0]" in message
    assert f"column 'solution' probably holds it: set data.{section}.answer_key=solution" in message


@pytest.mark.parametrize(
    ("row", "overrides", "words"),
    [
        (
            {"prompt": "1", "answer": ""},
            (),
            "(its columns: answer), leave the row out, or use a reward that needs no answer",
        ),
        (
            {"prompt": "1", "verifier": "math"},
            ("reward.parts=row",),
            "the row has no answer, and reward.parts[0] (row)",
        ),
        (
            {"prompt": "1", "reward_model": {"style": "model"}, "data_source": "chat"},
            (),
            "add {name: model, options: {path: DIRECTORY}, sources: [chat]} to reward.parts",
        ),
        ({"prompt": "1", "answer": "1", "tools": ["f"]}, (), "and environment=single_turn gives the model neither"),
        (
            {"prompt": "1", "reward_model": {"ground_truth": "1"}, "extra_info": {"need_tools_kwargs": True}},
            (),
            "column 'need_tools_kwargs' asks for tools or an agent (True)",
        ),
    ],
)
def test_a_row_that_cannot_be_scored_as_it_asks_is_refused(
    row: dict, overrides: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    message = refused(capsys, "files.yaml", "data.train.path=rows.jsonl", *overrides)
    assert "rows.jsonl:1: " in message
    assert words in message


def test_a_reward_that_needs_no_answer_takes_rows_without_one(model: Path) -> None:
    rows = [{"prompt": f"{i}+", "agent_name": "single_turn_agent", "images": []} for i in range(3)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (
        train("files.yaml", "data.train.path=rows.jsonl", "data.validation=[]", "reward.parts=plug.py:count_zeros") == 0
    )


def test_a_run_leaves_metrics_samples_a_model_and_a_report(
    monkeypatch: pytest.MonkeyPatch, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(model.parent)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as where the extra is not installed
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


def test_the_same_command_on_a_complete_run_says_so_and_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("new.yaml") == 0
    before = metrics()
    capsys.readouterr()
    assert train("new.yaml") == 0
    assert "is complete: all 2 steps are done" in "".join(capsys.readouterr())
    assert metrics() == before
    Path("runs/r/metrics.jsonl").unlink()
    assert train("new.yaml") == 0
    said = "".join(capsys.readouterr())
    assert "metrics.jsonl has no line of steps 1 to 2 (2 in all)" in said
    assert "goes on" not in said
    assert "report: not written, runs/r/metrics.jsonl has no lines; restore it" in said
    assert "model:  runs/r/checkpoints/step-000002" in said
    assert said.splitlines()[-1] == "held-out figures: not known"


def test_another_config_under_the_same_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("new.yaml") == 0
    before = metrics()
    assert train("new.yaml", "rollout.n=5") == 2
    assert "rollout.n: 4 there, 5 now" in capsys.readouterr().err
    assert metrics() == before


def weights(run: str) -> dict[str, bytes]:
    from safetensors.numpy import load_file

    last = max(Path(run, "checkpoints").glob("step-*"))
    return {name: array.tobytes() for name, array in load_file(last / "model.safetensors").items()}


def test_a_finished_run_goes_on_to_more_steps_as_if_it_had_been_asked_for_them_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train("new.yaml", "training.steps=4", "run.name=whole") == 0
    assert train("new.yaml") == 0
    config = Path("runs/r/config.yaml")
    lines = [line for line in config.read_text().splitlines() if not re.match(" *(best_by|prerendered):", line)]
    config.write_text("\n".join(lines) + "\n")  # as a version wrote it that did not have these keys yet
    capsys.readouterr()
    assert train("new.yaml", "training.steps=4", "run.save_every=1") == 0
    said = "".join(capsys.readouterr())
    assert "training.steps: 2 before, 4 from here on" in said
    assert "the config from before is runs/r/config.1.yaml" in said
    assert (
        "learning rate of the next update: 0.001, that of update 3 on the constant schedule of a run of 4 updates"
        in said
    )
    assert weights("runs/r") == weights("runs/whole")
    assert [row["step"] for row in metrics()] == [1, 2, 3, 4]
    changes = {"run.save_every": ["25", "1"], "training.steps": ["2", "4"]}
    events = [json.loads(line) for line in Path("runs/r/journal/events.jsonl").read_text().splitlines()]
    assert [event["changes"] for event in events if event["event"] == "config"] == [changes]
    assert train("new.yaml", "training.steps=3") == 2
    assert "training.steps=3, but run runs/r has made 4" in capsys.readouterr().err


def test_another_learning_rate_counts_from_the_last_checkpoint_on(capsys: pytest.CaptureFixture[str]) -> None:
    """What the journal has of later steps was sampled by a policy that the old learning rate had made."""
    linear = "training.optimizer={lr: 0.001, schedule: linear}"
    with pytest.raises(RuntimeError, match="killed"), killed_in("settle", step=4):
        train("new.yaml", "training.steps=4", "run.save_every=2")
    capsys.readouterr()
    assert train("new.yaml", "training.steps=4", "run.save_every=2", "training.optimizer.lr=0.1") == 0
    assert "training.optimizer.lr: 0.001 before, 0.1 from here on" in "".join(capsys.readouterr())
    rows = metrics()
    assert [row["actor/lr"] for row in rows] == [0.001, 0.001, 0.1, 0.1]
    assert all(row["mismatch/max"] < 1e-3 for row in rows)
    assert train("new.yaml", "training.steps=8", linear) == 0
    assert [row["actor/lr"] for row in metrics()[4:]] == pytest.approx([0.001 * (7 - k) / 7 for k in range(4, 8)])


@contextmanager
def killed_in(name: str, step: int) -> Iterator[None]:
    """The run dies before a part of a step."""
    from burnish.trainers import rl

    part = getattr(rl, name)

    def dying(job: Any, number: int, *args: Any) -> Any:
        if number == step:
            raise RuntimeError("killed")
        return part(job, number, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rl, name, dying)
        yield


def test_a_disk_that_refuses_is_one_line_with_the_file_and_the_run_goes_on_when_there_is_room(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train("new.yaml", "run.name=whole") == 0
    named = set()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Bytes of a file: as a full disk, it stops each of them somewhere.
    for limit in (100, 2_000, 5_000, 12_000):
        capsys.readouterr()
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            status = train("new.yaml")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        said = capsys.readouterr().err
        assert status == 2
        found = re.fullmatch(r"burnish: error: cannot write .*?(\S+): File too large; .*\n", said)
        assert found is not None, said
        named.add(Path(found[1]).name)
    assert len(named) >= 3, named
    assert train("new.yaml") == 0
    assert weights("runs/r") == weights("runs/whole")


def test_fresh_begins_anew_and_moves_the_old_run_aside(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("new.yaml", "--fresh") == 0  # nothing is there yet
    held_out = "data.validation={task: sort_digits, limit: 4}"
    assert train("new.yaml", held_out, "validation.by=nothing", "--fresh") == 2
    assert "validation.by=nothing: no held-out row has that column" in capsys.readouterr().err
    assert [folder.name for folder in Path("runs").iterdir()] == ["r"]  # the old run stays where it is
    assert train("new.yaml") == 0
    assert "the old run is now" not in capsys.readouterr().out
    assert train("new.yaml", "rollout.n=5", "--fresh") == 0
    assert "the old run is now runs/r.1" in capsys.readouterr().out
    assert "n: 5" in Path("runs/r/config.yaml").read_text()
    assert "n: 4" in Path("runs/r.1/config.yaml").read_text()
    assert [row["step"] for row in metrics()] == [1, 2]


def test_a_run_whose_samples_are_never_scored_ends_and_goes_on_when_the_reward_is_mended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ("new.yaml", "reward.parts=plug.py:breaks", "training.steps=6", "run.save_every=1")
    Path("broken").touch()
    assert train(*command) == 2
    assert [row["step"] for row in metrics()] == [1, 2, 3, 4]
    said = "".join(capsys.readouterr())
    assert (
        "step 5: not one sample could be scored in 3 steps in a row, so the run stops here; mend the reward and run the same"
        in said
    )
    steps = [line for line in said.splitlines() if line.startswith("step ")]
    assert "reward 0." in next(line for line in steps if line.startswith("step 2/6"))
    assert "reward" not in next(line for line in steps if line.startswith("step 4/6"))  # a number of an earlier step
    Path("broken").unlink()
    assert train(*command) == 0
    rows = metrics()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["reward/failed"] for row in rows] == [
        0
    ] * 6  # no step without a score was saved, so all are made up for


def test_a_last_step_without_a_score_is_an_error_and_what_came_before_it_is_saved() -> None:
    command = ("new.yaml", "reward.parts=plug.py:breaks", "training.steps=3")
    Path("broken").touch()
    assert train(*command) == 2
    assert [row["step"] for row in metrics()] == [1, 2]
    assert [path.name for path in Path("runs/r/checkpoints").glob("step-*")] == ["step-000002"]
    Path("broken").unlink()
    assert train(*command) == 0
    assert [row["step"] for row in metrics()] == [1, 2, 3]


def test_a_mended_reward_goes_on_under_the_same_name(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text("def judge(data_source, solution_str, ground_truth, extra_info):\n    return 1 / 0\n")
    assert train("new.yaml", "reward.parts=mine.py:judge") == 2
    assert "mend the reward and run the same command again. First: " in capsys.readouterr().err
    Path("mine.py").write_text("def judge(data_source, solution_str, ground_truth, extra_info):\n    return 0.5\n")
    assert train("new.yaml", "reward.parts=mine.py:judge") == 0
    assert "ZeroDivisionError" not in "".join(capsys.readouterr())
    assert [row["reward/mean"] for row in metrics()] == [0.5, 0.5]


def test_a_plug_in_that_exits_is_named_and_the_run_is_not_done(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("new.yaml", "algorithm.advantage=plug.py:exits") == 2
    assert "plug.py, line " in (said := capsys.readouterr().err)
    assert "(exits) called sys.exit(0) before the command was done" in said


def test_a_second_process_on_the_same_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with RunDirectory.claim(Path("runs"), "r", "seed: 0\n"):
        assert train("new.yaml") == 2
        assert "is being written by another process" in capsys.readouterr().err
    assert train("new.yaml") == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_step_and_the_same_command_goes_on(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    command = ("new.yaml", "algorithm.advantage=plug.py:signalled", "training.steps=3")
    Path("flag").write_text(str(int(number)))
    assert train(*command) == 0
    assert "stopped; the same command goes on from here" in capsys.readouterr().out
    assert [row["step"] for row in metrics()] == [1]
    assert [p.name for p in Path("runs/r/checkpoints").glob("step-*")] == ["step-000001"]
    assert train(*command) == 0
    assert [row["step"] for row in metrics()] == [1, 2, 3]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


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


def test_a_warm_start_is_made_once(capsys: pytest.CaptureFixture[str]) -> None:
    stage = "warm_start={data: {task: sort_digits, options: {num: 20}}, updates: 2, batch_size: 4}"
    assert train("new.yaml", stage) == 0
    assert "warm start on 20 demonstrations" in "".join(capsys.readouterr())
    assert len(Path("runs/r/demonstrations-0.jsonl").read_text().splitlines()) == 20
    assert train("new.yaml", stage) == 0
    assert "warm start" not in "".join(capsys.readouterr())


def test_a_model_of_transformers_trains_on_a_file(here: Path) -> None:
    make_model(here / "model", kind="gpt2")
    weights = (here / "model/model.safetensors").read_bytes()
    assert train("files.yaml", "reward.parts=plug.py:count_zeros") == 0
    rows = metrics()
    assert all(row["mismatch/mean"] <= 1e-5 and row["mismatch/max"] <= 1e-3 for row in rows[1:])
    assert rows[-1]["actor/grad_norm"] > 0
    assert (here / "runs/r/checkpoints/step-000002/model.safetensors").read_bytes() != weights


# --- rewards that fail, steps without signal -------------------------------------------------------------------------------


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
        ([], "before the first step 9 of 9 held-out samples could not be scored; mend the reward. First: "),
        (["data.validation=[]"], "step 1: not one of 16 samples could be scored; mend the reward and run the same command again. First: "),
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


# --- plug-ins ------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("algorithm.advantage=plug.py:a_list", "advantage plug.py:a_list returned list"),
        ("algorithm.filters=['plug.py:a_number']", "filter plug.py:a_number returned int"),
        ("environment={name: 'games.py:Forgetful', options: {goal: 0}}", "observe() returned NoneType"),
        ("environment={name: 'games.py:Babble', options: {goal: 0}}", "start() gave token 9999"),
    ],
)
def test_a_plug_in_that_answers_nonsense_is_named(
    overrides: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("new.yaml", overrides, "rollout.prompts=12") == 2
    assert message in capsys.readouterr().err


# --- refused before anything is written ------------------------------------------------------------------------------------


def test_a_corrected_command_follows_a_refused_one(capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, "new.yaml", "reward.parts=plug.py:no_such_function")
    assert train("new.yaml") == 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.steps=-1", "training.steps: got -1"),
        ("training.optimizer.lr=.nan", "training.optimizer.lr: got nan"),
        ("training.optimizer.betas=[0.9, 1.5]", "betas [0.9, 1.5] are decay rates"),
        ("rolout.n=4", "did you mean 'rollout'?"),
        ("rollout.n=1", "needs rollout.n of 2 or more"),
        ("run.name=a/b", "run name 'a/b' cannot be a folder name"),
        ("run.directory=plug.py", "cannot write the run directory plug.py/r: Not a directory"),
        ("model.device=mps", "model.device='mps': use auto, cpu, cuda"),
        ("rollout.max_tokens=30", "the longest prompt has 8 tokens, and rollout.max_tokens=30 more make 38, but"),
        ("data.max_prompt_tokens=2", "prompts are longer than data.max_prompt_tokens=2"),
        ("run.trackers=[wandb]", "run.trackers names wandb, which is not installed"),
        ("rollout.engine=transformers", "rollout.engine=transformers needs model.backend=transformers"),
        ("warm_start={data: {plugin: 'plug.py:rows', options: {count: 1}}}", "no column 'completion'; supervised rows"),
        ("environment=plug.py:count_zeros", "the class has no method 'start'"),
        ("data.sampler=suffle", "unknown sampler 'suffle'; did you mean 'shuffle'?"),
    ],
)
def test_a_bad_setting_is_refused(
    override: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as where it is not installed
    assert message in refused(capsys, "new.yaml", override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("reward.parts=task", "needs a column 'task', which row 'sums.jsonl/0'"),
        ("validation.by=level", "validation.by=level: no held-out row has that column"),
        ("validation.modes.greedy.max_tokens=30", "and validation.modes.greedy.max_tokens=30 more make 34, but"),
        ("data.train=[{plugin: 'plug.py:no_rows'}]", "data source 'plug.py:no_rows' returned int"),
        ("data.train.0.path=nothing.jsonl", "no such file: "),
        ("data.train.0.path=empty.jsonl", "empty.jsonl holds no rows"),
        ("data.train.0.path=null.jsonl", "null.jsonl:1: the row has no answer"),
        ("data.train.0.path=surrogate.jsonl", "surrogate.jsonl:1: question has half of a surrogate pair ('\\ud800')"),
        ("data.train.0.prompt_key=q", "sums.jsonl:1: no column 'q'"),
    ],
)
def test_bad_data_is_refused(
    override: str, message: str, model: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "empty.jsonl").write_text("")
    (here / "null.jsonl").write_text('{"question": "1+1=", "answer": null}\n')
    (here / "surrogate.jsonl").write_text('{"question": "\\ud800", "answer": "1"}\n')
    capsys.readouterr()
    assert message in refused(capsys, "files.yaml", override)


def test_a_bad_model_directory_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "model directory model does not exist" in refused(capsys, "files.yaml")
    for kind in ("llama", "gpt2"):
        small = make_model(here / f"small-{kind}", vocab_size=10, kind=kind)
        capsys.readouterr()
        assert main(["train", "files.yaml", f"model.path={small.name}"]) == 2
        message = "the tokenizer has 16 tokens, but the model has embeddings for 10 only"
        assert message in capsys.readouterr().err
    model = make_model(here / "model")
    capsys.readouterr()
    (model / "tokenizer.json").rename(here / "tokenizer.json")
    assert "no tokenizer in " in refused(capsys, "files.yaml")
    (here / "tokenizer.json").rename(model / "tokenizer.json")
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert "holds its weights as pickle (pytorch_model.bin)" in refused(capsys, "files.yaml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [1,\n b", "bad.yaml, line 2, column 3: expected ',' or ']'"),
        (b"\xff\xfe\x00", "bad.yaml: not a YAML file: byte 0 is not UTF-8 text"),
        (b"- 1", "bad.yaml: expected `key: value` lines"),
        (b"", "no model: give model.path"),
    ],
)
def test_an_unreadable_recipe_is_refused(
    content: bytes, message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "bad.yaml").write_bytes(content)
    assert message in refused(capsys, "bad.yaml")


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
