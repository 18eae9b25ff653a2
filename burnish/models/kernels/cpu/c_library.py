"""The C kernel library: compiled by the machine's C compiler on first use and cached on disk.

The sources use the compiler's vector extension, so one source gives SSE, AVX2, AVX-512 and NEON code. The library is compiled
for this processor, so the cache key has the sources, the compiler, its flags and the processor. Without a
compiler, or with BURNISH_CPU_KERNELS=0, the equivalent torch operations run.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from burnish.models.kernels.device import atomic_file, kernel_cache_dir

logger = logging.getLogger(__name__)

C_KERNELS_VARIABLE = "BURNISH_CPU_KERNELS"
FOLDER = Path(__file__).parent
FLAGS = (
    "-O3",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-std=gnu11",
)
COMPILE_SECONDS = 120


class CKernelsUnavailable(Exception):
    """The C kernels cannot be used; the message says why."""


ARITHMETIC_TYPES = (torch.float32, torch.float64)
STORED_TYPES = (*ARITHMETIC_TYPES, torch.bfloat16)
"""Types of tensors whose operations widen bfloat16 to float32."""


def c_kernels(x: Tensor, *others: Tensor, stored_in: tuple[torch.dtype, ...] = ARITHMETIC_TYPES) -> ctypes.CDLL | None:
    """The kernel library for an operation on these tensors; None if torch must compute it.

    All tensors must be plain CPU tensors of the same dtype, float32 or float64 or what the operation can read (`stored_in`).
    """
    if x.device.type != "cpu" or x.dtype not in stored_in or type(x) not in (Tensor, Parameter):
        return None
    if torch.compiler.is_compiling():  # torch.compile fuses the torch implementation
        return None
    if any(
        (other.dtype, other.device) != (x.dtype, x.device) or type(other) not in (Tensor, Parameter) for other in others
    ):
        return None
    return _library(x.dtype == torch.float64)


def prepare_c_kernels(dtype: torch.dtype) -> None:
    """Compile or load the library for models of this dtype, in a thread beside other work of a start. bfloat16 models use the float32 one."""
    if dtype in (torch.float32, torch.float64, torch.bfloat16):
        _library(dtype == torch.float64)


def c_kernels_expected() -> bool:
    """Whether the kernels will be available, for the memory planner. Nothing is compiled to find out."""
    if _has_failed:
        return False
    try:
        _compiler()
    except CKernelsUnavailable:
        return False
    return True


def address(x: Tensor | None) -> ctypes.c_void_p:
    """A tensor's data pointer as a C argument; NULL for None."""
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def c_kernels_status() -> tuple[bool, str]:
    """Whether the kernels are available, and a sentence about them for `burnish doctor`."""
    try:
        found = _load(False)
    except CKernelsUnavailable as reason:
        return False, str(reason)
    tiles = ", with matrix tiles (AMX)" if found.has_tiles() else ""
    threads = "on the threads of torch" if found.has_threads else "on one thread"
    return True, f"compiled for this processor{tiles}, {threads}"


def num_threads() -> int:
    """Threads of the next call: torch's number, but one in a forked child, since a fork does not copy threads."""
    return 1 if _is_forked else torch.get_num_threads()


_has_failed = False
"""Whether loading the kernels was tried and failed."""


@cache
def _library(is_double: bool) -> ctypes.CDLL | None:
    global _has_failed
    try:
        return _load(is_double)
    except CKernelsUnavailable as reason:
        _has_failed = True
        if os.environ.get(C_KERNELS_VARIABLE) != "0":
            logger.warning("no C kernels, torch computes instead: %s", reason)
        return None


class _KernelLibrary(ctypes.CDLL):
    has_threads = False


