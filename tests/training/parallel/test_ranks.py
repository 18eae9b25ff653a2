"""Shares of a mini-batch (each sequence once, whole groups, even work), and layouts that are refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from burnish.cli.main import main
from burnish.config.errors import UserError
from burnish.config.loading import load
from burnish.config.placement import Parallel
from burnish.config.schema import SftConfig
from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths
from burnish.models.architecture import Architecture
from burnish.training.parallel.ranks import SOLO, balanced_shares, join_process_group
from burnish.training.parallel.tensor_parallel import check_divisible, local_architecture

LENGTHS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), max_size=24)


def make_batch(shapes: list[tuple[int, int]], shared: int = 0, grouped: bool = True) -> Batch:
    """(group, length) of each sequence; the first `shared` tokens of a group are the same."""
    lengths = torch.tensor([length for _, length in shapes], dtype=torch.long)
    tokens = [group if k < shared else 100 + i for i, (group, length) in enumerate(shapes) for k in range(length)]
    groups = {"group_ids": torch.tensor([group for group, _ in shapes], dtype=torch.long)} if grouped else {}
    return Batch(torch.tensor(tokens, dtype=torch.long), offsets_from_lengths(lengths), sequence=groups)


@given(shapes=LENGTHS, num_ranks=st.integers(1, 9), grouped=st.booleans())
def test_every_sequence_is_in_one_share_and_no_group_in_two(
    shapes: list[tuple[int, int]], num_ranks: int, grouped: bool
) -> None:
    found = balanced_shares(make_batch(shapes, grouped=grouped), num_ranks)
    assert len(found) == num_ranks
    assert sorted(i for share in found for i in share.tolist()) == list(range(len(shapes)))
    assert all(share.tolist() == sorted(share.tolist()) for share in found)
    if grouped:
        owners = [{shapes[i][0] for i in share.tolist()} for share in found]
        assert sum(map(len, owners)) == len({group for group, _ in shapes})


def test_work_is_even_although_lengths_are_not() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 2000, (64,), generator=generator).tolist()
    found = balanced_shares(make_batch(list(enumerate(lengths))), 4, attention_cost=1e-3)
    costs = [sum(lengths[i] + 1e-3 * lengths[i] ** 2 for i in share.tolist()) for share in found]
    assert max(costs) < 1.01 * min(costs)


def test_attention_counts_in_the_balance() -> None:
    batch = make_batch([(0, 100), (1, 60), (2, 60), (3, 20)])
    by_length, by_square = (balanced_shares(batch, 2, attention_cost) for attention_cost in (0.0, 1e6))
    assert sorted(share.tolist() for share in by_length) == [[0, 3], [1, 2]]
    assert sorted(share.tolist() for share in by_square) == [[0], [1, 2, 3]]


def test_a_shared_prompt_counts_once() -> None:
    shapes = [(0, 100), (0, 100), (0, 100), (1, 100), (2, 60), (3, 110)]
    alike, apart = (balanced_shares(make_batch(shapes, shared), 2, attention_cost=0.0) for shared in (90, 0))
    assert {tuple(share.tolist()) for share in apart} == {(0, 1, 2), (3, 4, 5)}  # 300 and 270
    assert {tuple(share.tolist()) for share in alike} == {(0, 1, 2, 4), (3, 5)}  # 90 + 30 + 60 and 210


def test_fewer_groups_than_ranks_leave_shares_empty() -> None:
    found = balanced_shares(make_batch([(4, 3), (4, 9)]), 3)
    assert sorted(share.tolist() for share in found) == [[], [], [0, 1]]
    assert all(share.dtype == torch.long for share in found)


def test_one_process_alone_keeps_the_batch_and_adds_nothing() -> None:
    batch = make_batch([(0, 3), (1, 2)])
    assert SOLO.local_shard(batch) is batch
    assert SOLO.sum_over_ranks({"a": 1.5}) == {"a": 1.5}
    assert SOLO.max_over_ranks(3) == 3
    assert SOLO.any_process(True)
    assert not SOLO.any_process(False)
    whole = SOLO.gather_batch(batch, {"logp": torch.zeros(5)})
    assert whole.batch is batch
    assert torch.equal(torch.arange(5)[whole.own_tokens], torch.arange(5))


def test_sizes_must_make_the_number_of_processes() -> None:
    assert Parallel().sizes(8) == (1, 8, 1, 1, 1, 1)
    assert Parallel(data=(2, 2), tensor=2).sizes(8) == (1, 4, 1, 1, 2, 2)
    assert Parallel(context=4, data=2).sizes(8) == (1, 2, 4, 1, 1, 1)
    whole = Parallel(pipeline=2, context=2, expert=4, tensor=2, data=(3, 2)).sizes(192)
    assert (whole.data, whole.processes, whole.batch_shards, whole.shards) == (6, 192, 24, 2 * 2 * 4)
    for wrong in (
        Parallel(tensor=3),
        Parallel(data=4),
        Parallel(data=(2, 2)),
        Parallel(pipeline=16),
        Parallel(expert=5),
    ):
        with pytest.raises(UserError, match="does not make 8 processes"):
            wrong.sizes(8)


# --- refused layouts ---------------------------------------------------------------------------------------------------

ARCH = Architecture("qwen3", 11, 32, 1, 6, 3, 8, 48, 64)
BASE = ["model.path=somewhere", "sft.data.task=sort_digits"]


def test_one_process_is_alone_and_cannot_be_told_to_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert join_process_group(Parallel(), on_gpu=False) is SOLO
    with pytest.raises(UserError, match="torchrun"):
        join_process_group(Parallel(context=2), on_gpu=False)


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
        (["parallel.tensor=2", "model.lora.base=nf4"], r"cannot split matrices in 4 bits \(model.lora.base=nf4\)"),
        (["parallel.context=2", "model.backend=transformers"], "native decoder"),
        (["parallel.offload=true", "model.device=cpu"], "everything is in host memory"),
        (["parallel.offload=true", "sft.optimizer.offload=true"], "optimizer.offload has no effect"),
        (["parallel.data=0"], "data: got 0, expected an integer of 1 or more"),
        (["parallel.shard=2"], "parallel.shard is now parallel.data"),
        (["parallel.replicate=2"], "parallel.replicate is now part of parallel.data"),
        (["parallel.sequence=2"], "parallel.sequence is now parallel.context"),
        (["parallel.pipeline=2", "model.backend=transformers"], "parallel.pipeline needs the native decoder"),
        (["parallel.expert=2", "sft.activations=selective"], "parallel.expert splits: use recompute or keep"),
        (["parallel.expert=2", "model.backend=transformers"], "parallel.expert needs the native decoder"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_the_config(overrides: list[str], reason: str) -> None:
    assert load(SftConfig, None, BASE).config.parallel == Parallel()
    with pytest.raises(UserError, match=reason):
        load(SftConfig, None, [*BASE, *overrides])


@pytest.mark.parametrize(("parts", "what"), [(2, "3 key/value heads"), (4, "6 query heads"), (5, "6 query heads")])
def test_heads_must_divide(parts: int, what: str) -> None:
    with pytest.raises(UserError, match=f"parallel.tensor={parts} does not divide the model's {what}"):
        check_divisible(ARCH, parts)
    check_divisible(ARCH, 3)
    part = local_architecture(ARCH, 3)
    assert (part.num_heads, part.num_kv_heads, part.mlp_size, part.hidden_size) == (2, 1, 16, 32)
