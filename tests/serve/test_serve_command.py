"""`burnish serve` as a process: it prints its address, answers, ends on a signal, and refuses bad options."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from burnish.cli import serve
from burnish.cli.main import main
from burnish.config.errors import UserError


@contextlib.contextmanager
def serving(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its first line."""
    command = [sys.executable, "-m", "burnish.cli.main", "serve", *arguments, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})
    assert process.stderr is not None
    try:
        yield process, process.stderr.readline()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_it_answers_and_lets_requests_finish_on_sigterm(model_directory: Path) -> None:
    with serving(str(model_directory), "--dtype", "float64", "--grace", "300", BURNISH_API_KEY="open") as (
        process,
        line,
    ):
        assert line.startswith("serving tiny at http://127.0.0.1:")
        assert "native decoder" in line
        url = line.split()[3]
        client = openai.OpenAI(base_url=url, api_key="open", max_retries=0, timeout=300)
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="shut").models.list()
        asked: dict[str, Any] = {"model": "tiny", "prompt": "the", "temperature": 0, "max_tokens": 2000}
        stream = client.completions.create(**asked, stream=True, extra_body={"return_token_ids": True})
        first = next(stream)
        process.send_signal(signal.SIGTERM)
        choices = [chunk.choices[0] for chunk in [first, *stream]]
        assert choices[-1].finish_reason == "length"
        assert sum(len(choice.token_ids) for choice in choices) == 2000
        assert process.wait(300) == 0
        assert process.stderr is not None
        log = process.stderr.read()
    assert "POST  /v1/completions  200" in log
    assert log.endswith("stopped\n")
    assert "Traceback" not in log


def test_a_paged_cache_is_told_with_its_numbers_and_serves(model_directory: Path) -> None:
    options = ["--cache-gib", "0.01", "--cache-dtype", "fp8", "--max-rows", "4", "--engine-process", "on"]
    options += ["--verifier", "format", "--max-search-tokens", "30"]
    with serving(str(model_directory), *options) as (process, line):
        assert line.startswith("KV cache: 0.01 GiB, ")
        assert "bytes a token" in line
        assert process.stderr is not None
        url = process.stderr.readline().split()[3]
        client = openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=300)
        answer = client.completions.create(model="tiny", prompt="the", max_tokens=5, logit_bias={"70": 100})
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 5
        for verifier, limit in (
            ("self_certainty", 0.0),
            ("format", -1e-9),
        ):  # of the child's model, and of this process
            strategy: dict[str, Any] = {"name": "best_of_n", "n": 3, "verifier": verifier}
            chosen = client.completions.create(
                model="tiny", prompt="the", max_tokens=5, extra_body={"strategy": strategy}
            )
            facts: Any = chosen.model_dump()["strategy"]
            assert (facts["verifier_calls"], facts["verifier_failures"]) == (3, 0)
            assert facts["score"] > limit
        with pytest.raises(openai.BadRequestError, match="from 1 to 30"):
            client.completions.create(
                model="tiny", prompt="the", extra_body={"strategy": {"name": "single", "budget": 31}}
            )
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0
        assert process.stderr.read().endswith("stopped\n")


def test_a_chat_that_names_no_limit_gets_what_the_cache_has_room_for(model_directory: Path) -> None:
    with serving(str(model_directory), "--cache-gib", "0.0002", "--max-rows", "2") as (process, line):
        room = re.search(r"= ([\d,]+) tokens", line)
        assert room is not None
        tokens = int(room[1].replace(",", ""))
        assert process.stderr is not None
        url = process.stderr.readline().split()[3]
        client = openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=300)
        answer = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "the"}], temperature=0
        )
        assert answer.usage is not None
        assert answer.usage.total_tokens <= tokens
        with pytest.raises(openai.BadRequestError, match=rf"has {tokens} positions"):
            client.completions.create(model="tiny", prompt="the", max_tokens=tokens)


@pytest.mark.slow
def test_two_ctrl_c_end_it_at_once(model_directory: Path) -> None:
    with serving(str(model_directory), "--name", "other") as (process, line):
        client = openai.OpenAI(base_url=line.split()[3], api_key="any", max_retries=0, timeout=300)
        stream = client.completions.create(model="other", prompt=[5], temperature=0, max_tokens=100_000, stream=True)
        next(stream)
        assert process.stderr is not None
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline().startswith("stopping: ")
        process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        assert process.wait(300) == 0
        assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "-1"], "--port -1: expected 0 or more"),
        (["--port", "70000"], "--port 70000: expected 65535 or less"),
        (["--max-rows", "0"], "--max-rows 0: expected 1 or more"),
        (["--max-body", "0"], "--max-body 0.0: expected more than 0"),
        (["--cache-gib", "0"], "--cache-gib 0.0: expected more than 0"),
        (["--cache-gib", "1e-7"], "the KV cache: "),
        (["--api-key", ""], "the API key must be of printable ASCII"),
        (["--api-key", "a b"], "the API key must be of printable ASCII"),
        (["--host", "256.1.1.1"], "--host 256.1.1.1:"),
    ],
)
def test_bad_options_are_explained(
    model_directory: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(model_directory), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_port_that_is_taken_is_said_before_the_model_is_loaded(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("burnish.models.policy.load_policy", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", str(model_directory), "--port", port]) == 2
    assert f"cannot listen at 127.0.0.1 port {port}" in capsys.readouterr().err


def test_a_server_without_a_key_beyond_this_machine_is_warned_of(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop_here(*_: object, **__: object) -> None:
        raise UserError("enough")

    monkeypatch.setattr("burnish.models.policy.load_policy", stop_here)
    monkeypatch.delenv("BURNISH_API_KEY", raising=False)
    warning = "anyone who can reach 0.0.0.0 may use this server"
    for arguments, is_warned in (
        (["--host", "0.0.0.0"], True),
        (["--host", "0.0.0.0", "--api-key", "k"], False),
        ([], False),
    ):
        assert main(["serve", str(model_directory), "--port", "0", *arguments]) == 2
        said = capsys.readouterr().err
        assert "enough" in said
        assert (warning in said) == is_warned


@pytest.mark.parametrize(
    "command", [["serve", "--port", "0", "--engine-process", "off"], ["sample", "the"]], ids=lambda words: words[0]
)
def test_on_a_gpu_a_model_is_not_loaded_in_float32_unless_told(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    def stop_here(config: Any, *_: object, **__: object) -> None:
        raise UserError(f"loaded in {config.dtype}")

    monkeypatch.setattr("burnish.models.policy.load_policy", stop_here)
    monkeypatch.setattr("burnish.models.policy.resolve_device", lambda name: torch.device("cuda"))
    for options, dtype in (([], "bfloat16"), (["--dtype", "float32"], "float32")):
        assert main([command[0], str(model_directory), *command[1:], *options]) == 2
        assert f"loaded in {dtype}" in capsys.readouterr().err


def test_without_the_extra_it_says_which_to_install(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    assert main(["serve", str(model_directory)]) == 2
    assert "pip install 'burnish[serve]' (brings burnish serve" in capsys.readouterr().err


def test_the_command_line_loads_no_server() -> None:
    code = (
        "import sys, burnish.cli.main, burnish.cli.serve\n"
        "try: burnish.cli.main.main(['serve', '--help'])\nexcept SystemExit: pass\n"
        "print(sorted({'starlette', 'uvicorn', 'torch', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
