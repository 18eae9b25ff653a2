"""Settings of an evaluation: what a run brings, what the command says, what is refused."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.evaluation.settings import EvalConfig, is_given, load_settings


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BURNISH_DATA", raising=False)
    Path("d.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n')


RUN: dict[str, Any] = {
    "seed": 7,
    "model": {"dtype": "bfloat16"},
    "data": {"template": {"kind": "plain", "text": "Q: {prompt}"}},
    "rollout": {"max_tokens": 33, "stop": ["\n"]},
    "reward": {"parts": [{"name": "number", "weight": 2.0}], "timeout_s": 3.0},
}


def made(
    data: str, flags: dict[str, Any] | None = None, *overrides: str, run: dict[str, Any] | None = None
) -> EvalConfig:
    return load_settings(data, flags or {}, overrides, run or {}).config


def test_a_task_is_judged_by_its_own_checker_on_a_thousand_problems() -> None:
    config = made("task:sort_digits")
    assert (config.data.source.task, config.limit) == ("sort_digits", 1000)
    assert [p.name for p in config.reward.parts] == ["task"]
    assert (config.sampling.n, config.sampling.temperature) == (1, 0.0)


def test_a_file_needs_a_reward_and_the_error_lists_them() -> None:
    with pytest.raises(
        UserError,
        match=r"how are answers to d\.jsonl .* exact, number, choice, math, answer_set, format, think_format, language, rule_scores, .*or path",
    ):
        made("d.jsonl")
    assert made("d.jsonl", {"reward.parts": ["number"]}).limit is None
    assert made("d.jsonl", None, "reward.parts=exact").reward.parts[0].name == "exact"


def test_a_game_of_several_turns_says_how_many() -> None:
    assert made("task:guess_number", None, "environment={name: guess_number, max_turns: 2}").environment.max_turns == 2
    own = made("task:absolute_zero", None).environment
    assert (own.name, own.max_turns) == ("absolute_zero", 1)
    with pytest.raises(UserError, match=r"max_turns=1 ends it after the first answer: set environment.max_turns"):
        made("task:guess_number", None, "environment=guess_number")


def test_a_run_brings_its_template_reward_seed_and_max_tokens() -> None:
    config = made("d.jsonl", run=RUN)
    assert (config.seed, config.sampling.max_tokens, config.sampling.stop) == (7, 33, ["\n"])
    assert config.data.template.text == "Q: {prompt}"
    assert (config.reward.parts[0].name, config.reward.timeout_s) == ("number", 3.0)


def test_the_command_wins_over_the_run_and_an_override_over_a_flag() -> None:
    flags = {"seed": 1, "reward.parts": ["exact"], "sampling.max_tokens": 5}
    config = made("d.jsonl", flags, "sampling.max_tokens=6", run=RUN)
    assert (config.seed, config.sampling.max_tokens) == (1, 6)
    assert [p.name for p in config.reward.parts] == ["exact"]


def test_a_runs_reward_is_left_where_it_cannot_score_the_data() -> None:
    assert made("task:addition", run=RUN).reward.parts[0].name == "task"
    of_task = {**RUN, "reward": {"parts": [{"name": "task"}]}}
    with pytest.raises(UserError, match="how are answers"):
        made("d.jsonl", run=of_task)


def test_a_benchmark_brings_its_file_reward_and_length_and_wins_over_a_runs() -> None:
    Path("gsm8k_test.jsonl").write_text('{"question": "1 + 1?", "answer": "so #### 2"}\n')
    for run in ({}, RUN):
        config = load_settings("gsm8k", {}, [], run, Path()).config
        assert (config.data.source.path, config.data.source.shape) == ("gsm8k_test.jsonl", "gsm8k")
        assert [part.name for part in config.reward.parts] == ["number"]
        assert (config.sampling.max_tokens, config.sampling.stop, config.seed, config.limit) == (1024, [], 0, None)
        assert config.data.template.text == ("Q: {prompt}" if run else "{prompt}")
        assert config.model.dtype == ("bfloat16" if run else "float32")
    config = load_settings("gsm8k", {"sampling.max_tokens": 5, "reward.parts": ["math"]}, ["seed=2"], {}, Path()).config
    assert (config.sampling.max_tokens, config.reward.parts[0].name, config.seed) == (5, "math", 2)


@pytest.mark.parametrize("run", [{}, RUN])
@pytest.mark.parametrize(
    ("shape", "verifier", "max_tokens", "split"),
    [("gpqa", "choice", 4096, None), ("mbpp", "code", 1024, "test"), ("geometry3k", "math", 256, None)],
)
def test_a_file_in_the_form_of_a_published_set_is_asked_and_judged_as_that_set(
    shape: str, verifier: str, max_tokens: int, split: str | None, run: dict[str, Any]
) -> None:
    Path("mine.csv").write_text("a,b\n1,2\n")
    asked = made(f"{shape}:mine.csv", run=run)
    by_key = made("mine.csv", None, f"data.source.shape={shape}", run=run)
    for config in (asked, by_key):
        assert (config.data.source.path, config.data.source.shape) == ("mine.csv", shape)
        assert [part.name for part in config.reward.parts] == [verifier]
        assert config.sampling.max_tokens == (33 if run and shape == "geometry3k" else max_tokens)
    assert asked.data.source.split == split
    assert made(f"{shape}:mine.csv", {"reward.parts": ["exact"]}, run=run).reward.parts[0].name == "exact"


def test_a_file_whose_name_has_a_colon_and_an_unknown_shape_are_told_apart() -> None:
    Path("math:d.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n')
    assert made("math:d.jsonl", {"reward.parts": ["number"]}).data.source.path == "math:d.jsonl"
    with pytest.raises(UserError, match="unknown data set 'gpqe'; did you mean 'gpqa'"):
        made("d.jsonl", None, "data.source.shape=gpqe")
    with pytest.raises(UserError, match=r"d.jsonl to be judged.* SHAPE:d.jsonl"):
        made("d.jsonl")


def test_an_unknown_benchmark_and_one_without_a_file_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="unknown benchmark 'gsm8l'; did you mean 'gsm8k'"):
        made("gsm8l")
    with pytest.raises(UserError, match="unknown benchmark 'math-500'; did you mean 'math500'"):
        made("math-500")
    with pytest.raises(UserError, match="--data-dir"):
        made("gsm8k")
    monkeypatch.setenv("BURNISH_DATA", ".")
    with pytest.raises(UserError, match="has no file of gsm8k"):
        made("gsm8k")


def test_prepared_rows_name_their_own_verifier() -> None:
    record = {"prompt": "1?", "reward_model": {"ground_truth": "1"}, "extra_info": {"verifier": "number"}}
    Path("p.jsonl").write_text(json.dumps(record) + "\n")
    assert made("p.jsonl").reward.parts[0].name == "row"
    assert made("p.jsonl", {"reward.parts": ["exact"]}).reward.parts[0].name == "exact"


def test_what_nobody_set_may_be_chosen_by_the_machine() -> None:
    assert not is_given("model.dtype", {"model.dtype": None}, ["model.device=cpu"], {})
    assert is_given("model.dtype", {"model.dtype": "float32"}, [], {})
    assert is_given("model.dtype", {}, ["model.dtype=float32"], {})
    assert is_given("model.dtype", {}, ["model={dtype: float32}"], {})
    assert is_given("model.dtype", {}, [], RUN)


def test_options_of_a_task_and_columns_of_a_file() -> None:
    assert made("task:sort_digits", None, "data.source.options.max_digits=5").data.source.options == {"max_digits": 5}
    source = made("d.jsonl", {"reward.parts": ["exact"], "data.source.prompt_key": "q: 1"}).data.source
    assert source.prompt_key == "q: 1"


@pytest.mark.parametrize(
    ("flags", "overrides", "message"),
    [
        ({"sampling.n": 4}, [], "n=4 samples at temperature 0 are all alike"),
        ({"sampling.temperature": -1.0}, [], "sampling.temperature: got -1.0, expected a number of 0 or more"),
        ({}, ["model.path=x"], "the model is the command's first argument"),
        ({}, ["sampling.temprature=1"], "did you mean 'temperature'"),
        ({"limit": 0}, [], "limit: got 0"),
    ],
)
def test_bad_settings_are_refused_with_the_reason(flags: dict[str, Any], overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        made("task:sort_digits", flags, *overrides)


def test_prompts_may_be_as_long_as_the_positions_but_one() -> None:
    assert made("task:sort_digits").prompts(64).max_prompt_tokens == 63
    assert made("task:sort_digits", None, "data.max_prompt_tokens=9").prompts(64).max_prompt_tokens == 9
    assert made("task:sort_digits", None, "data.max_prompt_tokens=900").prompts(64).max_prompt_tokens == 63


def test_help_of_the_commands_loads_no_torch() -> None:
    code = (
        "import sys\nfrom burnish.cli.main import main\n"
        "for name in ('eval', 'sample', 'sft'):\n"
        "    try: main([name, '--help'])\n    except SystemExit as e: assert e.code == 0\n"
        "print(sorted({'torch', 'transformers', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "data.source.options" in done.stdout
