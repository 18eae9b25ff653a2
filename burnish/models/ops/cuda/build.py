"""CUDA kernels: compiled by NVIDIA's run-time compiler, which comes with torch, and kept for the next time.

A file is known by its source and by what the compiler is. Where there is no such compiler there are no kernels, and the
operations they stand for run instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import hashlib
import logging
import os
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from burnish.models.ops.cpu.build import kept_in
from burnish.models.ops.cuda.driver import call

logger = logging.getLogger(__name__)

OPTIONS = ("--gpu-architecture=sm_90a", "-std=c++17")
_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


@cache
def compiler() -> ctypes.CDLL | None:
    """The run-time compiler of torch's CUDA; None, with a word, where it is not to be found."""
    major = (torch.version.cuda or "").partition(".")[0]
    name = f"libnvrtc.so.{major}"
    beside = [path for folder in sys.path for path in glob.glob(f"{folder}/nvidia/*/lib/{name}")]
    for path in (name, *beside):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(path)
    logger.warning("no %s: kernels that need it are left out, and torch computes instead", name)
    return None


class Kernel:
    """A function of a source on one device; `shared_bytes` of memory for each of its blocks."""

    def __init__(self, source: str, name: str, shared_bytes: int) -> None:
        binary = _binary(source)
        module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        call("cuModuleLoadData", ctypes.byref(module), binary)
        call("cuModuleGetFunction", ctypes.byref(self.function), module, name.encode())
        call("cuFuncSetAttribute", self.function, _SHARED_BYTES, shared_bytes)
        self.shared_bytes = shared_bytes

    def launch(self, blocks: tuple[int, int], threads: int, arguments: list[Any]) -> None:
        """On torch's stream."""
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        call("cuLaunchKernel", self.function, *blocks, 1, threads, 1, 1, self.shared_bytes, stream, pointers, None)


def _binary(source: str) -> bytes:
    """The machine code of a source, kept or compiled."""
    library = compiler()
    assert library is not None, "asked for before a kernel is made"
    release = (ctypes.c_int(), ctypes.c_int())
    library.nvrtcVersion(*map(ctypes.byref, release))
    known = "\0".join((source, *OPTIONS, str([part.value for part in release])))
    folder = kept_in()
    path = folder / f"cuda-{hashlib.sha256(known.encode()).hexdigest()[:32]}.cubin" if folder is not None else None
    if path is not None and path.is_file():
        return path.read_bytes()
    binary = _compiled(library, source)
    if path is not None:
        _keep(path, binary)
    return binary


def _keep(path: Path, binary: bytes) -> None:
    """Under a name of its own first: another process may compile the same, and neither reads half a file."""
    handle, draft = tempfile.mkstemp(suffix=".cubin", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(binary)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        Path(draft).unlink(missing_ok=True)


def _compiled(library: ctypes.CDLL, source: str) -> bytes:
    program, size = ctypes.c_void_p(), ctypes.c_size_t()

    def ask(function: str, *arguments: Any) -> int:
        code: int = getattr(library, function)(*arguments)
        return code

    def text_of(size_of: str, get: str) -> bytes:
        ask(size_of, program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        ask(get, program, text)
        return text.raw

    ask("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    try:
        options = (ctypes.c_char_p * len(OPTIONS))(*(option.encode() for option in OPTIONS))
        if ask("nvrtcCompileProgram", program, len(OPTIONS), options):
            log = text_of("nvrtcGetProgramLogSize", "nvrtcGetProgramLog").decode(errors="replace")
            raise RuntimeError(f"a CUDA kernel was not compiled:\n{log}")
        return text_of("nvrtcGetCUBINSize", "nvrtcGetCUBIN")
    finally:
        ask("nvrtcDestroyProgram", ctypes.byref(program))
