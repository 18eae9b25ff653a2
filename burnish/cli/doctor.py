"""`burnish doctor`: report what this machine can run and what is missing.

Every row has a mark: `ok`, `--` (an optional feature that is absent, with the command that installs it) or `!!` (something that the core
needs is missing). The exit status is always 0, because this is a report and not a check.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import platform
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import burnish
from burnish.config.errors import UserError
from burnish.config.extras import EXTRAS, install_command
from burnish.config.loading import load
from burnish.config.schema import TrainConfig
from burnish.rewards.code_reward import check_sandbox
from burnish.rewards.lean_reward import lean_prefix

OK, ABSENT, WRONG = "ok", "--", "!!"
GIB = 1024**3
MATMUL_SECONDS = 1.0

# Runs in a child process, because a process cannot return to a namespace that it has left.
LEAVE_NETWORK = "import sys; from burnish.rewards.worker_limits import leave_network; sys.exit(not leave_network())"


class ReportRow(NamedTuple):
    """One line of the report."""

    mark: str
    name: str
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are no options."""


def run(args: argparse.Namespace) -> int:
    wrong = 0
    for section in (python_and_torch, machine, extras, isolation, self_check):
        for row in section():
            print(f"{row.mark}  {row.name:<18} {row.text}", flush=True)
            wrong += row.mark == WRONG
    print(f"\n{wrong} things need attention" if wrong else "\nthe core is ready: try `make train`")
    return 0


def python_and_torch() -> Iterator[ReportRow]:
    """Python, torch with its required version, GPUs, compiled kernels and matmul speed."""
    yield ReportRow(
        OK if sys.version_info >= (3, 11) else WRONG, "python", f"{platform.python_version()} (3.11 or later)"
    )
    asked = required_torch()
    try:
        import torch
    except ImportError as error:
        yield ReportRow(
            WRONG, "torch", f"cannot be imported ({error}); pip install 'torch>={asked}' -c constraints.txt"
        )
        return
    found = tuple(int(n) for n in re.findall(r"\d+", torch.__version__)[:2])
    fits = found >= tuple(int(n) for n in asked.split("."))
    yield ReportRow(OK if fits else WRONG, "torch", f"{torch.__version__} ({asked} or later)")
    yield ReportRow(
        OK, "threads", f"{torch.get_num_threads()} for arithmetic, of {usable_cores()} cores (run.threads sets it)"
    )
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            yield ReportRow(OK, f"gpu {index}", f"{device.name}, {device.total_memory / GIB:.0f} GiB")
            if (device.major, device.minor) == (9, 0):
                from burnish.models.kernels.cuda import cuda_driver as cuda

                has_them, text = cuda.cuda_kernels_status()
                text = text if has_them else f"torch and Triton are used instead: {text}"
                yield ReportRow(OK if has_them else ABSENT, "hopper kernels", text)
    else:
        yield ReportRow(ABSENT, "gpu", "none usable by torch; everything runs on the CPU")
    from burnish.models.kernels.cpu import c_library

    has_kernels, text = c_library.c_kernels_status()
    yield ReportRow(
        OK if has_kernels else ABSENT, "cpu kernels", text if has_kernels else f"torch is used instead: {text}"
    )
    yield ReportRow(OK, "matmul", f"{matmul_gflops():.0f} GFLOP/s in float32, 1024 x 1024, on the CPU")


