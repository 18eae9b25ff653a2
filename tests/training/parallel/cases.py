"""The cases that one process and several train alike: a tiny model, a few updates on batches of changing lengths, every loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from burnish.algorithms.losses.loss_view import LossView
from burnish.algorithms.losses.model_losses import ValueLoss
from burnish.algorithms.losses.policy_loss import Loss, NllLoss, PolicyLoss
from burnish.algorithms.terms.loss_terms import aggregation_weights
from burnish.algorithms.terms.observations import OBSERVATION_WEIGHT
from burnish.algorithms.terms.spec import Router
from burnish.config.model import Lora, LoraBase, Optimizer
from burnish.config.placement import Parallel
from burnish.core.batch import Batch
from burnish.core.pictures import Picture, PictureSpan
from burnish.core.routed_experts import LEARNER_EXPERTS
from burnish.core.segments import offsets_from_lengths
from burnish.models.activation_checkpointing import set_activations
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, initialise
from burnish.models.expert_shape import ExpertShape
from burnish.models.heads import ValueModel
from burnish.models.latent_shape import LatentShape
from burnish.models.lora.adapters import add_lora
from burnish.models.model_families import FAMILIES
from burnish.models.vision.axis_rotation import AxisRotation
from burnish.models.vision.qwen_shape import QwenVisionShape
from burnish.training.forward import ReferenceFn
from burnish.training.learner import Learner
from burnish.training.parallel.ranks import SOLO, Ranks, parallelize_model

VOCAB, STEPS = 13, 4
TERMS: dict[str, Any] = {"kl_estimator": "k3", "kl_coef": 0.1, "entropy_coef": 0.01}


@dataclass(frozen=True)
class InOrder:
    """Weights every token by its position in the mini-batch, so that a different order of sequences changes the loss."""

    needs = frozenset[str]()
    scope = "batch"

    def __call__(self, view: LossView) -> tuple[Tensor, dict[str, Tensor]]:
        assert view.logp is not None
        number = torch.arange(view.num_tokens, dtype=view.logp.dtype)
        return -(view.column("weight") * number * view.logp).sum(), {"number": number.sum()}


LOSSES: dict[str, Loss] = {
    "grpo": PolicyLoss(clip_options={"low": 0.2, "high": 0.2}, **TERMS),
    "sft": NllLoss(),
    "dpo": PolicyLoss(ratio="none", clip="none", loss="dpo", scope="group"),
    "top entropies": PolicyLoss(scope="batch", entropy_top=0.4, **TERMS),
    "observations": PolicyLoss(observes=True, **TERMS),
    "observations of a batch": PolicyLoss(observes=True, scope="batch", entropy_top=0.4, **TERMS),
    "full kl": PolicyLoss(kl_estimator="full", kl_coef=0.2),
    "in order": InOrder(),
    "value": ValueLoss(0.2),
}


@dataclass(frozen=True)
class Case:
    """A run; `parallel` is how several processes divide it."""

    loss: str
    parallel: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float64"
    sizes: tuple[int, ...] = (3, 2, 4)
    """Samples of each group."""
    kv_heads: int = 2
    teacher_kv_heads: int | None = None
    """Key/value heads of the reference, if it has others."""
    layers: int = 2
    tied: bool = False
    lora: int = 0
    base: LoraBase = "dtype"
    optimizer: str = "adamw"
    activations: str = "keep"
    also: bool = False
    """Whether a second batch is imitated in the same update."""
    steps: int = STEPS
    token_budget: int = 48
    gemma3: bool = False
    """Layers of two kinds, with norms behind them, instead of the usual ones."""
    experts: int = 0
    """Experts of each layer, of which two compute a token."""
    balance: float = 0.0
    """Weight of the routers' balance loss."""
    replays: bool = False
    """Whether updates replay the experts of a pass before them, each one expert further."""
    deepseek: bool = False
    """Latent attention, and a layer with shared experts and groups of experts behind a dense one."""
    even_routers: bool = False
    """Whether all scores of the routers are the same at first, so that the same two experts compute all tokens."""
    pictures: bool = False
    """A vision tower that is trained. The prompts of the first and the last group are pictures, so that some ranks have none."""


