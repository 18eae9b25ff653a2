"""`tree_usage` finds every process of a tree, however it was started, with its memory and CPU time."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator

import pytest

from burnish.sandbox import confined_process

MIB = 1 << 20
TAKEN = 60 * MIB

# Prints the pids of its processes, one per line, then waits until its standard input ends.
SYS_EXIT = {"x86_64": 60, "aarch64": 93}.get(platform.machine())
TREE = """
import ctypes, os, sys, threading, time
libc = ctypes.CDLL(None)
libc.prctl(36, 1, 0, 0, 0)  # this process adopts orphans
def say(what): os.write(1, f"{what}\\n".encode())
def wait(): os.read(0, 1)
def take():
    kept = b"x" * TAKEN
    say(os.getpid())
    wait()
def child(work):
    if os.fork() == 0:
        work()
        os._exit(0)
def spin():
    while time.process_time() < 0.3: pass
"""
KINDS = {
    "of the first thread": "child(take)",
    "of another thread": "threading.Thread(target=lambda: (child(take), wait())).start()",
    "of a thread that has ended": "t = threading.Thread(target=child, args=(take,)); t.start(); t.join()",
    "an orphan in a session of its own": "child(lambda: (os.setsid(), child(take)))",
    "whose first thread has ended": "child(lambda: (threading.Thread(target=lambda: (time.sleep(0.1), take())).start(), libc.syscall(SYS_EXIT, 0)))",
    "with a name that looks like a line of figures": "child(lambda: (libc.prctl(15, b') R 1 1\\n1', 0, 0, 0), take()))",
    "with a name that is no text": "child(lambda: (libc.prctl(15, b'\\xff\\xfe', 0, 0, 0), take()))",
}


@pytest.fixture(scope="module")
def processes() -> Iterator[int]:
    descriptor = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


def started(source: str) -> subprocess.Popen[str]:
    source = TREE + f"TAKEN, SYS_EXIT = {TAKEN}, {SYS_EXIT}\n" + source + "\nwait()"
    return subprocess.Popen(
        [sys.executable, "-S", "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_is_counted_with_its_memory(kind: str, processes: int) -> None:
    with started(KINDS[kind]) as tree:
        assert tree.stdout is not None
        number = int(tree.stdout.readline())
        used = confined_process.tree_usage(tree.pid, processes)
        assert number in used.processes
        assert used.memory_bytes > TAKEN
        assert used.tasks >= 2
        assert number not in (tree.pid, os.getpid())
        tree.communicate("")
    assert tree.returncode == 0


def test_cpu_time_of_children_counts_while_they_run_and_after_they_were_waited_for(processes: int) -> None:
    spinning = "def one(): child(lambda: (spin(), say('spun'), wait()))\nthreading.Thread(target=lambda: (one(), one(), wait())).start()\n"
    with started(spinning) as tree:
        assert tree.stdout is not None
        assert [tree.stdout.readline() for _ in range(2)] == ["spun\n"] * 2
        assert confined_process.tree_usage(tree.pid, processes).cpu_s >= 0.5
        tree.communicate("")
    with started("child(spin); os.wait(); say('waited')") as tree:
        assert tree.stdout is not None
        tree.stdout.readline()
        assert confined_process.tree_usage(tree.pid, processes).cpu_s >= 0.25
        tree.communicate("")


def test_a_tree_that_changes_during_the_walk_is_read_again(processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that forks and ends between two reads of one walk: its child is found anyway."""
    hop = "r, w = os.pipe()\nchild(lambda: (say(os.getpid()), os.read(r, 1), child(take)))\n"
    hop += "os.read(0, 1); os.write(w, b'!'); os.wait()"
    with started(hop) as tree:
        assert tree.stdin is not None
        assert tree.stdout is not None
        stdin, stdout = tree.stdin, tree.stdout
        first, heirs = int(stdout.readline()), []
        read = confined_process._read_process

        def meanwhile(number: int, processes: int) -> object:
            if number == first and not heirs:
                stdin.write("!")
                stdin.flush()
                heirs.append(int(stdout.readline()))
            return read(number, processes)

        monkeypatch.setattr(confined_process, "_read_process", meanwhile)
        used = confined_process.tree_usage(tree.pid, processes)
        assert heirs
        assert heirs[0] in used.processes
        assert used.memory_bytes > TAKEN
        tree.communicate("")
