"""Compiling CUDA kernels with a fake NVRTC: error messages, and the cache of compiled kernels."""

from __future__ import annotations

import ctypes
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from burnish.models.kernels.cuda import cuda_driver

CODE = b"\x7fELF machine code"


class Library:
    """A fake NVRTC; `broken` is the error code of its compile call."""

    def __init__(self, broken: int = 0) -> None:
        self.broken, self.compilations = broken, 0
        self.nvrtcGetErrorString = lambda code: f"error {code}".encode()

    def __getattr__(self, name: str) -> Any:
        def answer(*arguments: Any) -> int:
            if name == "nvrtcCompileProgram":
                self.compilations += 1
                return self.broken
            if name.endswith("Size"):
                arguments[-1]._obj.value = len(CODE if "CUBIN" in name else b"line 1: no\0")
            elif name == "nvrtcGetCUBIN":
                ctypes.memmove(arguments[-1], CODE, len(CODE))
            elif name == "nvrtcGetProgramLog":
                ctypes.memmove(arguments[-1], b"line 1: no\0", 11)
            return 0

        return answer


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[bytes]:
    """Machine code in the order of loading; loading code that ends in "bad" fails."""
    found: list[bytes] = []

    def call(name: str, *arguments: Any) -> None:
        if name == "cuModuleLoadData":
            if arguments[1].endswith(b"bad"):
                raise RuntimeError(f"{name} failed: invalid kernel image")
            found.append(arguments[1])

    monkeypatch.setattr(cuda_driver, "call_driver", call)
    monkeypatch.setattr(cuda_driver, "enter_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return found


def kept(folder: Path) -> list[Path]:
    return list((folder / "burnish").glob("*"))


def test_what_is_compiled_is_kept_and_loaded_the_next_time(
    loaded: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library()
    monkeypatch.setattr(cuda_driver, "nvrtc_library", lambda: library)
    for _ in range(2):
        cuda_driver.Kernel("source", "name", 1024)
    assert loaded == [CODE, CODE]
    assert library.compilations == 1
    cuda_driver.Kernel("another", "name", 1024)
    assert library.compilations == 2
    assert len(kept(tmp_path)) == 2


@pytest.mark.parametrize("content", [b"", b"half a fi", b"\x7fELF bad"])
def test_what_was_kept_and_cannot_be_loaded_is_made_anew(
    content: bytes, loaded: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library()
    monkeypatch.setattr(cuda_driver, "nvrtc_library", lambda: library)
    cuda_driver.Kernel("source", "name", 1024)
    (path,) = kept(tmp_path)
    path.write_bytes(content)
    cuda_driver.Kernel("source", "name", 1024)
    assert library.compilations == 2
    assert path.read_bytes() == CODE
    assert loaded == [CODE, CODE]


def test_a_kernel_that_cannot_be_kept_is_used_all_the_same(
    loaded: list[bytes], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError("no space left")

    monkeypatch.setattr(cuda_driver, "nvrtc_library", Library)
    monkeypatch.setattr("tempfile.mkstemp", full)
    with caplog.at_level(logging.WARNING):
        cuda_driver.Kernel("source", "name", 1024)
    assert loaded == [CODE]
    assert "could not be cached and will be compiled again next time: no space left" in caplog.text


def test_what_is_not_compiled_says_what_the_compiler_says() -> None:
    with pytest.raises(
        RuntimeError, match="a CUDA kernel did not compile: nvrtcCompileProgram failed: error 6\nline 1: no"
    ):
        cuda_driver.compile_source(Library(broken=6), "source")


def test_where_there_is_no_compiler_that_works_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def absent(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", absent)
    assert cuda_driver.cuda_kernels_status() == (False, "there is no libnvrtc.so.13, which comes with torch for CUDA")
    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", lambda name: Library(broken=7))
    has_one, text = cuda_driver.cuda_kernels_status()
    assert not has_one
    assert "nvrtcCompileProgram failed: error 7" in text
    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", lambda name: Library())
    assert cuda_driver.cuda_kernels_status() == (True, "compiled when first needed")
    monkeypatch.setenv(cuda_driver.CUDA_KERNELS_VARIABLE, "0")
    assert cuda_driver.cuda_kernels_status() == (False, "BURNISH_CUDA_KERNELS=0")


def test_a_thread_enters_a_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(cuda_driver, "call_driver", lambda name, *arguments: called.append(name))
    monkeypatch.setattr(cuda_driver, "_entered", threading.local())
    once = ["cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"]
    for _ in range(2):
        cuda_driver.enter_device(0)
    assert called == once
    cuda_driver.enter_device(1)
    assert called == 2 * once
    with ThreadPoolExecutor(1) as other:
        other.submit(cuda_driver.enter_device, 0).result()
    assert called == 3 * once
