from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from burnish.core.engine import SamplingOptions
from burnish.core.random_keys import uniforms
from burnish.inference.native.sampler import sample
from burnish.models.kernels.cpu import cpu_ops
from burnish.models.kernels.cpu.c_library import c_kernels

OPTIONS = [
    SamplingOptions(),
    SamplingOptions(temperature=0.5),
    SamplingOptions(temperature=2.0, top_k=4),
    SamplingOptions(top_p=0.7),
    SamplingOptions(temperature=1.5, top_k=5, top_p=0.8),
    SamplingOptions(top_k=1),
    SamplingOptions(top_k=100),
    SamplingOptions(top_p=1e-6),
    SamplingOptions(min_p=0.2),
    SamplingOptions(temperature=1.5, top_k=6, top_p=0.9, min_p=0.3),
    SamplingOptions(min_p=1.0),
]
LOGITS = [1.0, -2.0, 0.3, 2.0, 0.0, -1.0, 1.4]
ALMOST_ONE = 1 - 2.0**-53


def draw(logits: Tensor, uniform: Tensor, options: list[SamplingOptions]) -> tuple[Tensor, Tensor]:
    return sample(
        logits,
        uniform,
        torch.tensor([o.temperature for o in options], dtype=torch.float64),
        torch.tensor([o.top_k for o in options]),
        torch.tensor([o.top_p for o in options], dtype=torch.float64),
        torch.tensor([o.min_p for o in options], dtype=torch.float64),
    )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_frequencies_and_logprobs_are_those_of_the_truncated_renormalised_distribution(
    tools: Any, options: SamplingOptions
) -> None:
    n = 20_000
    logits = torch.tensor(LOGITS, dtype=torch.float64)
    tokens, logp = draw(logits.expand(n, -1), uniforms(torch.full((n,), 77), torch.arange(n)), [options] * n)
    p = tools.distribution(logits, options)
    assert torch.allclose(logp, p.log()[tokens], rtol=0, atol=1e-12)
    count = torch.bincount(tokens, minlength=len(LOGITS)).double()
    assert count[p == 0].sum() == 0
    count, expected = count[p > 0], n * p[p > 0]
    freedom = len(expected) - 1
    # A chi-square variable exceeds its mean by four of its deviations about once in a thousand; the keys are fixed.
    assert ((count - expected) ** 2 / expected).sum() <= freedom + 4 * (2 * freedom) ** 0.5


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.floats(-60, 60) | st.just(-torch.inf), min_size=2, max_size=8).filter(lambda x: max(x) > -61),
    uniform=st.sampled_from([2.0**-54, 1e-300, 0.5, 1 - 1e-9, ALMOST_ONE]) | st.floats(1e-300, ALMOST_ONE),
    option=st.sampled_from(OPTIONS),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_a_token_without_probability_is_never_drawn(
    logits: list[float], uniform: float, option: SamplingOptions, dtype: torch.dtype
) -> None:
    rows = torch.tensor([logits], dtype=dtype)
    tokens, logp = draw(rows, torch.tensor([uniform], dtype=torch.float64), [option])
    assert 0 <= int(tokens) < len(logits)
    assert torch.isfinite(rows[0, int(tokens)])
    assert torch.isfinite(logp).all()
    assert float(logp) <= 1e-6
    if option.top_k == 1:
        assert rows[0, int(tokens)] >= rows.max() - 1e-4  # nearer logits have equal log-probs after rounding


def test_the_extremes_of_the_uniform_give_the_first_and_the_last_possible_token() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, 0.0, -torch.inf]] * 2)
    tokens, _ = sample(logits, torch.tensor([2.0**-54, ALMOST_ONE], dtype=torch.float64), torch.ones(2).double())
    assert tokens.tolist() == [1, 3]


def test_greedy_takes_the_most_likely_token_and_reports_its_plain_logprob() -> None:
    logits = torch.tensor([LOGITS, LOGITS], dtype=torch.float64)
    uniform = torch.tensor([0.999, 0.001], dtype=torch.float64)
    tokens, logp = sample(logits, uniform, torch.tensor([0.0, 0.0], dtype=torch.float64))
    assert tokens.tolist() == [3, 3]
    assert torch.equal(logp, logits.log_softmax(-1)[:, 3])


def test_rows_with_different_options_do_not_disturb_one_another() -> None:
    logits = torch.tensor(LOGITS, dtype=torch.float64).expand(len(OPTIONS), -1)
    uniform = uniforms(torch.arange(len(OPTIONS)), torch.zeros(len(OPTIONS), dtype=torch.int64))
    tokens, logp = draw(logits, uniform, OPTIONS)
    for row, options in enumerate(OPTIONS):
        alone = sample(
            logits[row : row + 1],
            uniform[row : row + 1],
            torch.tensor([options.temperature], dtype=torch.float64),
            torch.tensor([options.top_k]) if options.top_k else None,
            torch.tensor([options.top_p], dtype=torch.float64) if options.top_p < 1 else None,
            torch.tensor([options.min_p], dtype=torch.float64) if options.min_p > 0 else None,
        )
        assert int(tokens[row]) == int(alone[0])
        assert float(logp[row]) == pytest.approx(float(alone[1]), abs=1e-12)


