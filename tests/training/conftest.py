"""A tiny decoder and batches of groups, for tests of computations over a whole mini-batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from burnish.algorithms.terms.loss_terms import aggregation_weights
from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, initialise

VOCAB = 11


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Decoder]:
    """`make_model(seed, tied, dtype)`."""

    def build(seed: int = 0, tied: bool = False, dtype: torch.dtype = torch.float64) -> Decoder:
        model = Decoder(Architecture("qwen3", VOCAB, 8, 1, 2, 1, 4, 12, 64, qkv_bias=True, qk_norm=True, tied=tied))
        initialise(model.double(), seed, std=0.4)
        return model.to(dtype)

    return build


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., Batch]:
    """`make_batch(shapes, seed)`: sequences as (group, prompt length, written length).

    Prompts of a group begin alike. Some written tokens are out of the loss, one sequence may be out of it altogether; all
    columns are made up.
    """

    def build(shapes: list[tuple[int, int, int]], seed: int = 0, mode: str = "token-mean") -> Batch:
        generator = torch.Generator().manual_seed(seed)

        def rand(n: int) -> Tensor:
            return torch.rand(n, generator=generator, dtype=torch.float64)

        mask = torch.tensor([i >= prompt for _, prompt, rest in shapes for i in range(prompt + rest)])
        n, s = mask.numel(), len(shapes)
        dropped = rand(n) < 0.2
        dropped[mask.nonzero()[0]] = False
        prompts = torch.tensor([(group + 5 * i) % VOCAB for group, a, b in shapes for i in range(a + b)])
        batch = Batch(
            tokens=torch.where(mask, torch.randint(VOCAB, (n,), generator=generator), prompts),
            offsets=offsets_from_lengths(torch.tensor([a + b for _, a, b in shapes])),
            token={
                "action_mask": mask,
                "loss_mask": mask & ~dropped,
                "old_logp": -4 * rand(n),
                "ref_logp": -4 * rand(n),
                "returns": rand(n),
                "values": rand(n),
            },
            sequence={
                "group_ids": torch.tensor([g for g, _, _ in shapes]),
                "key": torch.arange(s) + 1000 * seed,
                "advantages": 2 * rand(s) - 1,
                "accuracy": (rand(s) < 0.5).double(),
            },
        )
        return batch.with_token(weight=aggregation_weights(batch, mode, 6))

    return build
