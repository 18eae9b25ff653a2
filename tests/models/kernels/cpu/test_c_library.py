"""Compiling the C kernels: the cache, and the behaviour if they cannot be compiled, loaded or cached."""

from __future__ import annotations

import logging
import os
import shlex
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from burnish.models.kernels.cpu import c_library
from burnish.models.kernels.device import kernel_cache_dir
from burnish.models.kernels.elementwise import swiglu

CHECK = """
import torch
from burnish.models.kernels.cpu import c_library as build
from burnish.models.kernels.elementwise import swiglu
x = torch.randn(40, 64)
with torch.no_grad():
    print(build.c_kernels_status()[0], torch.allclose(swiglu(x), torch.nn.functional.silu(x[:, :32]) * x[:, 32:], atol=1e-6))
"""

pytestmark = pytest.mark.skipif(not c_library.c_kernels_expected(), reason="no C compiler here")

COMPILER = """
case "$*" in *--version) exec {cc} "$@" ;; esac
for word; do
    shift
    [ "$word" = -O3 ] && word=-O0
    [ "$before" = -o ] && made=$word || asked="$asked $word"
    before=$word
    set -- "$@" "$word"
done
kept={folder}/$(echo "$asked" | cksum | tr ' ' -).so
[ -e "$kept" ] || {{ {cc} "$@" && cp "$made" "$kept"; }} && cp "$kept" "$made"
"""


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The machine's compiler without optimisation and with a cache for the same command, which saves a few seconds per test."""
    folder = tmp_path_factory.mktemp("compiler")
    return program(folder, COMPILER.format(cc=shlex.join(c_library._compiler()), folder=folder))


