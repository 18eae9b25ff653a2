"""Micro-batches computed side by side: the same gradient, the same to the bit each time, within the same token budget."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from burnish.algorithms.aggregation import aggregation_weights
from burnish.algorithms.losses import Loss, PolicyLoss
from burnish.config.lora import Lora
from burnish.config.optimizer import Optimizer
from burnish.core.batch import Batch
from burnish.core.hands import Hands
from burnish.core.segments import offsets_from_lengths
from burnish.models.activations import set_activations
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, initialise
from burnish.models.lora import add_lora
from burnish.models.value import ValueModel
from burnish.training import forward, side_by_side
from burnish.training.critic import Critic
from burnish.training.forward import Packing, pieces
from burnish.training.learner import Learner
from burnish.training.meter import Meter
from burnish.training.optimizers.adamw import AdamW
from burnish.training.side_by_side import added, differentiate, num_hands

VOCAB = 11
WHOLE = PolicyLoss(clip_options={"low": 0.1, "high": 0.2}, entropy_coef=0.05)


@pytest.fixture(autouse=True)
def few_tokens_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "LEAST_TOKENS", 1)


def make_model(dtype: torch.dtype = torch.float64) -> Decoder:
    arch = Architecture("qwen3", VOCAB, 8, 2, 2, 1, 4, 12, 64, qkv_bias=True, qk_norm=True)
    model = Decoder(arch).to(dtype)
    initialise(model, seed=0, std=0.4)
    return model


def make_batch(dtype: torch.dtype = torch.float64) -> Batch:
    """Six groups of three samples of different lengths, behind prompts they share."""
    generator = torch.Generator().manual_seed(1)
    rest = torch.randint(2, 9, (18,), generator=generator)
    offsets = offsets_from_lengths(rest + 3)
    tokens = torch.randint(VOCAB, (int(offsets[-1]),), generator=generator)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    for s, start in enumerate(offsets[:-1].tolist()):
        first = int(offsets[s - s % 3])
        tokens[start : start + 3] = tokens[first : first + 3]
        mask[start : start + 3] = False
    columns = {"action_mask": mask, "loss_mask": mask, "old_logp": torch.full(mask.shape, -2.5, dtype=dtype)}
    sequence = {"advantages": torch.randn(18, generator=generator, dtype=dtype), "group_ids": torch.arange(18) // 3}
    batch = Batch(tokens, offsets, columns, sequence)
    return batch.with_token(weight=aggregation_weights(batch, "token-mean").to(dtype))


def updated(hands: int, loss: Loss = WHOLE, dtype: torch.dtype = torch.float64, **options: Any) -> dict[str, Tensor]:
    """Gradients, weights and seen columns of two updates."""
    learner = Learner(make_model(dtype), Optimizer(lr=0.01, clip_norm=1e9), 10, 120, hands=hands, **options)
    found: dict[str, Tensor] = {}
    for k in range(2):
        update = learner.update(make_batch(dtype), loss)
        assert update.logp is not None
        assert update.entropy is not None
        found |= {f"{name}/grad{k}": p.grad.clone() for name, p in learner.names.items() if p.grad is not None}
        found |= {
            f"logp{k}": update.logp,
            f"entropy{k}": update.entropy,
            f"loss{k}": torch.tensor(update.stats["loss"]),
        }
    return found | {name: p.detach().clone() for name, p in learner.names.items()}


@pytest.mark.parametrize("hands", [2, 3, 5])
@pytest.mark.parametrize("scope", ["token", "batch"])
def test_any_number_of_hands_gives_the_same_gradient(hands: int, scope: Literal["token", "batch"]) -> None:
    """In one pass, and in the two of a loss that must see the whole batch."""
    loss = replace(WHOLE, scope=scope)
    alone, together = updated(1, loss), updated(hands, loss)
    assert alone.keys() == together.keys()
    for name, tensor in alone.items():
        torch.testing.assert_close(together[name], tensor, rtol=0, atol=1e-10, msg=name)


def test_the_same_update_is_the_same_to_the_bit_each_time() -> None:
    first = updated(3, dtype=torch.float32)
    for _ in range(5):
        again = updated(3, dtype=torch.float32)
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_a_second_loss_adds_to_the_gradient_of_the_first() -> None:
    def gradients(hands: int) -> list[Tensor]:
        learner = Learner(make_model(), Optimizer(lr=0.01, clip_norm=1e9), 10, 120, hands=hands)
        learner.update(make_batch(), WHOLE, also=(make_batch(), replace(WHOLE, entropy_coef=1.0)))
        return [p.grad for p in learner.names.values() if p.grad is not None]

    for one, two in zip(gradients(1), gradients(2), strict=True):
        torch.testing.assert_close(two, one, rtol=0, atol=1e-10)


def test_log_probs_without_gradient_are_the_same() -> None:
    one, two = (Learner(make_model(), Optimizer(), 10, 60, hands=n).logprobs(make_batch()) for n in (1, 2))
    torch.testing.assert_close(two, one, rtol=0, atol=1e-12)
    assert bool(two.any())
    assert not two.requires_grad


def test_a_critic_learns_the_same() -> None:
    batch = make_batch()
    batch = batch.with_token(returns=torch.rand(batch.num_tokens, dtype=torch.float64), values=batch.token["old_logp"])
    weights = []
    for hands in (1, 2):
        critic = Critic(ValueModel(make_model()), Optimizer(lr=0.01), 10, 120, hands=hands)
        critic.update(batch)
        weights.append([p.detach().clone() for p in critic.model.parameters()])
    for one, two in zip(*weights, strict=True):
        torch.testing.assert_close(two, one, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("budget", "hands"), [(60, 2), (120, 2), (120, 3), (400, 2), (400, 4)])
def test_what_is_computed_at_once_is_within_one_token_budget(budget: int, hands: int) -> None:
    found = pieces(make_batch(), Packing(budget, hands=hands), "loss_mask")
    assert len(found) % hands == 0
    assert max(piece.batch.num_tokens for piece in found) <= budget // hands
    wanted = torch.cat([piece.positions for piece in found]).sort().values
    assert wanted.tolist() == make_batch().loss_mask.nonzero()[:, 0].tolist()


def test_a_small_batch_is_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "LEAST_TOKENS", 1024)
    assert len(pieces(make_batch(), Packing(4096, hands=4), "loss_mask")) == 1


def test_hands_are_for_small_models_whose_forward_passes_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert [num_hands(model, budget) for budget in (1000, 4096, 8192, 10**6)] == [1, 2, 4, 8]
    assert num_hands(ValueModel(model), 8192) == 4
    assert num_hands(copy.deepcopy(model).bfloat16(), 8192) == 1
    assert num_hands(torch.nn.Linear(2, 2), 8192) == 1
    offloaded, exact = copy.deepcopy(model), copy.deepcopy(model)
    set_activations(offloaded, "offload")
    exact.exact = lambda tokens, offsets, wanted, temperature: wanted
    assert num_hands(offloaded, 8192) == num_hands(exact, 8192) == 1
    size = sum(p.numel() for p in model.parameters())
    quantised = copy.deepcopy(model)
    add_lora(quantised, Lora(rank=1, targets=["v_proj"], base="nf4"), 0)
    for most, hands in ((size - 1, 1), (2 * size, 4)):  # numbers in 4 bits are numbers too
        monkeypatch.setattr(side_by_side, "MOST_PARAMETERS", most)
        assert num_hands(model, 8192) == num_hands(quantised, 8192) == hands


def test_gradients_that_only_one_hand_has_are_kept_and_nothing_is_written_to() -> None:
    a, b = torch.ones(2), torch.full((2,), 2.0)
    found = added([a, None, b, None], [b, a, None, None])
    assert found[0] is not None
    assert found[0].tolist() == [3.0, 3.0]
    assert found[1] is a
    assert found[2] is b
    assert found[3] is None
    assert a.tolist() == [1.0, 1.0]


def test_whole_groups_are_computed_one_after_the_other() -> None:
    """Each may need all of the token budget."""
    batch = make_batch()
    whole, divided = (pieces(batch, Packing(120, hands=3), "loss_mask", whole_groups=w) for w in (True, False))
    assert max(piece.batch.num_tokens for piece in whole) > 120 // 3 >= max(piece.batch.num_tokens for piece in divided)
    grouped = [updated(hands, replace(WHOLE, scope="groups")) for hands in (1, 3)]
    for name, tensor in grouped[0].items():
        assert torch.equal(grouped[1][name], tensor), name


def test_long_sequences_are_computed_one_after_the_other() -> None:
    """Two that need most of the token budget each would need twice the memory."""
    batch, numbers = make_batch(), list[int | None]()
    longest, weight = int(batch.lengths.max()), torch.nn.Parameter(torch.ones(2))

    class Counted(Hands):
        def map(self, function: Any, items: Any, most: int | None = None) -> Any:
            numbers.append(most)
            return super().map(function, items, most)

    for budget in (longest, 2 * longest, 3 * longest):
        found = pieces(batch, Packing(budget, hands=3), "loss_mask")
        optimizer, meter = AdamW({"weight": weight}, Optimizer()), Meter(torch.device("cpu"), None)
        differentiate(found, lambda piece: (weight.sum() * piece.num_rows, None), Counted(3), budget, optimizer, meter)
    assert numbers == [1, 2, 3]
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0 * batch.num_tokens] * 2


def test_rows_of_a_micro_batch_count_what_is_shared_once() -> None:
    batch = make_batch()
    (alone,), (shared,) = (pieces(batch, Packing(1000, shares=s), "loss_mask") for s in (False, True))
    assert alone.num_rows == batch.num_tokens
    assert shared.num_rows == batch.num_tokens - 6 * 2 * 3
