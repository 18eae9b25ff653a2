"""The parallel engine on a GPU: NCCL inside the CUDA graphs of decode steps, with one rank, against the paged engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from burnish.inference.native.paged_engine import PagedEngine
from burnish.inference.native.parallel_decoder import EngineRanks, join_engine_ranks, parallel_decoder_of
from burnish.inference.native.parallel_engine import ParallelEngine
from burnish.models.expert_shape import ExpertShape

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SIZES = {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "mlp_size": 128}


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[EngineRanks]:
    from torch import distributed

    meeting = f"file://{tmp_path}/rendezvous"
    distributed.init_process_group("cpu:gloo,cuda:nccl", init_method=meeting, rank=0, world_size=1)
    yield join_engine_ranks(on_gpu=True)
    distributed.destroy_process_group()


@pytest.mark.parametrize("options", [{}, {"qk_norm": True, "experts": ExpertShape(8, 2, 64)}], ids=["dense", "experts"])
def test_decode_steps_with_collectives_are_captured_and_sample_the_same_tokens(
    ranks: EngineRanks, options: dict[str, Any], tools: Any, native: Any
) -> None:
    model = tools.decoder(torch.float32, **SIZES, **options).cuda()
    wanted = native.mixed_requests()
    engine = ParallelEngine(parallel_decoder_of(model, ranks), 4)
    several, one = (tools.run(made, wanted) for made in (engine, PagedEngine(model, 4)))
    assert engine.stats.graphs > 0
    for name, completion in one.items():
        assert several[name].tokens.tolist() == completion.tokens.tolist(), name
        np.testing.assert_allclose(several[name].logp, completion.logp, atol=1e-4)