DEEPSEEK: dict[str, Any] = {
    **{"family": "deepseek_v3", "qk_norm": False, "qkv_bias": False, "num_kv_heads": 4, "head_dim": 12},
    "latent": LatentShape(10, 6, 8, 4, 6),
    "experts": ExpertShape(4, 2, 12, (False, True), True, "sigmoid", True, 2, 1, 1.5, shared_size=10),
}
TOWER = QwenVisionShape(
    8, 2, 2, 12, 32, 2, 2, 2, AxisRotation((2, 1, 1), is_interleaved=True), 1, 2, 3, 4, num_position_embeddings=9,
    deep_layers=(0,), activation="gelu_pytorch_tanh",
)  # fmt: skip
FEW = 2
"""Updates of the cases beside the main ones."""
MAIN = ("grpo", "sft", "dpo")
TWO: dict[str, Case] = {
    **{f"fsdp, {loss}": Case(loss, token_budget=20) for loss in MAIN},
    **{f"fsdp, {loss}, float32": Case(loss, dtype="float32") for loss in MAIN},
    **{f"context, {loss}": Case(loss, {"context": 2}) for loss in MAIN},
    **{f"tensor, {loss}": Case(loss, {"tensor": 2}) for loss in MAIN},
    **{f"{kind}, grpo, float32": Case("grpo", {kind: 2}, "float32", steps=FEW) for kind in ("context", "tensor")},
    "fsdp, of a batch": Case("top entropies", steps=FEW),
    **{f"{kind}, a reference": Case("full kl", {kind: 2}, steps=FEW) for kind in ("data", "context", "tensor")},
    **{f"{kind}, observations": Case("observations", {kind: 2}, steps=FEW) for kind in ("data", "context", "tensor")},
    "fsdp, observations of a batch": Case("observations of a batch", steps=FEW),
    "fsdp, in order": Case("in order", steps=FEW),
    "fsdp, a critic": Case("value", steps=FEW),
    "fsdp, bfloat16": Case("grpo", dtype="bfloat16", steps=FEW),
    "fsdp, tied": Case("grpo", tied=True, steps=FEW),
    "fsdp, fewer sequences than ranks": Case("grpo", sizes=(1,), steps=FEW),
    "fsdp, fewer sequences than ranks, of a batch": Case("top entropies", sizes=(1,), steps=FEW),
    "fsdp, a second batch": Case("grpo", also=True, steps=FEW),
    "fsdp, offload": Case("grpo", {"offload": True}, steps=FEW),
    "fsdp, lora": Case("grpo", lora=2, steps=FEW),
    "fsdp, lora in 4 bits": Case("grpo", lora=2, base="nf4-double", steps=FEW),
    "fsdp, lora in 4 bits, a critic": Case("value", {"offload": True}, lora=2, base="nf4", steps=FEW),
    "fsdp, recompute": Case("grpo", activations="recompute", steps=FEW),
    "copies": Case("grpo", {"data": (2, 1)}, steps=FEW),
    "context, of a batch": Case("top entropies", {"context": 2}, steps=FEW),
    "context, a critic": Case("value", {"context": 2}, steps=FEW),
    # With one key head, keys are gathered instead of exchanged for heads.
    "context, one key head": Case("grpo", {"context": 2}, kv_heads=1, steps=FEW),
    "context, one key head, a reference": Case("full kl", {"context": 2}, kv_heads=1, steps=FEW),
    "context, one key head, a teacher with two": Case(
        "full kl", {"context": 2}, kv_heads=1, teacher_kv_heads=2, steps=FEW
    ),
    "context, one key head, gemma3": Case("grpo", {"context": 2}, kv_heads=1, gemma3=True, steps=FEW),
    "context, one key head, a critic, recompute": Case(
        "value", {"context": 2}, kv_heads=1, activations="recompute", steps=FEW
    ),
    "context, lora, recompute": Case("grpo", {"context": 2}, lora=2, base="nf4", activations="recompute", steps=FEW),
    "tensor, a critic": Case("value", {"tensor": 2}, steps=FEW),
    "tensor, recompute": Case("grpo", {"tensor": 2}, activations="recompute", steps=FEW),
    "tensor, lora": Case("grpo", {"tensor": 2}, lora=2, steps=FEW),
    "tensor, lora, a critic, recompute": Case("value", {"tensor": 2}, lora=2, activations="recompute", steps=FEW),
    "tensor, muon": Case("grpo", {"tensor": 2}, optimizer="muon", steps=FEW),
    **{f"pipeline, {loss}": Case(loss, {"pipeline": 2}, token_budget=20) for loss in MAIN},
    "pipeline, tied": Case("grpo", {"pipeline": 2}, tied=True, token_budget=20, steps=FEW),
    "pipeline, of a batch": Case("top entropies", {"pipeline": 2}, token_budget=20, steps=FEW),
    "pipeline, a reference": Case("full kl", {"pipeline": 2}, token_budget=20, steps=FEW),
    "pipeline, observations": Case("observations", {"pipeline": 2}, steps=FEW),
    "pipeline, a critic": Case("value", {"pipeline": 2}, token_budget=20, steps=FEW),
    "pipeline, lora in 4 bits, recompute": Case(
        "grpo", {"pipeline": 2}, lora=2, base="nf4", activations="recompute", token_budget=20, steps=FEW
    ),
    "pipeline, muon, a second batch": Case("grpo", {"pipeline": 2}, optimizer="muon", also=True, steps=FEW),
    "pipeline, bfloat16": Case("grpo", {"pipeline": 2}, dtype="bfloat16", steps=FEW),
    "pipeline, gemma3": Case("grpo", {"pipeline": 2}, gemma3=True, token_budget=20, steps=FEW),
    **{f"{kind}, gemma3": Case("grpo", {kind: 2}, gemma3=True, steps=FEW) for kind in ("data", "context", "tensor")},
    **{
        f"{kind}, pictures": Case("grpo", {kind: 2}, pictures=True, token_budget=16, steps=FEW)
        for kind in ("data", "context", "tensor", "pipeline")
    },
    "data, pictures, lora, recompute": Case("grpo", pictures=True, lora=2, activations="recompute", steps=FEW),
}
FOUR: dict[str, Case] = {
    "fsdp, sft": Case("sft"),
    "hsdp, grpo": Case("grpo", {"data": (2, 2)}),
    "context, two key heads": Case("dpo", {"context": 4}),
    "tensor x fsdp": Case("grpo", {"tensor": 2}),
    "fsdp, fewer sequences than ranks": Case("grpo", sizes=(1, 2), steps=FEW),
    "fsdp, lora, muon": Case("grpo", lora=2, optimizer="muon", steps=FEW),
    "hsdp, of a batch, offload": Case("top entropies", {"data": (2, 2), "offload": True}, steps=FEW),
    "context, fewer rows than ranks": Case("sft", {"context": 4}, sizes=(1,), steps=FEW),
    "context x fsdp": Case("dpo", {"context": 2}, steps=FEW),
    "context x fsdp, one key head": Case("grpo", {"context": 2}, kv_heads=1, steps=FEW),
    "context x copies": Case("grpo", {"context": 2, "data": (2, 1)}, steps=FEW),
    "tensor x fsdp, a critic": Case("value", {"tensor": 2}, steps=FEW),
    "tensor x fsdp, lora, muon": Case("grpo", {"tensor": 2}, lora=2, optimizer="muon", steps=FEW),
    "tensor x copies": Case("grpo", {"tensor": 2, "data": (2, 1)}, steps=FEW),
    "pipeline of four": Case("grpo", {"pipeline": 4}, layers=5, token_budget=20, steps=FEW),
    "pipeline x fsdp": Case("grpo", {"pipeline": 2}, token_budget=20, tied=True, steps=FEW),
    "pipeline x fsdp, a critic": Case("value", {"pipeline": 2}, token_budget=20, steps=FEW),
    "pipeline x fsdp, fewer sequences than ranks": Case("top entropies", {"pipeline": 2}, sizes=(1,), steps=FEW),
    "pipeline x copies, muon": Case("grpo", {"pipeline": 2, "data": (2, 1)}, optimizer="muon", steps=FEW),
    "pipeline x context": Case("dpo", {"pipeline": 2, "context": 2}, token_budget=20, steps=FEW),
    "pipeline x tensor": Case("grpo", {"pipeline": 2, "tensor": 2}, token_budget=20, tied=True, steps=FEW),
    "pipeline x tensor, lora": Case("full kl", {"pipeline": 2, "tensor": 2}, lora=2, token_budget=20, steps=FEW),
    "tensor x context": Case("grpo", {"tensor": 2, "context": 2}, kv_heads=4, steps=FEW),
    "tensor x context, a key head per rank": Case("grpo", {"tensor": 2, "context": 2}, steps=FEW),
}
EIGHT: dict[str, Case] = {
    "tensor x context x fsdp, a key head per rank": Case("grpo", {"tensor": 2, "context": 2}, steps=FEW),
    "pipeline x fsdp x tensor": Case("grpo", {"pipeline": 2, "tensor": 2}, tied=True, token_budget=20, steps=FEW),
    "pipeline x fsdp x tensor, lora, a critic": Case("value", {"pipeline": 2, "tensor": 2}, lora=2, steps=FEW),
    "pipeline x fsdp x context": Case("dpo", {"pipeline": 2, "context": 2}, token_budget=20, steps=FEW),
    "pipeline x context x tensor": Case("grpo", {"pipeline": 2, "context": 2, "tensor": 2}, kv_heads=4, steps=FEW),
    "pipeline of four x copies": Case("top entropies", {"pipeline": 4, "data": (2, 1)}, layers=4, steps=FEW),
    "hsdp x tensor": Case("grpo", {"data": (2, 2), "tensor": 2}, optimizer="muon", steps=FEW),
    "copies x context x tensor": Case("sft", {"data": (2, 1), "context": 2, "tensor": 2}, kv_heads=4, steps=FEW),
}
EXPERTS_ON_TWO: dict[str, Case] = {
    "expert": Case("grpo", {"expert": 2}, experts=4),
    "expert, fewer sequences than ranks, recompute": Case(
        "sft", {"expert": 2}, experts=4, sizes=(1,), activations="recompute", steps=FEW
    ),
    "pipeline, experts, recompute": Case(
        "dpo", {"pipeline": 2}, experts=4, balance=0.1, activations="recompute", token_budget=20, steps=FEW
    ),
    "expert, a critic": Case("value", {"expert": 2}, experts=4, steps=FEW),
    "expert, a reference": Case("full kl", {"expert": 2}, experts=4, balance=0.1, steps=FEW),
    **{
        f"{kind}, deepseek": Case("grpo", {kind: 2}, experts=4, deepseek=True, token_budget=20, steps=FEW)
        for kind in ("expert", "context", "pipeline")
    },
    "expert, no rows for a rank": Case("grpo", {"expert": 2}, experts=4, even_routers=True, steps=FEW),
    "expert, lora": Case("grpo", {"expert": 2}, experts=4, lora=2, steps=FEW),
    "data, experts, lora in 4 bits": Case("grpo", {"data": 2}, experts=4, lora=2, base="nf4", steps=FEW),
    "tensor, experts, recompute": Case(
        "sft", {"tensor": 2}, experts=4, balance=0.1, activations="recompute", steps=FEW
    ),
    "data, experts": Case("grpo", {"data": 2}, experts=4, balance=0.1, steps=FEW),
    "context, experts": Case("grpo", {"context": 2}, experts=4, balance=0.1, activations="recompute", steps=FEW),
    "context, experts, one key head": Case("dpo", {"context": 2}, experts=4, balance=0.1, kv_heads=1, steps=FEW),
    **{
        f"{kind}, experts, replay": Case("grpo", {kind: 2}, experts=4, replays=True, token_budget=20, steps=FEW)
        for kind in ("data", "context", "expert", "tensor", "pipeline")
    },
    "data, experts, replay, of a batch": Case("top entropies", {"data": 2}, experts=4, replays=True, steps=FEW),
    "context, experts, replay, one key head": Case(
        "grpo", {"context": 2}, experts=4, replays=True, kv_heads=1, steps=FEW
    ),
}
EXPERTS_ON_FOUR: dict[str, Case] = {
    "expert x fsdp, muon": Case("grpo", {"expert": 2}, experts=4, optimizer="muon", steps=FEW),
    "expert x copies, offload": Case("grpo", {"expert": 2, "data": (2, 1), "offload": True}, experts=4, steps=FEW),
    "expert x context": Case("dpo", {"expert": 2, "context": 2}, experts=4, kv_heads=1, steps=FEW),
    "expert x context, deepseek": Case(
        "grpo", {"expert": 2, "context": 2}, experts=4, balance=0.1, deepseek=True, steps=FEW
    ),
    "expert x tensor": Case("grpo", {"expert": 2, "tensor": 2}, experts=4, balance=0.1, steps=FEW),
    "pipeline x expert": Case("grpo", {"pipeline": 2, "expert": 2}, experts=4, token_budget=20, balance=0.1, steps=FEW),
    "four expert ranks": Case("top entropies", {"expert": 4}, experts=4, steps=FEW),
    "tensor x fsdp, experts": Case("grpo", {"tensor": 2}, experts=4, steps=FEW),
}
EXPERTS_ON_EIGHT: dict[str, Case] = {
    "expert x tensor x fsdp": Case("grpo", {"expert": 2, "tensor": 2}, experts=4, steps=FEW),
    "expert x tensor x copies": Case("grpo", {"expert": 2, "tensor": 2, "data": (2, 1)}, experts=4, steps=FEW),
    "expert x context x fsdp, recompute": Case(
        "grpo", {"expert": 2, "context": 2}, experts=4, balance=0.1, kv_heads=1, activations="recompute", steps=FEW
    ),
    "expert x context x tensor": Case("top entropies", {"expert": 2, "context": 2, "tensor": 2}, experts=4, steps=FEW),
    "pipeline x expert x tensor": Case(
        "grpo", {"pipeline": 2, "expert": 2, "tensor": 2}, experts=4, token_budget=20, steps=FEW
    ),
    "pipeline x expert x fsdp": Case(
        "grpo", {"pipeline": 2, "expert": 2}, experts=4, balance=0.1, token_budget=20, steps=FEW
    ),
    "pipeline x expert x copies, deepseek": Case(
        "grpo", {"pipeline": 2, "expert": 2, "data": (2, 1)}, experts=4, deepseek=True, token_budget=20, steps=FEW
    ),
    "expert x context x fsdp, deepseek, recompute": Case(
        "grpo", {"expert": 2, "context": 2}, experts=4, deepseek=True, activations="recompute", steps=FEW
    ),
    "expert x context x tensor, replay": Case(
        "grpo", {"expert": 2, "context": 2, "tensor": 2}, experts=4, replays=True, token_budget=20, steps=FEW
    ),
    "pipeline x expert x context": Case(
        "dpo", {"pipeline": 2, "expert": 2, "context": 2}, experts=4, kv_heads=1, token_budget=20, steps=FEW
    ),
    "four expert ranks x fsdp, muon": Case("grpo", {"expert": 4}, experts=4, optimizer="muon", steps=FEW),
}
CASES = {2: TWO | EXPERTS_ON_TWO, 4: FOUR | EXPERTS_ON_FOUR, 8: EIGHT | EXPERTS_ON_EIGHT}
"""Those of eight ranks are for `make slow`."""


