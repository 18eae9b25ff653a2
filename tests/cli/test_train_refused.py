"""What `burnish train` and its dry run refuse before anything is written."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from burnish.cli.main import main
from burnish.config.loading import dump, load
from burnish.config.schema import TrainConfig
from burnish.run.run_directory import RunDirectory
from tests.cli.train_recipes import make_model, metrics, refused, train

pytestmark = pytest.mark.usefixtures("here")


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
            "run.trackers=wandb needs wandb, which is not installed: pip install 'burnish[wandb]'",
        ),
        (
            ("data.validation=[{task: reasoning-gym/sum}]", "validation.limit=4"),
            "task reasoning-gym/sum needs reasoning_gym, which is not installed: pip install 'burnish[tasks]'",
        ),
        (("data.train.path=none.jsonl",), "none.jsonl:1: the row has no answer, and reward.parts[0] (number)"),
        (("data.train.path=picture.jsonl",), "an image is given, but this model reads text only"),
        (
            ("model.path=org/name",),
            "`hf download org/name --local-dir models/name`; copy models/name here and give that path",
        ),
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
    (here / "a.png").write_bytes(b"")
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


EXPERTS = "model.new={family: qwen3_moe, experts: [7, 2, 12], num_heads: 6, num_kv_heads: 6, hidden_size: 24}"
TWO = ("placement={name: ray, workers: 2, engines: 2}", "rollout.prompts=4")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ("algorithm.router.balance=0.1",),
            "algorithm.router is set, and the model has no experts: remove the section",
        ),
        (("algorithm.router.engine_experts=replay",), "algorithm.router is set, and the model has no experts"),
        (
            (EXPERTS, "algorithm.router.engine_experts=replay", "rollout.engine=vllm", "rollout.vllm.url=http://h:1"),
            "needs an engine that gives the experts of every token: set rollout.engine=native, or vllm without a server",
        ),
        ((EXPERTS, "training.layers=fp8"), "the grouped products of experts have no 8-bit form"),
        ((EXPERTS, "rollout.weights=fp8"), "matrices of experts are not multiplied in 8 bits"),
        ((*TWO, EXPERTS, "rollout.weights=fp8"), "matrices of experts are not multiplied in 8 bits"),
        ((*TWO, "parallel.expert=2"), "parallel.expert=2 has no effect: the model has no experts"),
        ((*TWO, EXPERTS, "parallel.expert=2"), "parallel.expert=2 does not divide the model's 7 experts"),
        (
            (*TWO, EXPERTS, "placement.engine_tensor=2"),
            "placement.engine_tensor=2 does not divide the model's 7 experts",
        ),
        (
            (*TWO, "parallel.tensor=2", "model.new.num_heads=3", "model.new.hidden_size=24"),
            "parallel.tensor=2 does not divide the model's 3 query heads",
        ),
        ((*TWO, "parallel.pipeline=2"), "parallel.pipeline=2 needs as many layers, and the model has 1"),
        (
            (*TWO, "model.new={family: gemma2, num_heads: 3, hidden_size: 24}", "parallel.context=2"),
            "gathered keys has no soft-capped scores",
        ),
    ],
)
def test_what_the_architecture_cannot_do_is_refused_before_anything_starts(
    overrides: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("new.yaml", "--dry-run", *overrides) == 2
    assert words in capsys.readouterr().out
    assert words in refused(capsys, "new.yaml", *overrides)


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
            "(the row has: answer), leave the row out, or use a reward that needs no answer",
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


def test_another_config_under_the_same_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("new.yaml") == 0
    before = metrics()
    assert train("new.yaml", "rollout.n=5") == 2
    assert "rollout.n: 4 there, 5 now" in capsys.readouterr().err
    assert metrics() == before


def test_a_second_process_on_the_same_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with RunDirectory.claim(Path("runs"), "r", "seed: 0\n"):
        assert train("new.yaml") == 2
        assert "is being written by another process" in capsys.readouterr().err
    assert train("new.yaml") == 0


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
        ("environment=plug.py:count_zeros", "no convention of environments fits"),
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
