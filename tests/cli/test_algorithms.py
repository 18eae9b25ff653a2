"""`burnish algorithms`."""

import pytest

from burnish.cli.main import main
from burnish.config.algorithm import PAPERS, PRESETS, Algorithm
from burnish.config.load import from_preset
from burnish.config.text import parse


def output(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["algorithms", *args]) == 0
    return capsys.readouterr().out


def test_the_table_has_a_row_a_preset_and_a_column_a_slot(capsys: pytest.CaptureFixture[str]) -> None:
    header, *rows = output(capsys).splitlines()
    assert header.split() == ["advantage", "ratio", "clip", "loss", "aggregation", "kl", "entropy", "filters"]
    assert [row.split()[0] for row in rows] == list(PRESETS)
    assert "grpo(std=none)" in rows[list(PRESETS).index("dr_grpo")]


@pytest.mark.parametrize("name", PRESETS)
def test_one_algorithm_prints_paper_formulas_and_yaml_that_gives_it_back(capsys, name: str) -> None:
    text = output(capsys, name)
    algorithm = from_preset(name)
    assert PAPERS[name] in text
    assert algorithm.advantage.formula in text
    assert algorithm.advantage.paper in text
    yaml = text[text.index("\nalgorithm:\n") :]
    assert Algorithm.model_validate(parse(yaml, "printed")["algorithm"]) == algorithm


def test_diff_prints_only_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    header, *rows = output(capsys, "--diff", "grpo", "dr_grpo").splitlines()
    assert header.split() == ["grpo", "dr_grpo"]
    assert [row.split()[0] for row in rows] == ["advantage", "aggregation", "kl"]
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
