"""`burnish view` serves the live page until Ctrl-C; with --report and --png it writes files."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from burnish.cli.main import main
from burnish.run.metrics import MetricsFile
from burnish.run.run_directory import RunDirectory


def test_view_writes_the_report_of_a_run_that_is_being_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunDirectory.create(tmp_path, "it", "seed: 0\n") as run:
        MetricsFile(run.metrics).append(1, {"reward/mean": 0.5})
        assert main(["view", str(tmp_path / "it"), "--report"]) == 0
    assert capsys.readouterr().out == f"report: {tmp_path / 'it' / 'report.html'}\n"
    assert "data-path=" in (tmp_path / "it" / "report.html").read_text()


@pytest.mark.parametrize("option", [[], ["--report"]])
def test_view_refuses_a_folder_that_is_not_a_run_with_the_nearest_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: list[str]
) -> None:
    with RunDirectory.create(tmp_path, "digits", "seed: 0\n"):
        pass
    assert main(["view", str(tmp_path / "digit"), *option]) == 2
    assert "did you mean 'digits'" in capsys.readouterr().err


def test_view_draws_the_png_on_request_if_matplotlib_is_installed(
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


def test_a_folder_without_runs_and_a_missing_extra_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["view", str(tmp_path)]) == 2
    assert f"no run in {tmp_path}" in capsys.readouterr().err
    monkeypatch.setattr("burnish.cli.view.find_spec", lambda name: None)
    assert main(["view", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "burnish[serve]" in error
    assert "--report" in error


def test_the_page_is_served_on_loopback_without_torch_until_a_signal(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, "it", "seed: 0\n") as run:
        MetricsFile(run.metrics).append(1, {"reward/mean": 0.5})
    script = "import sys; from burnish.cli.main import main; code = main(); assert 'torch' not in sys.modules; sys.exit(code)"
    command = [sys.executable, "-c", script, "view", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        line = server.stderr.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+/", line)
        assert found, line + server.stderr.read()
        with urllib.request.urlopen(found[0] + "api/runs") as answer:
            assert b'"id":"it"' in answer.read()
        other = urllib.request.Request(found[0] + "api/runs", headers={"Host": "example.com"})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(other)
        os.kill(server.pid, signal.SIGINT)
        assert server.wait(timeout=60) == 0, server.stderr.read()
