"""New weights for servers: a directory of safetensors that they read, labelled, checked, and their prefix caches emptied.

`/update_weights_from_disk` needs a folder that this process writes and the servers read: on one machine any (one in memory,
such as /dev/shm, is fastest), else a shared file system. `/update_weights_from_tensor` takes what SGLang's own serializer
makes of GPU memory on the same machine, so it needs SGLang here.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from burnish.config.errors import UserError
from burnish.models.saving import FILE_BYTES, METADATA
from burnish.rollout.sglang.check import weight_label
from burnish.rollout.sglang.http import ServerError, call
from burnish.run.contents import write_file
from burnish.run.staging import leave
from burnish.run.tensor_file import TensorBytes, TensorFile

UPDATE = "/update_weights_from_disk"
FLUSH_S = 30.0
POLL_S = 0.2


def write_weights(folder: Path, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """The files of a model's weights, in pieces of at most 4 GiB, with an index of them."""
    weight_map: dict[str, str] = {}
    held: dict[str, TensorBytes] = {}
    num_files = num_bytes = total = 0
    folder.mkdir(parents=True)
    for name, tensor in named_tensors:
        item = leave(tensor.detach())
        if held and num_bytes + item.num_bytes > FILE_BYTES:
            _write_file(folder, num_files, held, weight_map)
            held, num_bytes, num_files = {}, 0, num_files + 1
        held[name] = item
        num_bytes, total = num_bytes + item.num_bytes, total + item.num_bytes
    if not held:
        raise ValueError("an SGLang server has weights of its own, and was handed none")
    _write_file(folder, num_files, held, weight_map)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_file(folder, "model.safetensors.index.json", [json.dumps(index, indent=1).encode()])


def _write_file(folder: Path, number: int, held: dict[str, TensorBytes], weight_map: dict[str, str]) -> None:
    name = f"model-{number + 1:05d}.safetensors"
    TensorFile(name, held, METADATA).write(folder)
    weight_map.update(dict.fromkeys(held, name))


def update_server(url: str, folder: Path, label: str, timeout_s: float) -> None:
    """Make a server read the weights in a folder; when this returns it has them, under that label, and an empty cache."""
    body = {"model_path": str(folder), "weight_version": label, "flush_cache": True}
    try:
        answer = call(url, UPDATE, timeout_s, body)
        if not (isinstance(answer, dict) and answer.get("success")):
            raise ServerError("refused", url, UPDATE, f"no success: {answer}")
        flush(url)
        found = weight_label(url)
    except ServerError as error:
        if error.kind == "refused":
            raise UserError(
                f"{error}; the server must be able to read {folder} (rollout.sglang.weights_dir), and serve the policy's model"
            ) from error
        raise
    if found != label:
        raise UserError(f"SGLang server {url} says that it has weights {found!r} after {label!r} were sent to it")


def flush(url: str) -> None:
    """Empty a server's prefix cache; it refuses while it still works on something, such as an aborted request."""
    deadline = time.monotonic() + FLUSH_S
    while True:
        try:
            call(url, "/flush_cache", FLUSH_S, method="POST")
            return
        except ServerError as error:
            if error.kind != "refused" or time.monotonic() > deadline:
                raise
        time.sleep(POLL_S)


def remove(folder: Path) -> None:
    """A folder of weights that no server needs any more."""
    shutil.rmtree(folder, ignore_errors=True)
