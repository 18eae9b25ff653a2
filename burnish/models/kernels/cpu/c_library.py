"""The C kernels: compiled by the machine's own compiler when first needed, kept for the next time.

Compiled for this very processor, so a file is known by its sources, the compiler, its flags and the processor. Without a
compiler, or with BURNISH_CPU_KERNELS=0, there are none, and the operations in torch run, of which these are twins.
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
    """Why there are no kernels."""


def c_kernels(x: Tensor, *beside: Tensor) -> ctypes.CDLL | None:
    """The kernels for a tensor and those it is computed with, all of one type; None where torch computes."""
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64) or type(x) not in (Tensor, Parameter):
        return None
    if torch.compiler.is_compiling():  # it reads what is in torch, and makes one of it
        return None
    if any(
        (other.dtype, other.device) != (x.dtype, x.device) or type(other) not in (Tensor, Parameter) for other in beside
    ):
        return None
    return _library(x.dtype == torch.float64)


def c_kernels_expected() -> bool:
    """Whether there will be kernels, for who plans ahead: nothing is compiled for the answer."""
    if _has_failed:
        return False
    try:
        _compiler()
    except CKernelsUnavailable:
        return False
    return True


def address(x: Tensor | None) -> ctypes.c_void_p:
    """Where a tensor's first number is, as an argument."""
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def c_kernels_status() -> tuple[bool, str]:
    """Whether the kernels are there, and what to say of them."""
    try:
        found = _load(False)
    except CKernelsUnavailable as reason:
        return False, str(reason)
    return True, f"compiled for this processor, {'on the threads of torch' if found.has_threads else 'on one thread'}"


def num_threads() -> int:
    """Threads of the next call: those of torch; in a forked child one, since the others were not copied."""
    return 1 if _is_forked else torch.get_num_threads()


_has_failed = False
"""Whether they were asked for, and there are none."""


@cache
def _library(is_wide: bool) -> ctypes.CDLL | None:
    global _has_failed
    try:
        return _load(is_wide)
    except CKernelsUnavailable as reason:
        _has_failed = True
        if os.environ.get(C_KERNELS_VARIABLE) != "0":
            logger.warning("no C kernels, torch computes instead: %s", reason)
        return None


class _KernelLibrary(ctypes.CDLL):
    has_threads = False


@cache
def _load(is_wide: bool) -> _KernelLibrary:
    compiler = _compiler()
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    flags = (*FLAGS, native, *(["-DWIDE"] if is_wide else []))
    name = f"kernels-{_digest(compiler, flags)}.so"
    folder = kernel_cache_dir()
    try:
        if folder is None:
            with tempfile.TemporaryDirectory() as temporary:  # once loaded, it is not needed
                return _open_library(_compile(compiler, flags, Path(temporary) / name))
        path = folder / name
        if path.is_file():
            with contextlib.suppress(CKernelsUnavailable):  # one that cannot be loaded is gone now, and made anew
                return _open_library(path)
        return _open_library(_compile(compiler, flags, path))
    except OSError as error:
        raise CKernelsUnavailable(f"what the C compiler makes cannot be written: {error}") from error


def _compiler() -> list[str]:
    """The command of a C compiler: CC, if that is set."""
    if os.environ.get(C_KERNELS_VARIABLE) == "0":
        raise CKernelsUnavailable(f"{C_KERNELS_VARIABLE}=0")
    if sys.platform == "win32":
        raise CKernelsUnavailable("they are not for Windows")
    named = os.environ.get("CC")
    for command in [shlex.split(named)] if named else [["cc"], ["gcc"], ["clang"]]:
        if command and shutil.which(command[0]):
            return command
    raise CKernelsUnavailable(
        f"CC={named} is no program here" if named else "there is no C compiler (cc, gcc or clang)"
    )


def _digest(compiler: list[str], flags: tuple[str, ...]) -> str:
    """What a compiled file depends on, as a name."""
    digest = hashlib.sha256("\0".join((*compiler, *flags, _processor(), _run([*compiler, "--version"]))).encode())
    for path in _sources("*.[ch]"):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]


def _processor() -> str:
    """The processor with all it can do: `native` means this one."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    wanted = ("model name", "flags", "features", "cpu part")
    known = dict.fromkeys(line for line in lines if line.lower().startswith(wanted))
    return "\n".join([platform.machine(), platform.processor(), *known])


def _sources(pattern: str) -> list[Path]:
    return sorted(FOLDER.glob(pattern))


def _compile(compiler: list[str], flags: tuple[str, ...], path: Path) -> Path:
    with atomic_file(path) as draft:
        _run([*compiler, *flags, "-o", str(draft), *map(str, _sources("*.c")), "-lm"])
        draft.chmod(0o700)
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
        path.unlink(missing_ok=True)  # it would be found again next time
        raise CKernelsUnavailable(f"what the C compiler made cannot be loaded: {error}") from error
    openmp = _openmp()
    if openmp is not None:
        use_threads(openmp.GOMP_parallel, openmp.omp_get_thread_num)
        library.has_threads = True
    return library


def _openmp() -> ctypes.CDLL | None:
    """The library of threads that torch loaded; None where it cannot be told which that is."""
    path = Path("/proc/self/maps")
    lines = path.read_text().splitlines() if path.is_file() else []
    loaded = {match[1] for line in lines if (match := re.search(r"(/.*/lib[gi]?omp[^/]*\.so[^/]*)$", line))}
    near = {name for name in loaded if str(Path(torch.__file__).parent) in name}
    for name in near or (loaded if len(loaded) == 1 else ()):
        try:
            library = ctypes.CDLL(name)
        except OSError:  # its file was moved or deleted since: one thread, and the doctor says so
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
