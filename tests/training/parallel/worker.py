"""Runs the cases of a number of ranks: `python -m tests.training.parallel.worker <ranks> <folder>`.

One process imports everything and forks the ranks, which talk through gloo. Each writes what it saw to `<folder>/<rank>.pt`;
meanwhile the first process runs the same cases alone, and writes `<folder>/alone.pt`.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

# Imported once for all ranks: each would take seconds for them.
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

from burnish.training.parallel.distribute import distribute
from burnish.training.parallel.gather import full_parameters
from burnish.training.parallel.join import join, leave
from tests.training.parallel import sessions
from tests.training.parallel.cases import CASES, make_model, parallel_of, train

Record = dict[str, Any]


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
            ranks, model = join(parallel_of(case), on_gpu=False), make_model(case)
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
            distribute(model, ranks, parallel_of(case).offload)
            uncut = all(torch.equal(before[n], p) for n, p in full_parameters(model))
            curve = list(train(case, ranks, model))
            after = {n: p.clone() for n, p in full_parameters(model)}
            held = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
            records[name] = {"curve": curve, "after": after, "comes back": uncut, "held": held, "index": ranks.index}
        if num_ranks == 2:
            name = "sessions"
            sessions.all_of(folder, rank)
    except BaseException:  # noqa: BLE001 -- told to the tests, then this process ends
        (folder / f"{rank}.txt").write_text(f"{name}\n{traceback.format_exc()}")
        os._exit(1)  # the others wait for this one in a collective, and would wait long
    torch.save(records, folder / f"{rank}.pt")
    leave()


def alone(num_ranks: int) -> dict[str, Record]:
    records = {}
    for name, case in CASES[num_ranks].items():
        model = make_model(case)
        curve = list(train(case, model=model))
        after = {n: p.detach() for n, p in model.named_parameters()}
        records[name] = {"curve": curve, "after": after, "held": sum(p.numel() for p in model.parameters())}
    return records


def main(num_ranks: int, folder: Path) -> int:
    torch.set_num_threads(1)
    if num_ranks == 2:
        sessions.prepare(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    children = [fork.Process(target=as_rank, args=(rank, num_ranks, port, folder)) for rank in range(num_ranks)]
    for child in children:
        child.start()
    torch.save(alone(num_ranks), folder / "alone.pt")
    if num_ranks == 2:
        sessions.alone(folder)
    for child in children:
        while child.is_alive():
            child.join(0.2)
            if any(other.exitcode for other in children):
                for other in children:
                    other.terminate()
    failed = max(abs(child.exitcode or 0) for child in children)
    if num_ranks == 2 and not failed:
        sessions.run(folder, sessions.HANDED_OVER, [])
    return failed


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2])))