def test_a_top_p_of_one_keeps_the_whole_tail() -> None:
    """Also next to a truncated row, and with a tail below the resolution of a float32 running sum near 1."""
    logits = torch.tensor([[0.0, -25.0], [0.0, 0.0]])
    top_p = torch.tensor([1.0, 0.5], dtype=torch.float64)
    uniform = torch.tensor([ALMOST_ONE, 0.5], dtype=torch.float64)
    tokens, logp = sample(logits, uniform, torch.ones(2, dtype=torch.float64), None, top_p)
    assert tokens.tolist() == [1, 0]
    assert logp[0].item() == pytest.approx(-25.0, abs=1e-3)


@pytest.mark.parametrize(("min_p", "kept"), [(0.0, 4), (0.1, 4), (0.26, 3), (0.51, 2), (0.99, 2), (1.0, 2)])
def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest(min_p: float, kept: int) -> None:
    """By hand: the tokens are 1, 1, 1/2 and 1/4 times as likely as the likeliest."""
    p = torch.tensor([0.4, 0.2, 0.1, 0.4], dtype=torch.float64) / 1.1
    options = [SamplingOptions(min_p=min_p)] * 400
    uniform = (torch.arange(400, dtype=torch.float64) + 0.5) / 400
    tokens, logp = draw(p.log().expand(400, -1), uniform, options)
    left = p.where(p >= p.max() * min_p, 0.0) if min_p < 1 else torch.tensor([0.5, 0, 0, 0.5], dtype=torch.float64)
    left = left / left.sum()
    assert sorted(set(tokens.tolist())) == left.nonzero()[:, 0].tolist()
    assert len(set(tokens.tolist())) == kept
    assert torch.allclose(logp, left.log()[tokens], rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_sampled_in_float32(dtype: torch.dtype) -> None:
    logits = torch.tensor([LOGITS], dtype=dtype)
    _, logp = sample(logits, torch.tensor([0.5], dtype=torch.float64), torch.ones(1, dtype=torch.float64))
    assert logp.dtype == torch.float32


NEVER = torch.tensor([3, 6])
"""The likeliest token, and the last."""


@pytest.mark.parametrize("options", [*OPTIONS, SamplingOptions(temperature=0)], ids=str)
def test_tokens_that_are_never_drawn_count_in_the_log_probs_of_the_model_and_in_no_truncation(
    tools: Any, options: SamplingOptions
) -> None:
    n = 2000
    logits = torch.tensor(LOGITS, dtype=torch.float64)
    open_logits = logits.index_fill(0, NEVER, -torch.inf)
    is_truncated = options.top_k > 0 or options.top_p < 1 or options.min_p > 0
    given = uniforms(torch.full((n,), 5), torch.arange(n))
    rows = [options, SamplingOptions()] * (n // 2)  # a row without truncation beside each
    columns = [torch.tensor([getattr(o, name) for o in rows]).double() for name in ("temperature", "top_p", "min_p")]
    top_k = torch.tensor([o.top_k for o in rows])
    tokens, logp = sample(logits.expand(n, -1), given, columns[0], top_k, *columns[1:], never=NEVER)
    assert not torch.isin(tokens, NEVER).any()
    plain = logits.log_softmax(-1)
    assert torch.allclose(logp[1::2], plain[tokens[1::2]], rtol=0, atol=1e-12)
    expected = tools.distribution(open_logits if is_truncated else logits, options).log()
    if options.temperature:
        assert torch.allclose(logp[::2], expected[tokens[::2]], rtol=0, atol=1e-12)
    else:
        assert set(tokens[::2].tolist()) == {int(open_logits.argmax())}


@pytest.mark.parametrize("vocab", [7, 16, 61])
def test_the_draw_in_c_never_draws_them_either(vocab: int) -> None:
    logits = 2 * torch.randn(500, vocab, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits[:, 3] += 3
    library = c_kernels(logits)
    if library is None:
        pytest.skip("no C compiler here")
    uniform = uniforms(torch.full((500,), 5), torch.arange(500))
    temperature = torch.tensor([0.0, 0.7, 1.0, 2.0, 1.3] * 100, dtype=torch.float64)
    found = cpu_ops.draw(library, logits, uniform, temperature, NEVER)
    expected = sample(logits, uniform, temperature, never=NEVER)
    assert torch.equal(found[0], expected[0])
    assert torch.allclose(found[1], expected[1], rtol=0, atol=1e-10)
    assert not torch.isin(found[0], NEVER).any()
