"""FSDP2 on a GPU, as far as one shows it: a group of one, parameters on the device, offloaded to the host, and read after the division.

The work is done in a process of its own (`python -m tests.training.parallel.test_fsdp_gpu`), which joins a group over NCCL.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from burnish.config.model import Optimizer
from burnish.config.placement import Parallel
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, initialise
from burnish.models.weight_files import defer_decoder, load_deferred, save_decoder
from burnish.training.learner import Learner
from burnish.training.parallel.fsdp import apply_fsdp, full_parameters
from burnish.training.parallel.ranks import SOLO, Ranks, join_process_group, leave_process_group
from tests.training.parallel.cases import LOSSES, Case, make_batch

WAYS = ("alone", "cut", "offloaded", "read", "read and offloaded")
DTYPES = ("float32", "bfloat16")
STEPS = 3


def curve(way: str, dtype: str, ranks: Ranks, folder: Path) -> dict[str, Any]:
    model = Decoder(Architecture("qwen3", 256, 128, 2, 4, 2, 32, 256, 64, qk_norm=True))
    initialise(model, 0, std=0.1)
    model.to(getattr(torch, dtype))
    if way == "alone":
        model.to("cuda")
    else:
        assert ranks.mesh is not None
        if way.startswith("read"):
            save_decoder(model, folder, None)
            model = defer_decoder(folder, getattr(torch, dtype))
        apply_fsdp(model, ranks.mesh.fsdp, offload=way.endswith("offloaded"))
        if way.startswith("read"):
            load_deferred(model, torch.device("cpu" if way.endswith("offloaded") else "cuda"))
    learner = Learner(model, Optimizer(lr=1e-3), 10, token_budget=64, ranks=SOLO if way == "alone" else ranks)
    case = Case("grpo", sizes=(3, 2, 4))
    losses = []
    for step in range(STEPS):
        batch = make_batch(case, step).to("cuda")
        learner.logprobs(batch)
        losses.append(learner.update(batch, LOSSES["grpo"]).stats["loss"])
    where = {p.device.type for p in model.parameters()}
    total = sum(float(p.double().abs().sum()) for _, p in full_parameters(model))
    return {"losses": losses, "where": sorted(where), "total": total}


def main() -> None:
    ranks = join_process_group(Parallel(), on_gpu=True)
    with TemporaryDirectory() as folder:
        found = {dtype: {way: curve(way, dtype, ranks, Path(folder) / dtype / way) for way in WAYS} for dtype in DTYPES}
    print(json.dumps(found))
    leave_process_group()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_group_of_one_trains_as_without_one() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.training.parallel.test_fsdp_gpu"],
        cwd=Path(__file__).parents[3],
        env=os.environ | place,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    for dtype, abs_ in (("float32", 1e-4), ("bfloat16", 5e-3)):
        alone = found[dtype]["alone"]
        assert [found[dtype][way]["where"] for way in WAYS] == [["cuda"], ["cuda"], ["cpu"], ["cuda"], ["cpu"]]
        for other in (found[dtype][way] for way in WAYS):
            assert other["losses"] == pytest.approx(alone["losses"], abs=abs_)
            assert other["total"] == pytest.approx(alone["total"], rel=1e-3)


if __name__ == "__main__":
    main()