def parallel_of(case: Case) -> Parallel:
    return Parallel.model_validate(case.parallel)


def make_model(case: Case) -> nn.Module:
    family = "gemma3_text" if case.gemma3 else "qwen3_moe" if case.experts else "qwen3"
    fields = FAMILIES[family].fixed | (
        FAMILIES[family].new_model_fields(case.layers) | {"window": 3} if case.gemma3 else {"qkv_bias": True}
    )
    if case.experts:
        fields |= {"experts": ExpertShape(case.experts, 2, 12)}
    arch = Architecture(family, VOCAB, 32, case.layers, 4, case.kv_heads, 8, 48, 64, **fields, tied=case.tied)
    if case.deepseek:
        arch = replace(arch, **DEEPSEEK)
    if case.pictures:
        arch = replace(arch, family="qwen3_vl", vision=TOWER)
    decoder = Decoder(arch)
    initialise(decoder.double(), 0, std=0.3)
    if case.even_routers:
        for name, parameter in decoder.named_parameters():
            if name.endswith("router.weight"):
                nn.init.zeros_(parameter)
    if case.lora:
        add_lora(decoder, Lora(rank=case.lora, base=case.base), 0)
    if decoder.vision is not None:
        decoder.vision.requires_grad_(True)
    model: nn.Module = decoder
    if case.loss == "value":
        model = ValueModel(decoder)
        nn.init.normal_(model.head, generator=torch.Generator().manual_seed(1))
    model.to(getattr(torch, case.dtype))
    set_activations(model, case.activations)
    return model


