"""Client side of inference servers (vLLM, SGLang): JSON calls over HTTP with a deadline, and the weight files they read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from torch import Tensor

from burnish.config.errors import UserError, is_server_url
from burnish.core.http import connection_to
from burnish.models.weight_files import FILE_BYTES, METADATA
from burnish.run.checkpoint.saver import keep_in_place
from burnish.run.checkpoint.snapshot import write_file
from burnish.run.checkpoint.tensor_file import TensorBytes, TensorFile

MAX_SHOWN = 400
"""Most characters of a server's error message in ours."""

ErrorKind = Literal["refused", "failed", "unreachable", "late"]


class ServerError(UserError):
    """A call to a server failed. The text names the server, the path and the reason.

    `refused`: the same call will fail again. `failed`: it may work later. `unreachable`: no connection, or it broke. `late`: the
    deadline has passed. `status` is that of the answer; None without one.
    """

    def __init__(
        self, product: str, kind: ErrorKind, url: str, path: str, reason: str, status: int | None = None
    ) -> None:
        super().__init__(f"{product} server {url}, {path}: {reason}")
        self.kind, self.url, self.reason, self.status = kind, url, reason, status


@dataclass(frozen=True)
class ServerClient:
    """Calls to the servers of one product. `option` is the config key of their addresses, `example` an address."""

    product: str
    option: str
    example: str
    connect_s: float

    def check_url(self, url: str) -> str:
        """Return the address of a server without a slash at its end; raise if it is none."""
        if not is_server_url(url):
            raise UserError(f"{self.option}: {url!r} is no address of a server; write it as {self.example}")
        return url.rstrip("/")

    def error(self, kind: ErrorKind, url: str, path: str, reason: str, status: int | None = None) -> ServerError:
        return ServerError(self.product, kind, url, path, reason, status)

    def call(
        self, url: str, path: str, timeout_s: float, body: dict[str, Any] | None = None, method: str | None = None
    ) -> Any:
        """Return the answer at a path within `timeout_s`: parsed JSON, or text. The method is GET, or POST with a body."""
        connection = connection_to(url, timeout_s, self.connect_s)
        try:
            connection.connect()
        except OSError as error:
            raise self.error("unreachable", url, path, _describe(error)) from error
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if data is not None else {}
        try:
            verb = method or ("GET" if data is None else "POST")
            connection.request(verb, urlsplit(url).path + path, data, headers)
            response = connection.getresponse()
            status, answer = response.status, response.read()
        except TimeoutError as error:
            raise self.error("late", url, path, f"no answer within {round(timeout_s, 2):g} s") from error
        except (OSError, HTTPException) as error:
            raise self.error("unreachable", url, path, _describe(error)) from error
        finally:
            connection.close()
        return self._parse(url, path, status, answer)

    def _parse(self, url: str, path: str, status: int, answer: bytes) -> Any:
        text = answer.decode(errors="replace")
        if status >= 300:
            kind: ErrorKind = "failed" if status >= 500 or status in (408, 429) else "refused"
            raise self.error(kind, url, path, f"status {status}: {_error_message(text)}", status)
        if not text.lstrip().startswith(("{", "[")):
            return text
        try:
            return json.loads(text)
        except ValueError as error:
            raise self.error("failed", url, path, f"its answer breaks off after {len(answer)} bytes") from error


def _describe(error: Exception) -> str:
    return f"no answer ({type(error).__name__}: {error})" if str(error) else f"no answer ({type(error).__name__})"


def _error_message(text: str) -> str:
    """The message in the body of an error, in the forms that servers write it; else the whole body."""
    try:
        found: Any = json.loads(text)
    except ValueError:
        found = text
    for key in ("error", "detail", "message"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    message = " ".join(str(found).split()) or "no reason given"
    return message if len(message) <= MAX_SHOWN else message[:MAX_SHOWN] + " ..."


def write_weight_files(folder: Path, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write the safetensors files of a model with their index, each as soon as its tensors have come."""
    folder.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    pending: dict[str, TensorBytes] = {}
    total = size = num_files = 0

    def write_pending() -> None:
        name = f"model-{num_files:05d}.safetensors"
        TensorFile(name, pending, METADATA).write(folder)
        weight_map.update(dict.fromkeys(pending, name))

    for name, tensor in named_tensors:
        item = keep_in_place(tensor.detach())
        if pending and size + item.num_bytes > FILE_BYTES:
            num_files += 1
            write_pending()
            pending, size = {}, 0
        pending[name] = item
        size, total = size + item.num_bytes, total + item.num_bytes
    if not pending:
        raise ValueError("new weights without tensors: a server cannot load them")
    num_files += 1
    write_pending()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_file(folder, "model.safetensors.index.json", [json.dumps(index, indent=1).encode()])
