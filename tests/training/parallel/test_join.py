"""What is refused before several processes begin."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from burnish.cli.main import main
from burnish.config.errors import UserError
from burnish.config.loading import load
from burnish.config.placement import Parallel
from burnish.config.schema import SftConfig
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder
from burnish.training.parallel.distribute import join
from burnish.training.parallel.ranks import SOLO
from burnish.training.parallel.sequence import split_rows
from burnish.training.parallel.tensor import check, part_of

ARCH = Architecture("qwen3", 11, 32, 1, 6, 3, 8, 48, 64)
BASE = ["model.path=somewhere", "sft.data.task=sort_digits"]


def test_one_process_is_alone_and_cannot_be_told_to_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert join(Parallel(), on_gpu=False) is SOLO
    with pytest.raises(UserError, match="torchrun"):
        join(Parallel(sequence=2), on_gpu=False)


def test_reinforcement_learning_is_not_started_by_several_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert main(["train", "recipes/sort_digits.yaml"]) == 2
    assert "runs in one process, and torchrun started 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["parallel.tensor=2", "sft.activations=selective"], "use recompute or keep"),
        (["parallel.tensor=2", "model.lora.base=nf4"], r"cannot cut matrices in 4 bits \(model.lora.base=nf4\)"),
        (["parallel.sequence=2", "model.backend=transformers"], "native decoder"),
        (["parallel.offload=true", "model.device=cpu"], "host memory is all there is"),
        (["parallel.offload=true", "sft.optimizer.offload=true"], "optimizer.offload has no effect"),
        (["parallel.shard=0"], "expected an integer of 1 or more"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_the_config(overrides: list[str], reason: str) -> None:
    assert load(SftConfig, None, BASE).config.parallel == Parallel()
    with pytest.raises(UserError, match=reason):
        load(SftConfig, None, [*BASE, *overrides])


@pytest.mark.parametrize(("parts", "what"), [(2, "3 key/value heads"), (4, "6 query heads"), (5, "6 query heads")])
def test_heads_must_divide(parts: int, what: str) -> None:
    with pytest.raises(UserError, match=f"parallel.tensor={parts} does not divide the model's {what}"):
        check(ARCH, parts)
    check(ARCH, 3)
    part = part_of(ARCH, 3)
    assert (part.num_heads, part.num_kv_heads, part.mlp_size, part.hidden_size) == (2, 1, 16, 32)


def test_rows_are_cut_over_ranks_that_divide_the_query_heads() -> None:
    group = cast(Any, SimpleNamespace(size=lambda: 4, rank=lambda: 0))
    with pytest.raises(UserError, match=r"sequence=4 does not divide the 6 query heads"):
        split_rows(Decoder(ARCH), group)