def make_batch(case: Case, step: int, seed: int = 0) -> Batch:
    """Groups that begin alike, each sample with a length of its own; the last token of some is out of the loss."""
    generator = torch.Generator().manual_seed(1000 * seed + step)

    def rand(n: int) -> Tensor:
        return torch.rand(n, generator=generator, dtype=torch.float64)

    def integers(high: int, n: int) -> list[int]:
        return torch.randint(1, high, (n,), generator=generator).tolist()

    sizes = (2,) * len(case.sizes) if case.loss == "dpo" else case.sizes
    tokens, mask, groups = list[int](), list[bool](), list[int]()
    lengths = []
    for group, size in enumerate(sizes):
        prompt = integers(VOCAB, 2 + group)
        for written in integers(9, size):
            tokens += prompt + integers(VOCAB, written)
            mask += [False] * len(prompt) + [True] * written
            lengths.append(len(prompt) + written)
            groups.append(group)
    n, s = len(tokens), len(lengths)
    written = torch.tensor(mask)
    kept = written & (
        (rand(n) < 0.9) | ~written.roll(1)
    )  # the first written token stays: no answer is left without one
    batch = Batch(
        tokens=torch.tensor(tokens),
        offsets=offsets_from_lengths(torch.tensor(lengths)),
        token={
            "action_mask": written,
            "loss_mask": kept,
            "old_logp": -2.5 - rand(n),
            "ref_logp": -2.5 - rand(n),
            "returns": rand(n),
            "values": rand(n),
        },
        sequence={
            "group_ids": torch.tensor(groups),
            "key": torch.arange(s),
            "advantages": 2 * rand(s) - 1,
            "chosen": torch.arange(s) % 2 == 0,
        },
    )
    observed = torch.where(written | (batch.positions == 0), 0.0, 0.1)  # only a loss that observes reads it
    weights = {"weight": aggregation_weights(batch, "token-mean"), OBSERVATION_WEIGHT: observed / (observed > 0).sum()}
    batch = batch.with_token(**weights)
    return batch.with_pictures([_picture_spans(group, len(sizes)) for group in groups]) if case.pictures else batch


