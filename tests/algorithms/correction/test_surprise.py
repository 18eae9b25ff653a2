"""Surprise against entropy: what draws of the policy itself give, what others give, and a temperature's factor."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from burnish.algorithms.correction.mismatch_diagnostics import MAX_TOKENS, surprise_metrics
from burnish.core.batch import Batch

PLACES, VOCABULARY = 4000, 24


def places(seed: int, sharpness: float = 4.0) -> tuple[torch.Generator, Tensor]:
    """[N, V] logits from open to certain."""
    generator = torch.Generator().manual_seed(seed)
    scale = sharpness * torch.rand(PLACES, 1, generator=generator, dtype=torch.float64)
    return generator, scale * torch.randn(PLACES, VOCABULARY, generator=generator, dtype=torch.float64)


def of(
    seed: int, drawn: Tensor | None = None, reported: Tensor | None = None, sharpness: float = 4.0
) -> dict[str, float]:
    """Tokens of the logits `drawn`, with the log-probs of `reported`; None are the trainer's own."""
    generator, own = places(seed, sharpness)
    drawn, reported = own if drawn is None else drawn, own if reported is None else reported
    tokens = torch.multinomial(drawn.softmax(-1), 1, generator=generator)
    logp, engine = (x.log_softmax(-1).gather(1, tokens).squeeze(1) for x in (own, reported))
    return measured(logp, engine, -(own.softmax(-1) * own.log_softmax(-1)).sum(-1))


def measured(logp: Tensor, engine: Tensor, entropy: Tensor | None, mask: Tensor | None = None) -> dict[str, float]:
    mask = torch.ones_like(logp, dtype=torch.bool) if mask is None else mask
    columns = {"action_mask": mask, "loss_mask": mask, "behaviour_logp": engine}
    batch = Batch(torch.arange(len(logp)), torch.tensor([0, len(logp)]), columns)
    return {k.removeprefix("mismatch/"): v for k, v in surprise_metrics(batch, logp, entropy).items()}


def test_the_numbers_by_hand() -> None:
    logp, engine, entropy = (torch.tensor(x) for x in ([-1.0, -0.5], [-1.5, -0.25], [0.5, 1.0]))
    found = measured(logp, engine, entropy)  # x = -0.5, 0.5 and l = 0.5, -0.25
    assert found["surprise_excess"] == pytest.approx(0)
    assert found["surprise_error"] == pytest.approx(math.sqrt(0.5 * (2 + math.log(2)) + 2) / 1.5)
    assert found["surprise_gap"] == pytest.approx(0.75 / 1.5)
    assert found["heat"] == pytest.approx(-0.375 / 0.5)
    assert found["heat_fit"] == pytest.approx(-0.375 / math.sqrt(0.5 * 0.3125))
    many = measured(logp.repeat(9) * 20, engine.repeat(9), entropy.repeat(9))  # x = -19.5, -9
    assert many["surprise_error"] == pytest.approx(math.sqrt(9 * (19.5**2 + 81)) / 13.5)


@pytest.mark.parametrize("sharpness", [1.0, 4.0, 12.0, 40.0])
def test_draws_of_the_policy_itself_are_as_surprising_as_its_entropy(sharpness: float) -> None:
    errors = []
    for seed in range(40):
        found = of(seed, sharpness=sharpness)
        errors.append(found["surprise_excess"] / found["surprise_error"])
        assert found["surprise_gap"] == found["heat"] == found["heat_fit"] == 0
    assert max(map(abs, errors)) < 4
    assert abs(sum(errors)) / math.sqrt(40) < 3  # on average neither more nor less


def test_a_tail_left_out_and_another_temperature_show_where_no_gap_does() -> None:
    for seed in range(3):
        own = places(seed)[1]
        p, order = own.softmax(-1).sort(-1, descending=True)
        out = torch.zeros_like(p, dtype=torch.bool).scatter(1, order, p.cumsum(-1) - p >= 0.9)
        for drawn, sign in ((own.masked_fill(out, -torch.inf), -1), (own / 0.8, -1), (own / 1.25, 1)):
            found = of(seed, drawn=drawn)
            assert sign * found["surprise_excess"] > 5 * found["surprise_error"]
            assert found["surprise_gap"] == 0


@pytest.mark.parametrize("factor", [0.8, 0.9, 1.1, 1.25])
@pytest.mark.parametrize("is_drawn", [True, False])
def test_the_factor_of_a_wrong_temperature_is_found(factor: float, is_drawn: bool) -> None:
    own = places(0)[1]
    found = of(0, drawn=own / factor if is_drawn else None, reported=own / factor)
    assert found["heat"] == pytest.approx(1 - 1 / factor, rel=0.1)
    assert abs(found["heat_fit"]) > 0.95


def test_noise_has_no_heat() -> None:
    generator, own = places(0)
    noisy = own + 0.2 * torch.randn(own.shape, generator=generator, dtype=torch.float64)
    assert abs(of(0, drawn=noisy, reported=noisy)["heat_fit"]) < 0.4


def test_only_tokens_in_the_loss_count_and_no_more_than_enough_of_them() -> None:
    logp, entropy = torch.tensor([-1.0, -9.0, -2.0]), torch.tensor([1.0, 1.0, 1.0])
    mask = torch.tensor([True, False, True])
    assert measured(logp, logp, entropy, mask) == measured(logp[mask], logp[mask], entropy[mask])
    long = torch.cat([torch.full((MAX_TOKENS,), -1.0), torch.full((10,), -100.0)])
    assert measured(long, long, torch.ones_like(long))["surprise_excess"] == 0


def test_there_is_nothing_to_say_without_entropies_or_tokens_and_nothing_infinite_without_doubt() -> None:
    logp = torch.tensor([-1.0, -2.0])
    assert measured(logp, logp, None) == {}
    assert measured(logp, logp, logp, torch.zeros(2, dtype=torch.bool)) == {}
    for logp in (torch.zeros(3), torch.tensor([-math.inf, 0.0, -1.0])):
        assert all(math.isfinite(v) for v in measured(logp, torch.zeros(3), torch.zeros(3)).values())