def machine() -> Iterator[ReportRow]:
    """Memory and disk."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = cgroup_limit()
    note = f", of which this container may use {limit / GIB:.1f}" if limit is not None and limit < total else ""
    yield ReportRow(OK, "memory", f"{total / GIB:.1f} GiB{note}")
    free = shutil.disk_usage(".").free
    enough = free > 5 * GIB
    yield ReportRow(
        OK if enough else WRONG,
        "disk",
        f"{free / GIB:.1f} GiB free here" + ("" if enough else "; checkpoints need more"),
    )


def extras() -> Iterator[ReportRow]:
    """Each extra of the package: its purpose, and how to install it if it is missing."""
    for extra, use in EXTRAS.items():
        missing = [name for name in distributions(extra) if not installed(name)]
        if missing:
            yield ReportRow(ABSENT, f"[{extra}]", f"{use}: {install_command(extra)} (no {', '.join(missing)})")
        else:
            yield ReportRow(OK, f"[{extra}]", use)


def isolation() -> Iterator[ReportRow]:
    """Whether reward workers run without network, and programs of the code reward in a sandbox."""
    if not sys.platform.startswith("linux"):
        yield ReportRow(
            ABSENT, "reward isolation", "network namespaces exist on Linux only: verifiers have network access"
        )
        return
    done = subprocess.run([sys.executable, "-c", LEAVE_NETWORK], capture_output=True, timeout=30, check=False)
    if done.returncode == 0:
        yield ReportRow(OK, "reward isolation", "verifiers run without network (namespaces work here)")
    else:
        yield ReportRow(
            ABSENT,
            "reward isolation",
            "verifiers have network access: no namespaces here (kernel.unprivileged_userns_clone, or the container forbids them)",
        )
    try:
        check_sandbox(is_isolated=True)
        yield ReportRow(OK, "code sandbox", "programs of the code reward run in namespaces, without files or network")
    except UserError as error:
        yield ReportRow(ABSENT, "code sandbox", f"the code reward would not start: {error}")
    yield lean_row()


def lean_row() -> ReportRow:
    """Whether the user's Lean is there."""
    try:
        program = lean_prefix() / "bin/lean"
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (UserError, OSError, subprocess.TimeoutExpired) as error:
        return ReportRow(ABSENT, "lean", str(error))
    return ReportRow(OK, "lean", f"the reward lean runs {done.stdout.strip() or program} in the code sandbox")


def self_check() -> Iterator[ReportRow]:
    """Import every module whose extra is installed, and parse a configuration."""
    started, failed, count = time.perf_counter(), 0, 0
    absent = {name.replace("-", "_") for extra in EXTRAS for name in distributions(extra) if not installed(name)}
    absent |= {"triton"}  # only in torch's GPU builds; its kernels have other implementations elsewhere
    for module in pkgutil.walk_packages(burnish.__path__, "burnish."):
        try:
            importlib.import_module(module.name)
            count += 1
        except Exception as error:  # noqa: BLE001 (the report shows any error)
            if isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] in absent:
                continue  # the row of its extra shows how to install it
            failed += 1
            yield ReportRow(WRONG, "import", f"{module.name}: {type(error).__name__}: {error}")
    if not failed:
        yield ReportRow(OK, "import", f"all {count} modules in {time.perf_counter() - started:.1f} s")
    config = load(TrainConfig, None, ["model.new.num_layers=1", "data.train.task=sort_digits"]).config
    yield ReportRow(OK, "configuration", f"parses; the default algorithm is {config.algorithm.preset}")


def requirements() -> list[str]:
    """The requirements of the package, from its metadata or from pyproject.toml in a checkout."""
    try:
        return metadata.requires("burnish") or []
    except metadata.PackageNotFoundError:
        path = Path(__file__).parents[2] / "pyproject.toml"
        project = tomllib.loads(path.read_text())["project"]
        optional = project["optional-dependencies"].items()
        return project["dependencies"] + [f"{r}; extra == '{extra}'" for extra, rs in optional for r in rs]


def required_torch() -> str:
    """The lowest version of torch that the package allows, as `major.minor`."""
    for requirement in requirements():
        if match := re.match(r"torch>=(\d+\.\d+)", requirement):
            return match[1]
    raise RuntimeError("the package's metadata names no torch")


def distributions(extra: str) -> list[str]:
    """The distributions of an extra."""
    marker = re.compile(rf"""extra == ['"]{re.escape(extra)}['"]""")
    names = (re.match(r"[\w.-]+", r) for r in requirements() if marker.search(r))
    return [match[0] for match in names if match]


def installed(distribution: str) -> bool:
    """Whether a distribution is installed."""
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def usable_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cgroup_limit() -> int | None:
    """The memory limit of the container in bytes, if it has one."""
    path = Path("/sys/fs/cgroup/memory.max")
    text = path.read_text().strip() if path.is_file() else "max"
    return int(text) if text.isdecimal() else None


def matmul_gflops() -> float:
    """Matmul speed, measured for about a second."""
    import torch

    a = torch.randn(1024, 1024)
    a @ a  # warm-up
    count, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < MATMUL_SECONDS:
        a @ a
        count += 1
    return count * 2 * 1024**3 / elapsed / 1e9
