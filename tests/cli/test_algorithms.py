"""`burnish algorithms`."""

import pytest

from burnish.algorithms.presets import PRESETS
from burnish.algorithms.spec import Algorithm
from burnish.cli.main import main
from burnish.config.loading import algorithm_from_preset
from burnish.config.yaml_text import parse_yaml


def output(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["algorithms", *args]) == 0
    return capsys.readouterr().out


def test_the_table_has_a_row_a_preset_and_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    header, *rows = output(capsys).splitlines()
    assert header.strip() == "changes in grpo"
    names = [row.split()[0] for row in rows if row and not row.startswith((" ", "`"))]
    assert names == list(PRESETS)
    assert {"prime", "dpo", "dapo"} <= set(names)
    assert max(map(len, rows)) <= 120
    assert "advantage: grpo(std=none); aggregation: seq-mean-token-sum-norm; kl: none" in "\n".join(rows)


@pytest.mark.parametrize("name", PRESETS)
def test_one_algorithm_prints_paper_problem_formulas_and_yaml_that_gives_it_back(capsys, name: str) -> None:
    text = output(capsys, name)
    algorithm, preset = algorithm_from_preset(name), PRESETS[name]
    words = " ".join(text.split())
    for said in (preset.title, preset.paper, preset.solves, preset.note):
        assert said in words
    for _, choice in algorithm.choices():
        if choice.name != "none":
            assert choice.formula in text
            assert choice.paper in text
    yaml = text[text.index("\nalgorithm:\n") :]
    assert Algorithm.model_validate(parse_yaml(yaml, "printed")["algorithm"]) == algorithm


def test_slots_that_are_off_are_named_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    lines = output(capsys, "vapo").splitlines()
    assert "off: kl, entropy, router, filters, refill, replay, shaping, curriculum, correction, process" in lines
    for on in ("critic: warmup_steps=50, optimizer.lr=2e-06", "auxiliary: positive_nll=0.1"):
        assert on in lines


def test_diff_prints_only_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    header, *rows = output(capsys, "--diff", "grpo", "dr_grpo").splitlines()
    assert header.split() == ["grpo", "dr_grpo"]
    assert [row.split()[0] for row in rows] == ["advantage", "aggregation", "kl"]
    assert [row.split()[0] for row in output(capsys, "--diff", "ppo", "vapo").splitlines()[1:]] == [
        "advantage",
        "clip",
        "kl",
        "auxiliary",
        "critic",
    ]
    assert output(capsys, "--diff", "grpo", "grpo") == "grpo and grpo are the same\n"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["grop"], "did you mean 'grpo'?"),
        (["--diff", "grpo", "grop"], "did you mean 'grpo'?"),
        (["grpo", "--diff", "grpo", "grpo"], "not both"),
    ],
)
def test_a_wrong_name_is_an_error(capsys: pytest.CaptureFixture[str], args: list[str], words: str) -> None:
    assert main(["algorithms", *args]) == 2
    assert words in capsys.readouterr().err
