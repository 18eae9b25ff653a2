"""An inference server as a child of the process that samples: started with a command, awaited, and ended with its parent.

The command is the user's (`placement.server`), such as `vllm serve {model} --port {port} --tensor-parallel-size 4`. `{model}` becomes a
model directory and `{port}` a free port. The server has the GPUs of its parent's place, and its output goes to the parent's log. A
keeper process stands in between: it kills the server and all of its processes when the parent ends, however that ends.
"""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from burnish.config.errors import UserError
from burnish.config.foreign_engines import Sglang, Vllm
from burnish.config.rollout import Rollout
from burnish.inference.server_client import ServerClient, ServerError
from burnish.inference.sglang.sglang_servers import SGLANG
from burnish.inference.vllm.vllm_requests import VLLM
from burnish.models.policy import PolicyModel

POLL_S = 0.5
ANSWER_TIMEOUT_S = 10.0
KEEPER = """
import os, signal, subprocess, sys, threading
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
def watch():
    os.read(0, 1)  # returns when the parent has ended
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
threading.Thread(target=watch, daemon=True).start()
os._exit(child.wait() & 255)
"""


class ServerProcess:
    """A running server of the policy's model at `url`."""

    def __init__(self, command: str, model: Path, client: ServerClient, timeout_s: float) -> None:
        """Returns when the server answers; a `UserError` if it ends before or does not within `timeout_s`."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        try:
            words = [word.format(model=model, port=port) for word in shlex.split(command)]
        except (KeyError, IndexError, ValueError) as error:
            raise UserError(
                f"placement.server={command!r} cannot be read ({error}): only {{model}} and {{port}} are filled in"
            ) from error
        self._keeper = subprocess.Popen([sys.executable, "-c", KEEPER, *words], stdin=subprocess.PIPE)
        self._wait(client, shlex.join(words), timeout_s)

    def _wait(self, client: ServerClient, command: str, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while True:
            status = self._keeper.poll()
            if status is not None:
                raise UserError(
                    f"the {client.product} server ended with status {status} before it answered ({command}); its output is in the log of the "
                    "process that samples, in the run's folder workers"
                )
            try:
                client.call(self.url, "/health", ANSWER_TIMEOUT_S)
                return
            except ServerError as error:
                if error.kind == "refused":  # it answers, and has no such path
                    return
                reason = error.reason
            if time.monotonic() > until:
                self.close()
                raise UserError(
                    f"the {client.product} server did not answer in {timeout_s:g} s, which is placement.timeout_s ({command}): {reason}"
                )
            time.sleep(POLL_S)

    def has_ended(self, wait_s: float = 0.0) -> bool:
        """Whether the server has ended, or ends within `wait_s`."""
        try:
            self._keeper.wait(wait_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """End the server and all of its processes."""
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self._keeper.wait()


def free_port() -> int:
    """A port of this machine that no program listens at now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def start_server(
    command: str, policy: PolicyModel, rollout: Rollout, timeout_s: float
) -> tuple[ServerProcess, Rollout]:
    """Start the server of `rollout.engine` with the policy's model; returns it, and the settings that name its address.

    The server reads the policy's directory. A new model is written to a temporary one first.
    """
    client = VLLM if rollout.engine == "vllm" else SGLANG
    if policy.source is not None:
        server = ServerProcess(command, policy.source, client, timeout_s)
    else:
        folder = Path(tempfile.mkdtemp(prefix="burnish-served-"))  # kept: a server may read its files later
        policy.save(folder)
        server = ServerProcess(command, folder, client, timeout_s)
    if rollout.engine == "vllm":
        return server, rollout.model_copy(
            update={"vllm": (rollout.vllm or Vllm()).model_copy(update={"url": server.url})}
        )
    options = rollout.sglang or Sglang()
    return server, rollout.model_copy(update={"sglang": options.model_copy(update={"urls": [server.url]})})
