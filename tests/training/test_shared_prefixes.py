"""Sequences with common prefixes share their forward and backward passes: the same numbers for less work."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from burnish.algorithms.losses.policy_loss import PolicyLoss
from burnish.algorithms.terms.loss_terms import aggregation_weights
from burnish.config.model import Lora, Optimizer
from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, initialise
from burnish.models.heads import ValueModel
from burnish.models.kernels import attention
from burnish.models.kernels.shared_prefix import computed_rows, expand_rows
from burnish.models.latent_shape import LatentShape
from burnish.models.lora.adapters import add_lora
from burnish.models.model_families import FAMILIES
from burnish.training.forward import Packing, micro_batches_of
from burnish.training.learner import Learner
from burnish.training.packing import prefix_trees

VOCAB = 17


def decoder(family: str = "qwen2", window: int | None = None) -> Decoder:
    record = FAMILIES[family]
    fields = {**record.fixed, **record.new_model_fields(2), "window": window, "tied": True}
    arch = Architecture(family, VOCAB, 16, 2, 4, 2, 8, 24, 256, **fields)
    if family == "deepseek_v3":
        arch = replace(arch, num_kv_heads=4, head_dim=10, latent=LatentShape(9, 7, 6, 4, 5))
    model = Decoder(arch).double()
    initialise(model, 3, std=0.4)
    return model


def batch_of(sequences: list[tuple[int, list[int], list[int]]]) -> Batch:
    """Sequences as (group, prompt, written)."""
    tokens = torch.tensor([t for _, prompt, written in sequences for t in prompt + written])
    mask = torch.tensor([k >= len(a) for _, a, b in sequences for k in range(len(a) + len(b))])
    batch = Batch(
        tokens,
        offsets_from_lengths(torch.tensor([len(a) + len(b) for _, a, b in sequences])),
        {"action_mask": mask, "loss_mask": mask},
        {
            "group_ids": torch.tensor([g for g, _, _ in sequences]),
            "advantages": torch.linspace(-1, 1, len(sequences), dtype=torch.float64),
        },
    )
    return batch.with_token(weight=aggregation_weights(batch, "token-mean").double())


def drawn(groups: list[list[int]], prompt: int, seed: int = 0) -> Batch:
    """Groups of samples by their written lengths, all prompts of a length, in no order."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> list[int]:
        return torch.randint(VOCAB, (n,), generator=generator).tolist()

    prompts = [draw(prompt) for _ in groups]
    sequences = [(g, prompts[g], draw(length)) for g, lengths in enumerate(groups) for length in lengths]
    order = torch.randperm(len(sequences), generator=generator).tolist()
    return batch_of([sequences[i] for i in order])


