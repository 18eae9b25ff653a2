"""PPO's clip on token and sequence ratios: the worked numbers of ALGORITHMS.md 5.1 to 5.5, 9.7 and 16 on F1."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from burnish.algorithms.losses.loss_view import LossView
from burnish.algorithms.losses.ratios_and_clips import no_clip, sequence_ratio, sequence_token_ratio, token_ratio
from burnish.core.batch import Batch
from tests.algorithms.functions_with_defaults import ppo_clip

Look = Callable[..., Any]
PPO = [-1.2, -0.67032, -1.2, -1, 0.818731, 1.822119, 2.935437, 0.64, 1.079887, -0.72, -0.6, -0.663103, -0.444491]


def clip_of(
    view: LossView, function: Any = ppo_clip, ratio: Any = token_ratio, **options: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    anchor = view.column("old_logp")
    loss, marks = function(view, ratio(view, anchor), view.column("advantages"), anchor, **options)
    return loss.detach(), marks


def close(got: Tensor, expected: list[float], atol: float = 1e-6) -> None:
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), atol=atol, rtol=0)


def rows(*values: float) -> list[float]:
    """A value a sequence of F1, at each of its tokens."""
    return [v for v, n in zip(values, (4, 2, 3, 4), strict=True) for _ in range(n)]


def test_ppo_clip(f1: Batch, look: Look) -> None:
    loss, marks = clip_of(look(f1).view)
    close(loss, PPO)
    assert set(marks) == {"pg_clipfrac"}
    assert float(marks["pg_clipfrac"].double().mean()) == pytest.approx(0.307692, abs=1e-6)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 0.061405),
        ("token-sum", 0.79826),
        ("seq-mean-token-sum", 0.199565),
        ("seq-mean-token-mean", 0.31193),
        ("seq-mean-token-sum-norm", 0.049891),
    ],
)
def test_ppo_under_every_aggregation(f1: Batch, look: Look, mode: str, expected: float) -> None:
    assert look(f1, mode).run()[0] == pytest.approx(expected, abs=1e-6)


DUAL_GRADIENT = [0, -0.051563, 0, -0.076923, 0.062979, 0.140163, 0, 0, 0.083068, 0, -0.046154, -0.051008, -0.034192]


def test_dual_clip_values_metrics_and_gradient(f1: Batch, look: Look) -> None:
    close(clip_of(look(f1).view, dual=3.0)[0], [*PPO[:6], 2.4, *PPO[7:]])
    loss, gradient, metrics = look(f1).run(clip_options={"dual": 3.0})
    assert loss == pytest.approx(0.020217, abs=1e-6)
    assert metrics["pg_clipfrac_lower"] == pytest.approx(0.076923, abs=1e-6)
    assert metrics["pg_clipfrac"] == pytest.approx(0.307692, abs=1e-6)
    assert gradient == pytest.approx(DUAL_GRADIENT, abs=1e-6)


def test_clip_higher(f1: Batch, look: Look) -> None:
    loss, _ = clip_of(look(f1).view, low=0.2, high=0.28, dual=10.0)
    close(loss[:4], [-1.221403, -0.67032, -1.28, -1])
    assert loss.mean().item() == pytest.approx(0.049912, abs=1e-6)


@given(st.floats(-20, 20), st.floats(-3, 3), st.floats(1.3, 10))
def test_dual_clip_is_the_two_sided_clip(log_ratio: float, advantage: float, bound: float) -> None:
    """INTELLECT-2 replaces r by min(r, delta): the same function with dual = delta when delta >= 1 + high."""
    logp = torch.tensor([log_ratio], dtype=torch.float64)
    view = LossView(torch.tensor([0, 1]), {}, {}, logp)
    r, a = logp.exp(), torch.tensor([advantage], dtype=torch.float64)
    ratio = math.exp(log_ratio)
    two_sided = max(-advantage * min(ratio, bound), -advantage * min(max(ratio, 0.8), 1.2))
    assert float(ppo_clip(view, r, a, torch.zeros_like(r), dual=bound)[0]) == pytest.approx(
        two_sided, rel=1e-12, abs=1e-12
    )


def test_no_clip_is_the_plain_surrogate(f1: Batch, look: Look) -> None:
    loss, marks = clip_of(look(f1).view, no_clip)
    expected = [-1.221403, -0.67032, -1.648721, -1, 0.818731, 1.822119, 2.935437, 0.178504, 1.079887, -1.99207, -0.6, -0.663103, -0.444491]  # fmt: skip
    close(loss, expected)
    assert marks == {}


def test_ppo_anchored_at_the_sampler(f1: Batch, look: Look) -> None:
    """Bypass mode: the anchor is what the engine reported."""
    sampled = [-1.05, -0.45, -2.1, -0.1, -0.7, -1.3, -1.75, -0.9, -2.6, -2.2, -0.4, -0.5, -1.2]
    old = f1.token["old_logp"].clone()
    old[f1.loss_mask] = torch.tensor(sampled, dtype=torch.float64)
    assert look(f1.with_token(old_logp=old)).run(clip_options={"dual": 3.0})[0] == pytest.approx(0.140278, abs=1e-6)


# --- off-policy sequence mask ----------------------------------------------------------------------------------------


def backwards(f1: Batch) -> Batch:
    """F1 with old and new exchanged: mean_t(old - new) is .075, .2, .033333, .25."""
    return f1.with_token(new=f1.token["old_logp"], old_logp=f1.token["new"])


@pytest.mark.parametrize(
    ("drift", "dropped"), [(0.3, (0, 0, 0, 0)), (0.1, (0, 1, 0, 0)), (0.03, (0, 1, 1, 0)), (0.0, (0, 1, 1, 0))]
)
def test_a_sequence_that_drifted_leaves_the_loss_if_its_advantage_is_negative(
    f1: Batch, look: Look, drift: float, dropped: tuple[float, ...]
) -> None:
    seen = look(backwards(f1), "seq-mean-token-mean")
    loss, marks = clip_of(seen.view, drift=drift)
    plain, _ = clip_of(seen.view)
    close(marks["drift_dropped"].double(), rows(*dropped))
    close(loss, [0.0 if gone else x for x, gone in zip(plain.tolist(), rows(*dropped), strict=True)], atol=0)
    gradient = seen.run(clip_options={"drift": drift})[1]
    assert [g == 0 for g, gone in zip(gradient, rows(*dropped), strict=True) if gone] == [True] * int(
        sum(rows(*dropped))
    )


def test_drift_at_the_bound_stays(f1: Batch, look: Look) -> None:
    mean = float(
        look(backwards(f1)).view.mean(-(backwards(f1).token["new"] - backwards(f1).token["old_logp"])[f1.loss_mask])[1]
    )
    assert not bool(clip_of(look(backwards(f1)).view, drift=mean)[1]["drift_dropped"][4])
    assert bool(clip_of(look(backwards(f1)).view, drift=mean - 1e-9)[1]["drift_dropped"][4])


def test_with_advantages_per_token_only_the_negative_ones_leave(f1: Batch, look: Look) -> None:
    signs = torch.where(torch.arange(f1.num_tokens) % 2 == 0, 1.0, -1.0).double()
    batch = backwards(f1).with_token(advantages=signs)
    view = look(batch).view
    dropped = clip_of(view, drift=0.1)[1]["drift_dropped"]
    assert dropped.tolist() == [i in (1, 3) and a < 0 for i, a in zip(view.sequence_ids.tolist(), view.column("advantages").tolist(), strict=True)]  # fmt: skip
    assert 0 < int(dropped.sum()) < 6


# --- sequence ratios -------------------------------------------------------------------------------------------------

GSPO_GRADIENT = rows(-0.067368, 0.152675, 0.068926, 0)


@pytest.mark.parametrize("ratio", ["sequence", "seq_token"])
def test_gspo_and_gspo_token(f1: Batch, look: Look, ratio: str) -> None:
    seen = look(f1, "seq-mean-token-mean")
    narrow = seen.run(ratio=ratio, clip_options={"low": 3e-4, "high": 4e-4}, scope="sequence")
    assert narrow[0] == pytest.approx(0.11196971, abs=1e-8)
    loss, gradient, metrics = seen.run(ratio=ratio, clip_options={"low": 0.2, "high": 0.28}, scope="sequence")
    assert loss == pytest.approx(0.050659, abs=1e-6)
    assert gradient == pytest.approx(GSPO_GRADIENT, abs=1e-6)
    assert metrics["pg_clipfrac"] == pytest.approx(4 / 13)  # the tokens of the last row


@pytest.mark.parametrize("seed", range(3))
def test_gspo_token_is_gspo_when_advantages_are_constant(ragged: Callable[[int], Batch], look: Look, seed: int) -> None:
    seen = look(ragged(seed), "seq-mean-token-mean")
    one, other = (seen.run(ratio=r, clip_options={"high": 0.3}) for r in ("sequence", "seq_token"))
    assert one[0] == pytest.approx(other[0], abs=1e-12)
    assert one[1] == pytest.approx(other[1], abs=1e-12)
    assert any(one[1])


def test_gspo_token_without_its_stop_gradient_fails_the_oracle(f1: Batch, look: Look) -> None:
    seen = look(f1, "seq-mean-token-mean")
    view, anchor = seen.view, seen.view.column("old_logp")
    leaky = sequence_ratio(view, anchor) * (view.logp - view.logp.detach()).exp()
    torch.testing.assert_close(leaky, sequence_token_ratio(view, anchor))
    loss, _ = ppo_clip(view, leaky, view.column("advantages"), anchor, low=0.2, high=0.28)
    gradient = seen.gradient((view.column("weight") * loss).sum())[view.token["index"]]
    close(gradient, [2 * g for g in GSPO_GRADIENT], atol=2e-6)


def test_gspo_token_keeps_each_tokens_own_advantage(f1: Batch, look: Look) -> None:
    batch = f1.with_token(advantages=torch.arange(f1.num_tokens).double())
    seen = look(batch, "token-sum")
    gradient = seen.run(ratio="seq_token", clip="none")[1]
    ratio = rows(1.077884, 1.221403, 1.033895, 1.284025)
    expected = [-a * s for a, s in zip(seen.view.column("advantages").tolist(), ratio, strict=True)]
    assert gradient == pytest.approx(expected, abs=2e-5)


def test_luspo_is_gspo_with_token_sums(f1: Batch, look: Look) -> None:
    loss = look(f1, "seq-mean-token-sum").run(ratio="sequence", clip_options={"low": 0.2, "high": 0.28})[0]
    one = [-1.077884, 1.221403, 0.827116, -0.768]
    assert loss == pytest.approx(sum(n * x for n, x in zip((4, 2, 3, 4), one, strict=True)) / 4, abs=1e-5)