def _picture_spans(group: int, num_groups: int) -> tuple[PictureSpan, ...]:
    """The picture that a prompt of `make_batch` begins with: one of 2 + group tokens."""
    if group not in (0, num_groups - 1):
        return ()
    grid = (1, 1, 2 + group)
    pixels = np.random.default_rng(group).integers(0, 256, (1, 4, 4 * grid[2], 3), dtype=np.uint8)
    return (PictureSpan(0, Picture(pixels, grid)),)


def reference_of(case: Case, ranks: Ranks) -> ReferenceFn:
    """A model that stays as it is, divided like the policy."""
    other = replace(case, kv_heads=case.teacher_kv_heads or case.kv_heads)
    model = cast(Decoder, make_model(other)).requires_grad_(False)
    with torch.no_grad():
        model.norm.weight.mul_(0.9)
    parallelize_model(model, ranks, policy=make_model(case))
    return lambda piece: model.distribution(piece.batch.tokens, piece.batch.offsets, piece.wanted, piece.shared_prefix)


def train(case: Case, ranks: Ranks = SOLO, model: nn.Module | None = None) -> Iterator[dict[str, float]]:
    """What every update tells."""
    model = make_model(case) if model is None else model
    config = Optimizer(lr=0.003, eps=1e-6, clip_norm=0.5, name=case.optimizer)
    router = Router(balance=case.balance, learner_experts="replay" if case.replays else "ignore")
    learner = Learner(model, config, 20, case.token_budget, 0.9, grad_norms=True, ranks=ranks, router=router)
    if case.loss == "full kl":
        learner.reference = reference_of(case, ranks)
    for step in range(case.steps):
        batch = ranks.local_shard(make_batch(case, step))
        also = (ranks.local_shard(make_batch(case, step, seed=1)), NllLoss()) if case.also else None
        experts = {}
        if case.replays:  # other experts than the token's own, so that a wrong place is seen
            found = learner.outputs(batch, frozenset({LEARNER_EXPERTS}))[LEARNER_EXPERTS]
            assert (found >= 0).all()
            batch = batch.with_token(**{LEARNER_EXPERTS: (found + 1) % case.experts})
            places = torch.arange(1, found[0].numel() + 1, dtype=torch.float64).view_as(found[0])
            experts = {"experts": float((found * places).sum())}
        update = learner.update(batch, LOSSES[case.loss], also=also)
        assert update.skipped is None
        assert update.logp.shape == batch.tokens.shape
        again = {"logp": float(learner.logprobs(batch).sum())} if case.pictures else {}  # with the tower's new weights
        yield update.stats | ranks.sum_over_ranks(again | experts)
