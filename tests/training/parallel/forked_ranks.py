"""Forks the ranks of a process group over gloo, and tells how each of them ended.

The ranks meet in a file, not at a port: a port that was free when it was chosen may be taken when it is bound, and a store at a
port ends with the first rank. The process that forks must have one thread only, since a fork copies no other.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkProcess
from pathlib import Path

from torch import distributed

from burnish.training.parallel.ranks import leave_process_group

FORK = multiprocessing.get_context("fork")


def start_ranks(work: Callable[[int], None], num_ranks: int, folder: Path) -> list[ForkProcess]:
    """Fork ranks that call `work(rank)` in one process group. A rank that fails writes its traceback to `<folder>/<rank>.txt`."""
    num_threads = len(os.listdir("/proc/self/task"))
    assert num_threads == 1, f"{num_threads} threads: a lock that one of them holds would stay locked in every rank"
    processes = [FORK.Process(target=_as_rank, args=(work, rank, num_ranks, folder)) for rank in range(num_ranks)]
    for process in processes:
        process.start()
    return processes


def wait_for_ranks(processes: Sequence[ForkProcess], folder: Path) -> int:
    """Wait for all ranks, and end the others when one fails. Returns 0, or an exit status after writing `<folder>/ended.txt`."""
    failed: dict[int, int] = {}
    for process in processes:
        while process.is_alive():
            process.join(0.2)
            failed = failed or {rank: other.exitcode for rank, other in enumerate(processes) if other.exitcode}
            for other in processes if failed else ():
                other.terminate()
    failed = failed or {rank: other.exitcode for rank, other in enumerate(processes) if other.exitcode}
    # A rank that a signal ends leaves no traceback, and the others only see that a connection was closed.
    if failed:
        (folder / "ended.txt").write_text(f"exit status of the ranks that ended first (negative: signal): {failed}")
    return max(map(abs, failed.values()), default=0)


def _as_rank(work: Callable[[int], None], rank: int, num_ranks: int, folder: Path) -> None:
    faulthandler.enable()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    meeting = f"file://{folder.resolve()}/rendezvous"
    try:
        distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=num_ranks)
        work(rank)
        distributed.barrier()  # no rank closes its connections while another is in a collective
    except BaseException:  # noqa: BLE001 (written down, then the process ends)
        (folder / f"{rank}.txt").write_text(traceback.format_exc())
        os._exit(1)  # the other ranks are in a collective, and notice at once that a connection is closed
    leave_process_group()
