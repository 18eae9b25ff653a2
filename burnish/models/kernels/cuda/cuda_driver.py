"""CUDA driver calls, and CUDA kernels compiled by NVRTC, which comes with torch.

Compiled kernels are cached on disk, keyed by source and compiler. If NVRTC does not work, or with BURNISH_CUDA_KERNELS=0,
Triton and torch compute the same operations.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import hashlib
import logging
import os
import sys
import threading
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from burnish.models.kernels.device import atomic_file, kernel_cache_dir

logger = logging.getLogger(__name__)

CUDA_KERNELS_VARIABLE = "BURNISH_CUDA_KERNELS"
NVRTC_OPTIONS = ("--gpu-architecture=sm_90a", "-std=c++17")
_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_ELF_MAGIC = b"\x7fELF"
_TENSOR_MAP_TYPES = {torch.bfloat16: 9, torch.float8_e4m3fn: 0}  # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, _UINT8
_SWIZZLE = 3  # CU_TENSOR_MAP_SWIZZLE_128B
_PROMOTION = 3  # CU_TENSOR_MAP_L2_PROMOTION_L2_256B


@cache
def _cuda_library() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def call_driver(name: str, *arguments: Any) -> None:
    """Call a function of the CUDA driver; raise its error message if it fails."""
    code = getattr(_cuda_library(), name)(*arguments)
    if code != 0:
        text = ctypes.c_char_p()
        _cuda_library().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{name} failed: {text.value.decode() if text.value else code}")


_entered = threading.local()


def enter_device(device: int) -> None:
    """Make torch's CUDA context of a device current in this thread, which has none until torch has run in it."""
    if device in getattr(_entered, "devices", ()):
        return
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    call_driver("cuDeviceGet", ctypes.byref(handle), device)
    call_driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
    call_driver("cuCtxSetCurrent", context)
    _entered.devices = {*getattr(_entered, "devices", ()), device}


class CudaKernelsUnavailable(Exception):
    """The CUDA kernels cannot be compiled; the message says why."""


@cache
def nvrtc_library() -> ctypes.CDLL | None:
    """NVRTC of torch's CUDA version; None, with a warning, if it does not work."""
    try:
        return _working_nvrtc()
    except CudaKernelsUnavailable as reason:
        if os.environ.get(CUDA_KERNELS_VARIABLE) != "0":
            logger.warning("no CUDA kernels, torch and Triton compute instead: %s", reason)
        return None


def cuda_kernels_status() -> tuple[bool, str]:
    """Whether kernels can be compiled, and a sentence about it for `burnish doctor`."""
    try:
        _working_nvrtc()
    except CudaKernelsUnavailable as reason:
        return False, str(reason)
    return True, "compiled when first needed"


def _working_nvrtc() -> ctypes.CDLL:
    if os.environ.get(CUDA_KERNELS_VARIABLE) == "0":
        raise CudaKernelsUnavailable(f"{CUDA_KERNELS_VARIABLE}=0")
    major = (torch.version.cuda or "").partition(".")[0]
    name = f"libnvrtc.so.{major}"
    candidates = [path for folder in sys.path for path in glob.glob(f"{folder}/nvidia/*/lib/{name}")]
    for path in (name, *candidates):
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(path)
            break
    else:
        raise CudaKernelsUnavailable(f"there is no {name}, which comes with torch for CUDA")
    try:  # NVRTC also loads without its built-ins library, but then it cannot compile
        compile_source(library, 'extern "C" __global__ void nothing() {}')
    except RuntimeError as error:
        raise CudaKernelsUnavailable(str(error)) from error
    return library


class Kernel:
    """A CUDA kernel on the current device, with `shared_bytes` of dynamic shared memory per block."""

    def __init__(self, source: str, name: str, shared_bytes: int) -> None:
        library = nvrtc_library()
        assert library is not None, "the caller checks nvrtc_library() first"
        enter_device(torch.cuda.current_device())
        path, self.function = _cache_path(library, source), ctypes.c_void_p()
        module = _load_cached(path)
        if module is None:
            binary = compile_source(library, source)
            module = _load_module(binary)
            if path is not None:
                save_cached(path, binary)
        call_driver("cuModuleGetFunction", ctypes.byref(self.function), module, name.encode())
        call_driver("cuFuncSetAttribute", self.function, _SHARED_BYTES, shared_bytes)
        self.shared_bytes = shared_bytes

    def launch(self, blocks: tuple[int, int], threads: int, arguments: list[Any]) -> None:
        """Launch the kernel on torch's current stream."""
        enter_device(torch.cuda.current_device())
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        call_driver(
            "cuLaunchKernel", self.function, *blocks, 1, threads, 1, 1, self.shared_bytes, stream, pointers, None
        )


