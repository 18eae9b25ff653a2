"""Four processes that save a learner in every layout and load it in others: `python -m tests.training.resharding_worker FOLDER`.

`FOLDER/<layout>` is a checkpoint written by that layout after two updates. `FOLDER/<layout> as <other>` was written by another
layout that had loaded it. At the end every layout reads a policy and a critic in parts. The processes are forked from one that has imported everything.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

# Imported once for all ranks: each would take seconds for them.
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
from torch import distributed
from transformers import PreTrainedTokenizerFast  # noqa: F401

from burnish.algorithms.losses.policy_loss import NllLoss
from burnish.algorithms.terms.loss_terms import aggregation_weights
from burnish.config.model import Lora, Optimizer
from burnish.config.placement import Parallel
from burnish.core.batch import Batch
from burnish.core.sharded_tensors import local_tensor
from burnish.data.supervised import Example
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, initialise
from burnish.models.expert_shape import ExpertShape
from burnish.models.heads import ValueModel
from burnish.models.latent_shape import LatentShape
from burnish.models.lora.adapters import add_lora
from burnish.models.policy import PolicyModel
from burnish.models.tokenizer import Tokenizer
from burnish.models.weight_files import defer_decoder, load_decoder, save_decoder
from burnish.run.checkpoint.checkpoints import Checkpoints
from burnish.run.checkpoint.saver import HostCopy, keep_in_place
from burnish.run.checkpoint.snapshot import Snapshot
from burnish.trainers.sft import pack_examples
from burnish.training.learner import Learner
from burnish.training.parallel.fsdp import full_parameters
from burnish.training.parallel.ranks import SOLO, Ranks, join_process_group, parallelize_model
from burnish.training.sharded_checkpoint import load_tensors_into, tensor_contents
from tests.training.parallel.forked_ranks import start_ranks, wait_for_ranks

RANKS = 4
ALPHABET = "0123456789>"
LAYOUTS: dict[str, dict[str, Any] | None] = {
    "alone": None,
    "rows": {},
    "copies": {"data": (2, 2)},
    "columns": {"tensor": 2},
    "columns of copies": {"tensor": 2, "data": (2, 1)},
    "stages of rows": {"pipeline": 2},
    "stages of columns": {"pipeline": 2, "tensor": 2},
}
RING = [*zip(LAYOUTS, [*list(LAYOUTS)[1:], "alone"], strict=True)]
PAIRS = {
    "adamw": [*RING, ("rows", "alone"), ("alone", "columns")],
    "adam8bit": [("alone", "rows"), ("rows", "columns"), ("columns", "alone")],
}
"""Which layout loads what which other saved: moments like the parameter, and moments with a scale for each block of a row."""


def make(ranks: Ranks, seed: int, optimizer: str) -> tuple[PolicyModel, Learner]:
    tokenizer = Tokenizer.from_characters(ALPHABET)
    model = Decoder(Architecture("qwen2", tokenizer.vocab_size, 32, 2, 4, 2, 8, 66, 64, qkv_bias=True))
    initialise(model.float(), seed, std=0.3)
    parallelize_model(model, ranks)
    learner = Learner(model, Optimizer(lr=0.01, name=optimizer), 10, token_budget=24, ranks=ranks)
    return PolicyModel(model, tokenizer, None, ""), learner


def make_batch() -> Batch:
    examples = [Example(str(k), [(3 * k + i) % 13 for i in range(4 + k)], [False, *[True] * (3 + k)]) for k in range(6)]
    batch = pack_examples(examples)
    return batch.with_token(weight=aggregation_weights(batch, "token-mean"))


def save(folder: Path, policy: PolicyModel, learner: Learner, name: str) -> None:
    """A checkpoint with the weights a second time, in the files of the processes that hold them."""
    stage = keep_in_place if "as" in name.split() else HostCopy()
    state = [*learner.contents(stage), *tensor_contents("shadow", learner.names, learner.model, stage)]
    snapshot = Snapshot(policy.contents(stage), state, policy.part)
    Checkpoints(folder / name, keep_last=1).write(1, snapshot)


def layouts() -> dict[str, Ranks | None]:
    """This process's place in each layout; None where it has none."""
    places: dict[str, Ranks | None] = {}
    for name, parallel in LAYOUTS.items():
        if parallel is None:
            places[name] = SOLO if distributed.get_rank() == 0 else None
        else:
            places[name] = join_process_group(Parallel.model_validate(parallel), on_gpu=False)
    return places


def run_layouts(folder: Path, rank: int) -> None:
    """The work of one rank."""
    places = layouts()
    for optimizer in PAIRS:
        run(folder / optimizer, places, optimizer)
    load_in_parts(folder / "adamw" / "alone" / "step-000001", places)
    load_experts_in_parts(folder / "experts", rank)
    keep_a_wide_bias(folder / "bias", rank)