@pytest.fixture
def anew(compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache directory, with no kernels loaded."""
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(c_library, "_has_failed", False)
    for function in (c_library._load, c_library._library):
        function.cache_clear()
    yield tmp_path / "burnish"
    for function in (c_library._load, c_library._library):
        function.cache_clear()


def program(folder: Path, text: str) -> str:
    path = folder / "cc"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return str(path)


def test_what_was_compiled_is_kept_for_its_owner_alone_and_found_again(
    anew: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert c_library.c_kernels(torch.empty(0)) is not None
    (kept,) = anew.iterdir()
    assert stat.S_IMODE(anew.stat().st_mode) == 0o700
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    before = kept.stat().st_mtime_ns
    c_library._load.cache_clear()
    monkeypatch.setattr(c_library, "_compile", lambda *_: pytest.fail("compiled again"))
    c_library._load(False)
    assert kept.stat().st_mtime_ns == before


def test_a_full_disk_and_a_user_without_a_home_leave_it_to_torch(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("tempfile.mkstemp", full)
        assert c_library.c_kernels(torch.empty(0)) is None

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", nobody)
    assert kernel_cache_dir() is None


def test_other_flags_or_types_are_other_files(anew: Path) -> None:
    cc = c_library._compiler()
    assert (
        c_library._digest(cc, ("-O1",)) != c_library._digest(cc, ("-O2",)) != c_library._digest([*cc, "-g"], ("-O2",))
    )
    assert c_library.c_kernels(torch.empty(0)) is not None
    assert c_library.c_kernels(torch.empty(0, dtype=torch.float64)) is not None
    assert len(list(anew.iterdir())) == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("echo 'no such flag' >&2; exit 3", "no such flag"),
        ('[ "$1" = --version ] && exit; while [ "$1" != -o ]; do shift; done; echo rubbish > "$2"', "cannot be loaded"),
    ],
)
def test_a_compiler_that_fails_is_said_once_and_torch_computes(
    text: str, says: str, anew: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", program(tmp_path, text))
    x = torch.randn(3, 8)
    with caplog.at_level(logging.WARNING), torch.no_grad():
        for _ in range(2):
            assert torch.allclose(swiglu(x), torch.nn.functional.silu(x[:, :4]) * x[:, 4:])
    assert len(caplog.records) == 1
    assert says in caplog.text
    assert not list(anew.glob("*.so"))
    assert not c_library.c_kernels_status()[0]
    assert not c_library.c_kernels_expected()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("CC", "/nonexistent", "CC=/nonexistent"),
        (c_library.C_KERNELS_VARIABLE, "0", f"{c_library.C_KERNELS_VARIABLE}=0"),
    ],
)
def test_without_kernels_the_reason_is_known(
    name: str, value: str, says: str, anew: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING):
        assert c_library.c_kernels(torch.empty(0)) is None
    assert says in c_library.c_kernels_status()[1]
    assert not c_library.c_kernels_expected()
    assert bool(caplog.records) == (name == "CC")  # no warning if the user disabled them


def test_a_folder_that_cannot_be_written_or_is_not_ours_alone_is_not_used(
    anew: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    anew.mkdir(mode=0o777)
    anew.chmod(0o777)
    assert c_library.c_kernels(torch.empty(0)) is not None
    assert not list(anew.iterdir())
    anew.rmdir()
    anew.write_text("a file")
    c_library._load.cache_clear()
    c_library._load(False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nobody")
    c_library._load.cache_clear()
    c_library._load(False)


def in_processes(count: int, folder: Path, cc: str, code: str = CHECK) -> list[str]:
    environment = os.environ | {"XDG_CACHE_HOME": str(folder), "PYTHONPATH": os.pathsep.join(sys.path), "CC": cc}
    started = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    return [process.communicate(timeout=300)[0].strip() for process in started]


def test_two_processes_may_compile_at_once(compiler: str, tmp_path: Path) -> None:
    """Both processes start before either has a library to load."""
    wait = f': > {tmp_path}/began.$$; while [ "$(ls {tmp_path}/began.* | wc -l)" -lt 2 ]; do sleep 0.05; done'
    cc = program(tmp_path, f'[ "$1" = --version ] || {{ {wait}; }}; exec {compiler} "$@"')
    assert in_processes(2, tmp_path, cc) == ["True True"] * 2
    assert len(list((tmp_path / "burnish").iterdir())) == 1


def test_a_kept_file_that_cannot_be_loaded_is_made_anew(compiler: str, anew: Path, tmp_path: Path) -> None:
    assert c_library.c_kernels(torch.empty(0)) is not None
    (known,) = anew.iterdir()
    kept = tmp_path / "other" / "burnish" / known.name  # this process would not open the same path again
    kept.parent.mkdir(mode=0o700, parents=True)
    kept.touch()
    assert in_processes(1, tmp_path / "other", compiler) == ["True True"]
    assert kept.stat().st_size > 0


def test_a_forked_child_computes_on_its_own_thread(compiler: str, tmp_path: Path) -> None:
    """A fork does not copy other threads: a child that waited for them would wait for ever, as torch's own operations do."""
    code = """
import os, torch
torch.set_num_threads(2)
from burnish.models.kernels.cpu import c_library as build
from burnish.models.kernels.elementwise import swiglu
x = torch.randn(4000, 512)
with torch.no_grad():
    here = swiglu(x).numpy().tobytes()
    child = os.fork()
    if not child:
        os._exit(0 if build.num_threads() == 1 and swiglu(x).numpy().tobytes() == here else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert in_processes(1, tmp_path, compiler, code) == ["0"]


def test_the_threads_are_those_of_torch() -> None:
    assert c_library._load(False).has_threads
    assert c_library.num_threads() == torch.get_num_threads()


def test_numbers_of_two_types_or_places_are_torchs_to_compute() -> None:
    x, weight = torch.randn(3, 8), torch.randn(8, dtype=torch.float64)
    assert c_library.c_kernels(x, weight) is None
    assert c_library.c_kernels(x, torch.empty(8, device="meta")) is None
    assert c_library.c_kernels(x, weight.float()) is c_library.c_kernels(x)
