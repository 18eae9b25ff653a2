"""A worker's client of its zygote: starts it and has it run programs. It never waits for it without a bound."""

from __future__ import annotations

import dataclasses
import json
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import burnish
from burnish.config.errors import UserError
from burnish.sandbox.limits import Limits
from burnish.sandbox.rpc import frame, receive_message, send_message
from burnish.sandbox.toolchain import Toolchain

START_TIMEOUT_S = 30.0
PROGRAM_ENVIRONMENT = {
    "HOME": "/scratch",
    "LANG": "C.UTF-8",
    "PATH": "/nowhere",
    "PYTHONHASHSEED": "0",
    "TMPDIR": "/scratch",
}
"""The whole environment of a program. A fixed hash seed makes verdicts reproducible."""
ZYGOTE_LAUNCHER = "import sys; sys.path.append({root!r}); from burnish.sandbox.zygote import main; main()"

NO_SANDBOX_ADVICE = """{user} run programs in a sandbox, and this system does not allow one: {problem}
Do one of these:
- as an ordinary user: allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces=10000;
  on Ubuntu also kernel.apparmor_restrict_unprivileged_userns=0)
- in a container: start it with --cap-add SYS_ADMIN --security-opt seccomp=unconfined --security-opt apparmor=unconfined
- set {setting}: programs written by the model then run as you and can reach your files; only time, memory, processes
  and output stay limited. Do this only on a machine that has nothing to lose."""


class SandboxError(Exception):
    """The sandbox itself failed. Nothing is known about the program."""


class RunLost(SandboxError):
    """The sandbox failed while a program ran, in a way that the program can have caused."""


@dataclasses.dataclass(frozen=True)
class RunResult:
    """How a run ended. `reason` is ended, time, cpu, memory, processes or output; burnish.rewards.code_reward adds lost."""

    reason: str
    status: int | None  # exit status of the program's process; negative for a signal
    output: str
    errors: str
    verdicts: list[dict[str, Any]]


def no_sandbox_error(problem: str, user: str, setting: str) -> UserError:
    """The error for a system that does not allow a sandbox. `setting` is what lets `user` do without."""
    return UserError(NO_SANDBOX_ADVICE.format(problem=problem, user=user, setting=setting))


def start_zygote(
    limits: Limits,
    is_isolated: bool,
    serves: Literal["runs", "sessions"],
    user: str,
    toolchain: Toolchain | None = None,
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a zygote; return its process and our end of its channel. Its first message is `ready` or `failed`."""
    if not sys.platform.startswith("linux"):
        raise UserError(f"{user} need Linux, because programs run in its namespaces and under its limits")
    ours, theirs = socket.socketpair()
    root = str(Path(burnish.__file__).parents[1])
    arguments = [str(theirs.fileno()), "isolated" if is_isolated else "unsafe", json.dumps(vars(limits)), serves]
    if toolchain is not None:
        arguments.append(toolchain.as_json())
    launcher = ["-s", "-S", "-P", "-B", "-X", "utf8", "-c", ZYGOTE_LAUNCHER.format(root=root)]
    process = subprocess.Popen(
        [sys.executable, *launcher, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=(theirs.fileno(),),
        env=PROGRAM_ENVIRONMENT,
    )
    theirs.close()
    return process, ours


class Sandbox:
    """Runs programs one at a time. The zygote starts with the first program, and again after a failure. Close it, or use `with`."""

    def __init__(
        self, limits: Limits, is_isolated: bool = True, slack_s: float = 5.0, toolchain: Toolchain | None = None
    ) -> None:
        """`slack_s` is how long a run may take beyond its own time limit before the sandbox counts as broken."""
        self._toolchain = toolchain
        self._limits, self._is_isolated, self._slack_s = limits, is_isolated, slack_s
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    def start(self) -> None:
        """Start the zygote; UserError with advice if the system does not allow a sandbox."""
        self._process, ours = start_zygote(self._limits, self._is_isolated, "runs", "code rewards", self._toolchain)
        self._channel = ours
        message = self._receive(time.monotonic() + START_TIMEOUT_S)
        if "failed" in message:
            self.close()
            raise no_sandbox_error(message["failed"], "code rewards", "reward.sandbox=unsafe")

    def run_calls(self, spec: Mapping[str, Any], tests: Mapping[str, Any], wall_s: float) -> RunResult:
        """Load a program and run tests that call it."""
        return self._run("calls", wall_s, spec, json.dumps(dict(tests)).encode())

    def run_stdio(self, program: str, stdin: str, wall_s: float) -> RunResult:
        """Run a program with this standard input."""
        return self._run("stdio", wall_s, {"program": program}, stdin.encode())

    def _run(self, kind: str, wall_s: float, spec: Mapping[str, Any], second_part: bytes) -> RunResult:
        if self._channel is None:
            self.start()
        assert self._channel is not None
        deadline = time.monotonic() + wall_s + self._slack_s
        try:
            self._set_socket_timeout(deadline)
            send_message(self._channel, {"kind": kind, "wall_s": wall_s})
            send_message(self._channel, dict(spec))
            self._channel.sendall(frame(second_part))
        except (OSError, ValueError) as error:
            # The zygote is gone or does not read, or the program has too many megabytes and the zygote waits for the rest.
            self.close()
            raise SandboxError(f"the sandbox does not accept a program: {error}") from error
        message = self._receive(deadline)
        if "failed" in message:
            self.close()
            raise SandboxError(f"the sandbox failed: {message['failed']}")
        return self._receive_end(deadline)

    def _receive_end(self, deadline: float) -> RunResult:
        """Wait for the end of a started program. After the deadline it is out of time, whatever keeps the sandbox from reporting."""
        try:
            message = self._receive(deadline)
        except SandboxError as error:
            if isinstance(error.__cause__, BlockingIOError):
                return RunResult("time", None, "", "", [])
            raise RunLost(str(error)) from error
        if "failed" in message:
            self.close()
            kind = RunLost if message["is_exhaustion"] else SandboxError
            raise kind(f"the sandbox failed: {message['failed']}")
        return RunResult(message["ended"], message["status"], message["output"], message["errors"], message["verdicts"])

    def _receive(self, deadline: float) -> dict[str, Any]:
        assert self._channel is not None
        try:
            self._set_socket_timeout(deadline)
            message: dict[str, Any] = receive_message(self._channel)
            return message
        except (OSError, EOFError, ValueError) as error:
            status = self.close()
            ended = "" if status is None else f"; its process ended with status {status}"
            raise SandboxError(f"the sandbox does not answer: {type(error).__name__}: {error}{ended}") from error

    def _set_socket_timeout(self, deadline: float) -> None:
        assert self._channel is not None
        left = max(0.001, deadline - time.monotonic())
        bound = struct.pack("ll", int(left), int(left % 1 * 1e6))
        self._channel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)
        self._channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)

    def close(self) -> int | None:
        """Kill the zygote, and with its pid namespace every process in it. Return its exit status if it had ended by itself."""
        if self._process is None:
            return None
        status = self._process.poll()
        self._process.kill()
        self._process.wait()
        if self._channel is not None:
            self._channel.close()
        self._process = self._channel = None
        return status

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