def _load_module(binary: bytes) -> ctypes.c_void_p:
    module = ctypes.c_void_p()
    call_driver("cuModuleLoadData", ctypes.byref(module), binary)
    return module


def _load_cached(path: Path | None) -> ctypes.c_void_p | None:
    """The module of a cached file; None, with a warning, if it cannot be used."""
    if path is None or not path.is_file():
        return None
    try:
        binary = path.read_bytes()
        if binary.startswith(_ELF_MAGIC):  # the driver would parse anything else as PTX
            return _load_module(binary)
        logger.warning("%s holds no machine code, compiling it again", path)
        return None
    except (OSError, RuntimeError) as error:
        logger.warning("%s cannot be loaded, compiling it again: %s", path, error)
        return None


def _cache_path(library: ctypes.CDLL, source: str) -> Path | None:
    """Path of a source's cached machine code."""
    release = (ctypes.c_int(), ctypes.c_int())
    library.nvrtcVersion(*map(ctypes.byref, release))
    known = "\0".join((source, *NVRTC_OPTIONS, str([part.value for part in release]), torch.version.cuda or ""))
    folder = kernel_cache_dir()
    return folder / f"cuda-{hashlib.sha256(known.encode()).hexdigest()[:32]}.cubin" if folder is not None else None


def save_cached(path: Path, binary: bytes) -> None:
    """Write compiled machine code to the cache; a failure is only a warning."""
    try:
        with atomic_file(path) as draft:
            draft.write_bytes(binary)
    except OSError as error:
        logger.warning("a compiled kernel could not be cached and will be compiled again next time: %s", error)


def compile_source(library: Any, source: str) -> bytes:
    """Compile a CUDA source to machine code (cubin)."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()

    def ask(function: str, *arguments: Any) -> None:
        if code := getattr(library, function)(*arguments):
            library.nvrtcGetErrorString.restype = ctypes.c_char_p
            words = library.nvrtcGetErrorString(code)
            raise RuntimeError(f"{function} failed: {words.decode() if words else code}")

    def text_of(size_of: str, get: str) -> bytes:
        ask(size_of, program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        ask(get, program, text)
        return text.raw

    ask("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    try:
        options = (ctypes.c_char_p * len(NVRTC_OPTIONS))(*(option.encode() for option in NVRTC_OPTIONS))
        try:
            ask("nvrtcCompileProgram", program, len(NVRTC_OPTIONS), options)
        except RuntimeError as error:
            log = text_of("nvrtcGetProgramLogSize", "nvrtcGetProgramLog").rstrip(b"\0").decode(errors="replace")
            raise RuntimeError(f"a CUDA kernel did not compile: {error}\n{log}".rstrip()) from error
        return text_of("nvrtcGetCUBINSize", "nvrtcGetCUBIN")
    finally:
        ask("nvrtcDestroyProgram", ctypes.byref(program))


@lru_cache(maxsize=4096)
def tensor_map(
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzled: bool,
    dtype: torch.dtype = torch.bfloat16,
) -> ctypes.Array[ctypes.c_char]:
    """TMA descriptor of a tensor in bfloat16 or e4m3 and the boxes that are copied.

    Dimensions start with the innermost, which is dense; `strides` of the others are in bytes. Reads outside return 0.
    """
    memory = ctypes.create_string_buffer(128 + 64)
    start = -ctypes.addressof(memory) % 64
    found = (ctypes.c_char * 128).from_buffer(memory, start)  # keeps a reference to `memory`
    rank = len(shape)
    call_driver(
        "cuTensorMapEncodeTiled",
        found,
        _TENSOR_MAP_TYPES[dtype],
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*shape),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,  # not interleaved
        _SWIZZLE if swizzled else 0,
        _PROMOTION,
        0,
    )
    return found