def gradients(model: Decoder | ValueModel, batch: Batch, shares: bool, budget: int) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients of all parameters, and the values, or the log-probs and entropies."""
    learner = Learner(copy.deepcopy(model), Optimizer(lr=1e-3, clip_norm=1e9), 1, budget, 0.9, share_prefixes=shares)
    if isinstance(model, ValueModel):
        learner.backward(batch, {"value": torch.linspace(-1, 1, batch.num_tokens, dtype=torch.float64)})
        seen = learner.outputs(batch, frozenset({"value"}))["value"]
    else:
        update = learner._one_pass(batch, PolicyLoss(entropy_coef=0.1), frozenset({"entropy"}))
        seen = torch.cat([update[2]["logp"], update[2]["entropy"]])
    return learner.optimizer.gradients(), seen


@pytest.mark.parametrize("budget", [10_000, 40, 1])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_gradient_is_that_of_sequences_computed_alone(family: str, budget: int) -> None:
    model = decoder(family, window=5 if family in ("mistral", "gemma2", "gemma3_text") else None)
    batch = drawn([[3, 9, 1, 6], [2], [12, 4, 4], [5, 5]], prompt=11)
    (expected, logp), (got, logp_shared) = (gradients(model, batch, shares, budget) for shares in (False, True))
    torch.testing.assert_close(logp_shared, logp, atol=1e-12, rtol=0)
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, atol=1e-10, rtol=0)


@st.composite
def forests(draw: st.DrawFn) -> Batch:
    """Groups of sequences of few different tokens, which have prefixes of any depth in common; also equal sequences."""
    rows = st.lists(st.integers(0, 2), min_size=2, max_size=14)
    groups = draw(st.lists(st.lists(rows, min_size=1, max_size=6), min_size=1, max_size=3))
    sequences = [
        (g, row[: (cut := draw(st.integers(1, len(row) - 1)))], row[cut:])
        for g, rows in enumerate(groups)
        for row in rows
    ]
    return batch_of(draw(st.permutations(sequences)))


@pytest.mark.parametrize("longest_in_c", [1024, 0], ids=["kernel in C", "pieces"])
@settings(max_examples=25, deadline=None)
@given(forests(), st.integers(1, 60), st.booleans())
def test_outputs_and_gradients_of_a_forest_are_those_of_single_sequences(
    longest_in_c: int, batch: Batch, budget: int, is_critic: bool
) -> None:
    model: Decoder | ValueModel = decoder()
    if is_critic:
        model = ValueModel(decoder())
        torch.nn.init.normal_(model.head)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "MAX_C_ATTENTION_LENGTH", longest_in_c)
        got, shared = gradients(model, batch, True, budget)
    expected, alone = gradients(model, batch, False, 10_000)
    torch.testing.assert_close(shared, alone, atol=1e-10, rtol=0)
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, atol=1e-10, rtol=0)


@settings(max_examples=40, deadline=None)
@given(forests(), st.integers(1, 60))
def test_micro_batches_hold_each_prefix_once_within_the_budget(batch: Batch, budget: int) -> None:
    found = micro_batches_of(batch, Packing(budget, shares=True), "loss_mask")
    assert (
        sorted(torch.cat([piece.positions for piece in found]).tolist())
        == batch.loss_mask.nonzero().squeeze(1).tolist()
    )
    for piece in found:
        rows = [row.tolist() for row in piece.batch.tokens.split(piece.batch.lengths.tolist())]
        shared = [0] * len(rows) if piece.shared_prefix is None else piece.shared_prefix.tolist()
        assert all(row[:n] == before[:n] for before, row, n in zip(rows, rows[1:], shared[1:], strict=False))
        num_tokens = sum(map(len, rows)) - sum(shared)
        assert len(rows) == 1 or num_tokens <= budget
    (whole,) = micro_batches_of(batch, Packing(10_000, shares=True), "loss_mask")
    if whole.shared_prefix is not None:
        groups = whole.batch.sequence["group_ids"].tolist()
        rows = [row.tolist() for row in whole.batch.tokens.split(whole.batch.lengths.tolist())]
        # Every sequence has its last token for itself; what comes before is computed once for a group.
        prefixes = {(g, tuple(row[:n])) for g, row in zip(groups, rows, strict=True) for n in range(1, len(row))}
        assert sum(map(len, rows)) - int(whole.shared_prefix.sum()) <= len(prefixes) + len(rows)


def test_adapters_statistics_and_the_full_kl_of_rewritten_contexts_too() -> None:
    """Three turns, each without the thinking of the one before, and a second sample of the prompt."""
    prompt, (a, b, c) = [1, 2, 3, 4, 5], ([6, 7, 8, 9], [9, 8, 7, 6], [3, 3, 3, 3])
    turns = [(0, prompt, a), (0, prompt + a[2:], b), (0, prompt + a[2:] + b[2:], c), (0, prompt, c), (1, prompt, b)]
    batch, other = batch_of(turns), decoder()
    initialise(other, 5, std=0.4)
    needs = (frozenset({"entropy", "kl"}), frozenset({"entropy", "sum_p2"}))
    model = decoder()
    add_lora(model, Lora(rank=2), seed=0)
    with torch.no_grad():  # adapters start at 0
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    found: list[list[Tensor]] = []
    for shares in (False, True):
        learner = Learner(model, Optimizer(), 1, 30, 0.9, share_prefixes=shares)
        learner.reference = lambda piece: other.distribution(
            piece.batch.tokens, piece.batch.offsets, piece.wanted, piece.shared_prefix
        )
        columns = [column for need in needs for column in learner.outputs(batch, need).values()]
        slope = torch.linspace(-1, 1, batch.num_tokens, dtype=torch.float64)
        learner.optimizer.zero_grad()
        learner.backward(batch, {"logp": slope, "entropy": slope, "kl": slope})
        found.append([*columns, *(gradient.clone() for gradient in learner.optimizer.gradients().values())])
    assert len(found[0]) > 6
    for got, expected in zip(found[1], found[0], strict=True):
        assert float(expected.abs().max()) > 0
        torch.testing.assert_close(got, expected, atol=1e-10, rtol=0)


def test_the_model_computes_a_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    whole: Callable[..., Tensor] = Decoder.forward

    def counted(self: Decoder, tokens: Tensor, *rest: object) -> Tensor:
        seen.append(tokens.shape[0])
        return whole(self, tokens, *rest)

    monkeypatch.setattr(Decoder, "forward", counted)
    batch = drawn([[4, 4, 4, 4], [6, 6]], prompt=20)
    for shares, expected in ((False, batch.num_tokens), (True, 2 * 20 + 4 * 4 + 2 * 6)):
        seen.clear()
        Learner(decoder(), Optimizer(), 1, 1000, share_prefixes=shares).logprobs(batch)
        assert seen == [expected]


def test_nothing_is_shared_where_little_is_saved() -> None:
    batch = drawn([[40, 40], [40, 40]], prompt=2)
    assert all(sum(tree.shared) >= 2 for tree in prefix_trees(batch))
    assert [piece.shared_prefix for piece in micro_batches_of(batch, Packing(1000, shares=True), "loss_mask")] == [None]


def test_prefixes_are_those_of_the_tokens() -> None:
    same = [1, 2, 3, 4]
    batch = batch_of(
        [
            (7, same, [5, 6]),
            (3, [1, 2], [9]),
            (7, same, [5, 7, 8]),
            (3, [1, 2], [9]),  # the same to its end: it keeps its last token
            (7, [1, 2, 3], [4, 5, 9]),  # a shorter prompt, continued by the same tokens
            (5, [1, 2], [3]),
            (7, [1, 2, 300], [4, 5, 6]),  # branches off before the others do
        ]
    )
    trees = prefix_trees(batch)
    assert [tree.members for tree in trees] == [[0, 2, 4, 6], [1, 3], [5]]
    assert [tree.shared for tree in trees] == [[0, 5, 5, 2], [0, 2], [0]]


def test_expanded_rows_and_their_gradient() -> None:
    offsets = torch.tensor([0, 5, 9, 13, 18])
    rows = computed_rows(offsets, torch.tensor([0, 3, 0, 2]))
    assert rows.own.tolist() == [0, 1, 2, 3, 4, 8, 9, 10, 11, 12, 15, 16, 17]
    assert rows.borrowed.tolist() == [5, 6, 7, 13, 14]
    assert rows.row_of.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7, 8, 9, 6, 7, 10, 11, 12]
    assert rows.offsets.tolist() == [0, 5, 6, 10, 13]
    x = torch.randn(13, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: expand_rows(x, rows), (x,))


def test_gradients_of_a_half_type_add_up_in_float32() -> None:
    """Sixteen samples: 1 and fifteen times 2^-9, which bfloat16 would each round away."""
    offsets = torch.arange(0, 34, 2)
    rows = computed_rows(offsets, torch.tensor([0] + [1] * 15))
    x = torch.zeros(17, 1, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.full((32, 1), 2.0**-9, dtype=torch.bfloat16)
    weight[0] = 1.0
    (expand_rows(x, rows) * weight).sum().backward()
    assert x.grad is not None
    assert float(x.grad[0]) == float(torch.tensor(1 + 15 * 2.0**-9).bfloat16())
