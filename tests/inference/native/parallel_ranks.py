"""Runs engines of several ranks beside an engine of one: `python -m tests.inference.native.parallel_ranks <ranks> <folder>`.

Rank 0 runs the same requests on both, and writes the completions of each case to `<folder>/results.pt`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from burnish.config.errors import UserError
from burnish.config.model import Lora
from burnish.config.rollout import Speculation
from burnish.core.engine import Completion, Engine, Request
from burnish.core.pictures import Picture, PictureSpan
from burnish.inference.native.paged_engine import PagedEngine
from burnish.inference.native.parallel_decoder import EngineRanks, join_engine_ranks, parallel_decoder_of, rank_part
from burnish.inference.native.parallel_engine import ParallelEngine, ParallelFollower
from burnish.models.decoder import Decoder
from burnish.models.expert_shape import ExpertShape
from burnish.models.latent_shape import LatentShape
from burnish.models.lora.adapters import adapter_weights, add_lora
from burnish.models.vision.axis_rotation import AxisRotation
from burnish.models.vision.qwen_shape import QwenVisionShape
from tests.inference.native.conftest import mixed_requests
from tests.tiny_engines import decoder, requests, run
from tests.training.parallel.forked_ranks import start_ranks, wait_for_ranks

GEMMA = {"out_norms": True, "window": 5, "local_layers": (True, False), "local_theta": 500.0, "qk_norm": True,
         "activation": "gelu_tanh", "norm_shift": 1.0, "scaled_embedding": True, "query_scale": 1.3}  # fmt: skip
EXPERTS = {"family": "qwen3_moe", "experts": ExpertShape(8, 3, 16, layers=(True, False))}
LATENT = {"family": "deepseek_v3", "num_kv_heads": 4, "head_dim": 12, "latent": LatentShape(10, 6, 8, 4, 6)}
DEEPSEEK = LATENT | {
    "experts": ExpertShape(
        8, 2, 16, (False, True), scoring="sigmoid", has_score_bias=True, num_groups=4, chosen_groups=2, shared_size=24
    )
}
VISION = QwenVisionShape(
    hidden_size=8, num_layers=2, num_heads=2, mlp_size=12, out_size=32, patch_size=4, temporal_patch_size=2, merge_size=2,
    rotation=AxisRotation((2, 1, 1)), image_token=10, video_token=11, vision_start=9, vision_end=12, window_size=16, full_layers=(1,),
)  # fmt: skip
BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
Play = Callable[[Engine, Decoder], dict[str, Completion]]


@dataclass(frozen=True)
class Case:
    """A model, an engine and what is asked of it. The key heads of `model` may be fewer than the ranks."""

    model: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    lora: Lora | None = None
    play: str = "some"


CASES = {
    "untied": Case(),
    "tied, norms of heads": Case({"tied": True, "qk_norm": True}),
    "biases, all heads": Case(BIASES | {"num_kv_heads": 4}),
    "gemma": Case(GEMMA | {"tied": True}),
    "adapters": Case({"qkv_bias": True}, lora=Lora(rank=3, alpha=6, targets=["k_proj", "v_proj", "o_proj", "up_proj"])),
    "experts, recorded": Case(EXPERTS | {"qk_norm": True}),
    "experts with adapters, norms over all heads": Case(
        EXPERTS | {"wide_qk_norm": True}, lora=Lora(rank=2, alpha=4, targets=["o_proj", "gate_proj", "down_proj"])
    ),
    "latent attention, shared experts": Case(DEEPSEEK),
    "latent attention in 8 bits, adapters": Case(
        DEEPSEEK,
        {"quantised": True},
        lora=Lora(
            rank=2,
            alpha=4,
            targets=["q_b_proj", "kv_b_proj", "kv_a_proj_with_mqa", "gate_proj", "up_proj", "down_proj"],
        ),
    ),
    "latent attention, a small cache": Case(LATENT, {"num_blocks": 8, "steps_per_launch": 3}, play="crowd"),
    "a small cache": Case(engine={"num_blocks": 8, "steps_per_launch": 3}, play="crowd"),
    "8-bit cache": Case(engine={"quantised": True}),
    "a life, with drafts": Case(engine={"speculation": Speculation(draft=3, rows=4)}, play="life"),
    "pictures": Case({"vision": VISION}, play="pictures"),
}
OF_FOUR = ("untied", "adapters", "experts, recorded", "latent attention, shared experts")
"""The cases of four ranks, two of which have the same key heads."""


def cases_of(size: int) -> dict[str, Case]:
    return CASES if size == 2 else {name: CASES[name] for name in OF_FOUR}


def made(case: Case) -> Decoder:
    model = decoder(**case.model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        if case.lora is not None:
            add_lora(model, case.lora, 0)
            for parameter in adapter_weights(model).values():
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def some(engine: Engine, model: Decoder) -> dict[str, Completion]:
    """Requests of every kind but the longest."""
    return run(engine, [r for r in mixed_requests() if r.sampling.max_tokens < 20])


def life(engine: Engine, model: Decoder) -> dict[str, Completion]:
    """Abort, continue, sleep, take new weights, and sample again. Which tokens an aborted request has depends on nothing but time."""
    wanted = mixed_requests()
    engine.submit(wanted)
    found = {c.id: c for c in islice(engine.stream(), 3)}
    cut = [r.id for r in wanted if r.id not in found][:4]
    found |= {c.id: c for c in engine.abort(cut, keep=True)} | {c.id: c for c in engine.stream()}
    engine.sleep()
    engine.load(1, [(name, 0.8 * p.detach()) for name, p in model.named_parameters()])
    engine.wake()
    later = [Request(f"later {r.id}", r.tokens, r.sampling, r.key) for r in wanted]
    return found | run(engine, later)


def crowd(engine: Engine, model: Decoder) -> dict[str, Completion]:
    """Rows that grow until the blocks run out."""
    return run(engine, requests([(k, 5, 6) for k in range(7)], max_tokens=40))


def pictures(engine: Engine, model: Decoder) -> dict[str, Completion]:
    """Prompts with pictures, before and after new weights of decoder and tower."""
    random, wanted = np.random.default_rng(0), list[Request]()
    for i, grid in enumerate(((1, 2, 3), (1, 4, 2), (1, 2, 3))):
        pixels = random.integers(0, 256, (1, grid[1] * 8, grid[2] * 8, 3), dtype=np.uint8)
        span = PictureSpan(2, Picture(pixels, grid))
        tokens = (3, 9, *[10] * span.picture.num_tokens, 12, 4, 5)
        wanted += [replace(r, id=f"{i}.{r.id}", pictures=(span,)) for r in requests([tokens], n=2, max_tokens=9)]
    found = run(engine, wanted)
    engine.load(1, [(name, 0.8 * p.detach()) for name, p in model.named_parameters()])
    return found | run(engine, [replace(r, id=f"later {r.id}") for r in wanted])


PLAYS: dict[str, Play] = {"some": some, "life": life, "crowd": crowd, "pictures": pictures}


def run_cases(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    ranks, results = join_engine_ranks(on_gpu=False), dict[str, Any]()
    for name, case in cases_of(ranks.size).items():
        model = made(case)
        part = parallel_decoder_of(model, ranks)
        part.records_experts = model.records_experts = "recorded" in name
        results[name] = {
            "share": sum(p.numel() for p in part.parameters()) / sum(p.numel() for p in model.parameters())
        }
        options = {"max_rows": 4} | case.engine
        if not ranks.is_leader:
            ParallelFollower(part, on_load=lambda version: None).run()
            continue
        engine = ParallelEngine(part, **options)
        results[name]["several"] = PLAYS[case.play](engine, model)
        engine.close()
        alone = PagedEngine(model, **options)
        results[name] |= {"stats": engine.stats, "token_bytes": (engine.token_bytes, alone.token_bytes)}
        results[name]["one"] = PLAYS[case.play](alone, model)
    if ranks.size == 4:
        results["resharded"] = {name: resharded(*case, ranks.control) for name, case in RESHARDED.items()}
        torch.save(results["resharded"], folder / f"resharded-{rank}.pt")
    if ranks.is_leader:
        results["refused"] = refusals(ranks)
        torch.save(results, folder / "results.pt")


RESHARDED = {
    "fsdp to four parts": ({"data": 4}, 4),
    "tensor x fsdp to two copies of two parts": ({"tensor": 2}, 2),
    "copies to four copies": ({"data": [2, 2]}, 1),
    "one learner to another order of parts": ({"tensor": 4}, 2),
    "experts x fsdp to two parts": ({"expert": 2}, 2),
    "experts to four parts": ({"expert": 4}, 4),
}
"""The division of a learner over four ranks, and the ranks of each engine on the same four."""


def resharded(parallel: dict[str, Any], engine_ranks: int, control: Any) -> dict[str, Any]:
    """Weights of a divided learner on their way to engines, with two ranks on each machine."""
    from burnish.config.placement import Parallel
    from burnish.core.sharded_tensors import local_tensor
    from burnish.inference import reshard_transfer
    from burnish.inference.resharding import TensorLayout, lower_bound, make_plan
    from burnish.models.tensor_shards import rank_blocks
    from burnish.training.parallel.ranks import join_process_group, parallelize_model

    model = decoder(num_kv_heads=4, qkv_bias=True, seed=5, **(EXPERTS if "expert" in parallel else {}))
    full = {name: p.detach().clone() for name, p in model.named_parameters()}
    parallelize_model(model, join_process_group(Parallel.model_validate(parallel), on_gpu=False))
    held = reshard_transfer.exchange_layouts(reshard_transfer.learner_layout(model), control)
    arch, place = model.arch, [rank % engine_ranks for rank in range(control.size())]
    tensors = [
        TensorLayout(
            name,
            tensor.element_size(),
            {rank: blocks[name] for rank, blocks in enumerate(held)},
            {rank: rank_blocks(arch, name, tensor.shape, own, engine_ranks) for rank, own in enumerate(place)},
        )
        for name, tensor in full.items()
    ]
    plan, bound = make_plan(tensors, lambda rank: rank // 2), lower_bound(tensors, lambda rank: rank // 2)
    wanted = {name: rank_part(arch, None, name, t, place[control.rank()], engine_ranks) for name, t in full.items()}
    targets = {name: torch.full(t.shape, torch.nan, dtype=t.dtype) for name, t in wanted.items()}
    sources = {name: local_tensor(p) for name, p in model.named_parameters()}
    received = reshard_transfer.execute(plan.transfers, sources, targets, control, bucket_bytes=1 << 12)
    return {
        "equal": all(torch.equal(targets[name], wanted[name]) for name in wanted),
        "received": received == plan.within.received[control.rank()] + plan.across.received[control.rank()],
        "least": (plan.moved_bytes, plan.across.total) == (bound.moved_bytes, bound.across_bytes),
        "moved": plan.moved_bytes,
        "relayed": sum(one.is_relayed for one in plan.transfers),
    }


def refusals(ranks: EngineRanks) -> list[str]:
    """What is refused, in words."""
    model, said = decoder(), []
    attempts: list[Callable[[], Any]] = [
        lambda: ParallelEngine(parallel_decoder_of(model, ranks), exact=True),
        lambda: parallel_decoder_of(decoder(num_heads=3, num_kv_heads=3), ranks),
        lambda: parallel_decoder_of(decoder(num_heads=12, num_kv_heads=3, mlp_size=48), ranks),
        lambda: parallel_decoder_of(_in_4_bits(), ranks),
    ]
    for attempt in attempts:
        try:
            attempt()
        except UserError as error:
            said.append(str(error))
    return said


def _in_4_bits() -> Decoder:
    model = decoder(hidden_size=64, mlp_size=128)
    add_lora(model, Lora(rank=2, base="nf4"), 0)
    return model


if __name__ == "__main__":
    size, folder = int(sys.argv[1]), Path(sys.argv[2])
    sys.exit(wait_for_ranks(start_ranks(partial(run_cases, folder), size, folder), folder))