@cache
def _load(is_double: bool) -> _KernelLibrary:
    compiler = _compiler()
    flags = (*FLAGS, target_flag(), *(["-DWIDE"] if is_double else []))
    name = f"kernels-{_digest(compiler, flags)}.so"
    folder = kernel_cache_dir()
    try:
        if folder is None:
            with tempfile.TemporaryDirectory() as temporary:  # the file is not needed once loaded
                return _open_library(_compile(compiler, flags, Path(temporary) / name))
        path = folder / name
        if path.is_file():
            with contextlib.suppress(CKernelsUnavailable):  # `_open_library` deletes a file that it cannot load
                return _open_library(path)
        return _open_library(_compile(compiler, flags, path))
    except OSError as error:
        raise CKernelsUnavailable(f"the compiled C library cannot be written: {error}") from error


def target_flag() -> str:
    """The compiler's flag for this processor, with all of its vector instructions."""
    return "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"


def _compiler() -> list[str]:
    """The command of the C compiler: CC if it is set, else cc, gcc or clang."""
    if os.environ.get(C_KERNELS_VARIABLE) == "0":
        raise CKernelsUnavailable(f"{C_KERNELS_VARIABLE}=0")
    if sys.platform == "win32":
        raise CKernelsUnavailable("the C kernels do not support Windows")
    named = os.environ.get("CC")
    for command in [shlex.split(named)] if named else [["cc"], ["gcc"], ["clang"]]:
        if command and shutil.which(command[0]):
            return command
    raise CKernelsUnavailable(
        f"CC={named} is not a program on this machine" if named else "there is no C compiler (cc, gcc or clang)"
    )


def _digest(compiler: list[str], flags: tuple[str, ...]) -> str:
    """Hash of everything that the compiled library depends on."""
    digest = hashlib.sha256("\0".join((*compiler, *flags, _processor(), _run([*compiler, "--version"]))).encode())
    for path in _sources("*.[ch]"):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]


def _processor() -> str:
    """The processor and its features, which `-march=native` compiles for."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    wanted = ("model name", "flags", "features", "cpu part")
    known = dict.fromkeys(line for line in lines if line.lower().startswith(wanted))
    return "\n".join([platform.machine(), platform.processor(), *known])


def _sources(pattern: str) -> list[Path]:
    return sorted(FOLDER.glob(pattern))


def _compile(compiler: list[str], flags: tuple[str, ...], path: Path) -> Path:
    with atomic_file(path) as temporary:
        _run([*compiler, *flags, "-o", str(temporary), *map(str, _sources("*.c")), "-lm"])
        temporary.chmod(0o700)
    return path


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CKernelsUnavailable(f"{command[0]} did not run: {error}") from error
    if done.returncode:
        raise CKernelsUnavailable(
            f"{shlex.join(command)} failed with {done.returncode}:\n{done.stderr[-2000:] or done.stdout[-2000:]}"
        )
    return done.stdout


def _open_library(path: Path) -> _KernelLibrary:
    try:
        library = _KernelLibrary(str(path))
        use_threads = library.use_threads
    except (OSError, AttributeError) as error:
        path.unlink(missing_ok=True)  # otherwise the next start would find it again
        raise CKernelsUnavailable(f"the compiled C library cannot be loaded: {error}") from error
    openmp = _openmp()
    if openmp is not None:
        use_threads(openmp.GOMP_parallel, openmp.omp_get_thread_num)
        library.has_threads = True
    return library


def _openmp() -> ctypes.CDLL | None:
    """The OpenMP library that torch loaded; None if it cannot be identified."""
    path = Path("/proc/self/maps")
    lines = path.read_text().splitlines() if path.is_file() else []
    loaded = {match[1] for line in lines if (match := re.search(r"(/.*/lib[gi]?omp[^/]*\.so[^/]*)$", line))}
    of_torch = {name for name in loaded if str(Path(torch.__file__).parent) in name}
    for name in of_torch or (loaded if len(loaded) == 1 else ()):
        try:
            library = ctypes.CDLL(name)
        except OSError:  # the file was moved or deleted since: run on one thread, which `burnish doctor` reports
            continue
        if hasattr(library, "GOMP_parallel") and hasattr(library, "omp_get_thread_num"):
            return library
    return None


_is_forked = False


def _mark_forked() -> None:
    global _is_forked
    _is_forked = True


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_mark_forked)
