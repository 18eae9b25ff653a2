"""Runs the cases of every number of ranks: `python -m tests.training.parallel.rank_worker <folder>`.

One process imports everything; for each number of ranks it forks one that forks the ranks, which talk through gloo. Each
writes what it saw to `<folder>/<number>/<rank>.pt`; meanwhile the process above them runs the same cases alone, and writes
`alone.pt` beside.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

# Imported once for all ranks: each would take seconds for them.
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

from burnish.training.parallel.fsdp import full_parameters
from burnish.training.parallel.ranks import join_process_group, leave_process_group, parallelize_model
from tests.training.parallel import two_rank_runs
from tests.training.parallel.cases import CASES, make_model, parallel_of, train

Record = dict[str, Any]
FORK = multiprocessing.get_context("fork")


def as_rank(rank: int, num_ranks: int, port: int, folder: Path) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    records: dict[str, Record] = {}
    try:
        for name, case in CASES[num_ranks].items():
            ranks, model = join_process_group(parallel_of(case), on_gpu=False), make_model(case)
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
            parallelize_model(model, ranks, parallel_of(case).offload)
            uncut = all(torch.equal(before[n], p) for n, p in full_parameters(model))
            curve = list(train(case, ranks, model))
            after = {n: p.clone() for n, p in full_parameters(model)}
            held = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
            records[name] = {"curve": curve, "after": after, "comes back": uncut, "held": held, "index": ranks.index}
        if num_ranks == 2:
            name = "sessions"
            two_rank_runs.all_of(folder, rank)
    except BaseException:  # noqa: BLE001 -- told to the tests, then this process ends
        (folder / f"{rank}.txt").write_text(f"{name}\n{traceback.format_exc()}")
        os._exit(1)  # the others wait for this one in a collective, and would wait long
    torch.save(records, folder / f"{rank}.pt")
    leave_process_group()


def alone(num_ranks: int) -> dict[str, Record]:
    """What one process sees of each case; cases that differ in how they are divided are one case to it."""
    records: dict[str, Record] = {}
    seen: dict[str, Record] = {}
    for name, case in CASES[num_ranks].items():
        undivided = replace(case, parallel={})
        if repr(undivided) not in seen:
            model = make_model(undivided)
            curve = list(train(undivided, model=model))
            after = {n: p.detach() for n, p in model.named_parameters()}
            held = sum(p.numel() for p in model.parameters())
            seen[repr(undivided)] = {"curve": curve, "after": after, "held": held}
        records[name] = seen[repr(undivided)]
    return records


def run(num_ranks: int, folder: Path) -> None:
    """All there is to do with so many ranks; ends the process with a status other than 0 if a rank failed."""
    torch.set_num_threads(1)
    folder.mkdir()
    if num_ranks == 2:
        two_rank_runs.prepare(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = [FORK.Process(target=as_rank, args=(rank, num_ranks, port, folder)) for rank in range(num_ranks)]
    for child in children:
        child.start()
    torch.save(alone(num_ranks), folder / "alone.pt")
    if num_ranks == 2:
        two_rank_runs.alone(folder)
    for child in children:
        while child.is_alive():
            child.join(0.2)
            if any(other.exitcode for other in children):
                for other in children:
                    other.terminate()
    failed = max(abs(child.exitcode or 0) for child in children)
    if num_ranks == 2 and not failed:
        two_rank_runs.run(folder, two_rank_runs.HANDED_OVER, [])
    sys.exit(failed)


def main(folder: Path) -> int:
    gc.freeze()  # a collection in a fork would copy every page it looks at
    failed = 0
    for num_ranks in CASES:
        child = FORK.Process(target=run, args=(num_ranks, folder / str(num_ranks)))
        child.start()
        child.join()
        failed = failed or abs(child.exitcode or 0)
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
