"""Runs the cases of some numbers of ranks: `python -m tests.training.parallel.rank_worker <folder> <number> ...`.

One process imports everything. For each number of ranks it forks a process that forks the ranks. Each rank writes what it saw to
`<folder>/<number>/<rank>.pt`. Meanwhile the process above them runs the same cases alone, and writes `alone.pt`.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

# Imported once for all ranks: each would take seconds for them.
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import transformers.models.qwen3.modeling_qwen3  # noqa: F401

from burnish.training.parallel.fsdp import full_parameters
from burnish.training.parallel.ranks import join_process_group, parallelize_model
from tests.training.parallel import two_rank_runs
from tests.training.parallel.cases import CASES, make_model, parallel_of, train
from tests.training.parallel.forked_ranks import FORK, start_ranks, wait_for_ranks

Record = dict[str, Any]


def run_cases(num_ranks: int, folder: Path, rank: int) -> None:
    """The work of one rank."""
    records: dict[str, Record] = {}
    for name, case in CASES[num_ranks].items():
        try:
            ranks, model = join_process_group(parallel_of(case), on_gpu=False), make_model(case)
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
            parallelize_model(model, ranks, parallel_of(case).offload)
            uncut = all(torch.equal(before[n], p) for n, p in full_parameters(model))
            curve = list(train(case, ranks, model))
            after = {n: p.clone() for n, p in full_parameters(model)}
            held = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
            records[name] = {
                "curve": curve,
                "after": after,
                "comes back": uncut,
                "held": held,
                "index": ranks.data_rank,
            }
        except BaseException as error:
            error.add_note(f"case {name!r} of {num_ranks} ranks")
            raise
    if num_ranks == 2:
        two_rank_runs.all_of(folder, rank)
    torch.save(records, folder / f"{rank}.pt")


def alone(num_ranks: int) -> dict[str, Record]:
    """What one process sees of each case; cases that differ only in how they are divided are one case to it."""
    records: dict[str, Record] = {}
    seen: dict[str, Record] = {}
    for name, case in CASES[num_ranks].items():
        undivided = replace(case, parallel={})
        if repr(undivided) not in seen:
            model = make_model(undivided)
            curve = list(train(undivided, model=model))
            after = {n: p.detach() for n, p in model.named_parameters()}
            held = sum(p.numel() for p in model.parameters())
            embedding = next(p.numel() for n, p in model.named_parameters() if n.endswith("embedding.weight"))
            tower = sum(p.numel() for n, p in model.named_parameters() if "vision." in n)
            sizes = {"held": held, "embedding": embedding, "tower": tower}
            seen[repr(undivided)] = {"curve": curve, "after": after, **sizes}
        records[name] = seen[repr(undivided)]
    return records


def run(num_ranks: int, folder: Path) -> None:
    """All cases with so many ranks; ends the process with a status other than 0 if a rank failed."""
    torch.set_num_threads(1)
    folder.mkdir()
    if num_ranks == 2:  # in a fork: it starts threads
        preparing = FORK.Process(target=two_rank_runs.prepare, args=(folder,))
        preparing.start()
        preparing.join()
        assert preparing.exitcode == 0
    children = start_ranks(partial(run_cases, num_ranks, folder), num_ranks, folder)
    torch.save(alone(num_ranks), folder / "alone.pt")
    if num_ranks == 2:
        two_rank_runs.alone(folder)
    failed = wait_for_ranks(children, folder)
    if num_ranks == 2 and not failed:
        two_rank_runs.end_alone(folder)
    sys.exit(failed)


def main(folder: Path, numbers: Sequence[int]) -> int:
    gc.freeze()  # a collection in a fork would copy every page it looks at
    failed = 0
    for num_ranks in numbers:
        child = FORK.Process(target=run, args=(num_ranks, folder / str(num_ranks)))
        child.start()
        child.join()
        failed = failed or abs(child.exitcode or 0)
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [int(number) for number in sys.argv[2:]]))
