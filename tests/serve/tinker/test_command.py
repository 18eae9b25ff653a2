"""`burnish tinker` as a process: it prints how clients reach it, answers, ends on a signal, and refuses bad options."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from burnish.cli.main import main
from burnish.models.policy import PolicyModel


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, tiny_base: PolicyModel) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    path.mkdir()
    tiny_base.save(path)
    return path


def test_it_serves_until_a_signal(directory: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "burnish.cli.main", "tinker", str(directory), "--port", "0", "--name", "org/tiny"]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env={**os.environ, "BURNISH_API_KEY": "tml-key"}
    )
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        found = re.fullmatch(r"serving org/tiny \(.*\); clients: TINKER_BASE_URL=(\S+) TINKER_API_KEY=\.\.\.\n", line)
        assert found is not None, line
        asked = urllib.request.Request(f"{found[1]}/api/v1/get_server_capabilities", headers={"x-api-key": "tml-key"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            assert json.load(answer)["supported_models"][0]["model_name"] == "org/tiny"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        log = process.stderr.read()
        assert log.endswith("stopped\n")
        assert "Traceback" not in log
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--api-key", "secret"], "must begin with tml-"),
        (["--token-budget", "0"], "--token-budget 0: expected 1 or more"),
        (["--port", "99999"], "expected 65535 or less"),
    ],
)
def test_bad_options_are_refused(
    options: list[str], text: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tinker", str(directory), *options]) == 2
    assert text in capsys.readouterr().err
