"""`burnish view`: a report of any run, whoever is writing it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from burnish.cli.main import main
from burnish.run.metrics import MetricsFile
from burnish.run.run_directory import RunDirectory


def test_a_run_that_is_being_written_gets_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunDirectory.create(tmp_path, "it", "seed: 0\n") as run:
        MetricsFile(run.metrics).append(1, {"reward/mean": 0.5})
        assert main(["view", str(tmp_path / "it")]) == 0
    assert capsys.readouterr().out == f"report: {tmp_path / 'it' / 'report.html'}\n"
    assert "mean reward" in (tmp_path / "it" / "report.html").read_text()


def test_the_png_is_drawn_on_request_where_matplotlib_is_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunDirectory.create(tmp_path, "it", "seed: 0\n") as run:
        MetricsFile(run.metrics).append(1, {"reward/mean": 0.5})
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["view", str(run.path), "--png"]) == 2
    assert "pip install 'burnish[plot]'" in capsys.readouterr().err
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    assert main(["view", str(run.path), "--png"]) == 0
    assert f"curves: {run.path / 'curves.png'}" in capsys.readouterr().out


def test_what_is_no_run_is_refused_with_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunDirectory.create(tmp_path, "digits", "seed: 0\n"):
        pass
    assert main(["view", str(tmp_path / "digit")]) == 2
    assert "did you mean 'digits'" in capsys.readouterr().err