def load_in_parts(directory: Path, places: dict[str, Ranks | None]) -> None:
    """A policy and a critic that are divided before anything is read: each process then reads its own part."""
    expected = dict(load_decoder(directory, torch.float32, torch.device("cpu")).named_parameters())
    for name, ranks in places.items():
        if ranks is None or ranks is SOLO:
            continue
        model = defer_decoder(directory, torch.float32)
        critic = ValueModel(model)
        for divided, prefix in ((critic, "backbone."), (model, "")):
            assert all(parameter.is_meta for parameter in divided.parameters())
            parallelize_model(divided, ranks)
            found = dict(full_parameters(divided))
            assert set(found) == set(dict(ValueModel(Decoder(model.arch)).named_parameters()) if prefix else expected)
            for key, tensor in found.items():
                wanted = torch.zeros_like(tensor) if key == "head" else expected[key.removeprefix(prefix)]
                assert torch.equal(tensor, wanted), f"{name}: {key}"


def load_experts_in_parts(directory: Path, rank: int) -> None:
    """Experts with adapters; one layer is dense."""
    experts = ExpertShape(4, 2, 16, (False, True, True))
    if rank == 0:
        model = Decoder(Architecture("qwen3_moe", 13, 32, 3, 4, 2, 8, 48, 64, qk_norm=True, experts=experts))
        initialise(model, 0, std=0.3)
        save_decoder(model, directory, None)
    distributed.barrier()
    for parallel in ({"expert": 2}, {"pipeline": 2, "expert": 2}):
        whole = load_decoder(directory, torch.float32, torch.device("cpu"))
        divided = defer_decoder(directory, torch.float32)
        for model in (whole, divided):
            add_lora(model, Lora(rank=2), seed=3)
        parallelize_model(divided, join_process_group(Parallel.model_validate(parallel), on_gpu=False))
        found = dict(full_parameters(divided))
        assert found.keys() == dict(whole.named_parameters()).keys()
        assert all(torch.equal(found[name], parameter) for name, parameter in whole.named_parameters())


def keep_a_wide_bias(directory: Path, rank: int) -> None:
    """The bias of DeepSeek's choice is float32 in a bfloat16 model, in a divided one too."""
    experts = ExpertShape(4, 2, 16, (False, True), scoring="sigmoid", has_score_bias=True, shared_size=16)
    latent, name = LatentShape(10, 6, 8, 4, 6), "layers.1.experts.score_bias"
    bias = torch.linspace(3.99, 4.01, 4)
    if rank == 0:
        model = Decoder(Architecture("deepseek_v3", 13, 32, 2, 4, 4, 12, 48, 64, latent=latent, experts=experts))
        initialise(model, 0, std=0.3)
        dict(model.named_parameters())[name].data.copy_(bias)
        save_decoder(model.bfloat16(), directory, None)
    distributed.barrier()
    ranks = join_process_group(Parallel(), on_gpu=False)
    early, late = load_decoder(directory, torch.bfloat16, torch.device("cpu")), defer_decoder(directory, torch.bfloat16)
    for divided in (early, late):
        parallelize_model(divided, ranks)
        divided.token_logprobs(torch.arange(9), torch.tensor([0, 9]), torch.arange(1, 9))[0].sum().backward()
        found = dict(full_parameters(divided))[name]
        assert found.dtype == torch.float32
        assert torch.equal(found, bias)


def run(folder: Path, places: dict[str, Ranks | None], optimizer: str) -> None:
    batch = make_batch()
    for name in dict(PAIRS[optimizer]):
        ranks = places[name]
        if ranks is not None:
            policy, learner = make(ranks, 0, optimizer)
            for _ in range(2):
                learner.update(ranks.local_shard(batch), NllLoss())
            save(folder, policy, learner, name)
        distributed.barrier()
    for name, other in PAIRS[optimizer]:
        ranks = places[other]
        if ranks is not None:
            policy, learner = make(ranks, 1, optimizer)
            checkpoint = folder / name / "step-000001"
            policy.load_weights(checkpoint)
            learner.load(checkpoint)
            save(folder, policy, learner, f"{name} as {other}")
            _, other_learner = make(ranks, 2, optimizer)
            load_tensors_into(checkpoint, "shadow", other_learner.names, other_learner.model)
            assert all(
                map(
                    torch.equal,
                    map(local_tensor, other_learner.names.values()),
                    map(local_tensor, learner.names.values()),
                )
            )
        distributed.barrier()


def main(folder: Path) -> int:
    torch.set_num_threads(1)
    return wait_for_ranks(start_ranks(partial(run_layouts, folder), RANKS, folder), folder)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
