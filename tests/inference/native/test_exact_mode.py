"""Exact mode: the learner's log-prob of every sampled token equals the engine's bit for bit, for any other requests."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from burnish.config.errors import UserError
from burnish.config.rollout import Rollout
from burnish.core.engine import Completion, Request, SamplingOptions
from burnish.core.random_keys import fold
from burnish.inference.native.paged_engine import PagedEngine
from burnish.models.cached_forward import exact_logprobs
from burnish.models.decoder import Decoder
from burnish.models.expert_shape import ExpertShape
from burnish.models.kernels.elementwise import swiglu
from burnish.models.kernels.exact import exact_attention, exact_linear, exact_swiglu
from burnish.models.kernels.paged_cache import Placement
from burnish.models.latent_shape import LatentShape

SHAPES: list[dict[str, Any]] = [
    {},
    {"window": 6},
    {"qk_norm": True, "tied": True},
    {"num_kv_heads": 1},
    {"qkv_bias": True, "num_kv_heads": 4},
    {"qk_norm": True, "out_norms": True, "norm_shift": 1.0, "activation": "gelu_tanh", "scaled_embedding": True, "window": 6,
     "local_layers": (True, False), "local_theta": 100.0, "query_scale": 0.8},
    {"family": "olmoe", "wide_qk_norm": True, "experts": ExpertShape(6, 3, 20, normalised=False)},
    {"family": "qwen3_moe", "experts": ExpertShape(8, 2, 20, (False, True))},
    {"score_softcap": 0.5, "logit_softcap": 2.0, "query_scale": 0.8, "window": 6, "local_layers": (True, False)},
    {"latent": LatentShape(10, 9, 6, 4, 5), "head_dim": 10, "num_kv_heads": 4, "family": "deepseek_v3",
     "experts": ExpertShape(6, 2, 20, (False, True), scoring="sigmoid", has_score_bias=True, num_groups=3, chosen_groups=2, shared_size=24)},
]  # fmt: skip
DTYPES = [torch.float32, torch.bfloat16]


def wanted() -> list[Request]:
    """Prompts of about one block, in groups; two share a prefix."""
    random = np.random.default_rng(0)
    prompts = [tuple(random.integers(0, 13, size).tolist()) for size in (3, 17, 40, 16, 33)]
    prompts.append((*prompts[2][:32], 7, 7))
    return [
        Request(
            f"{i}.{j}", prompt, SamplingOptions(max_tokens=int(random.integers(1, 26)), temperature=0.9), fold(i, j)
        )
        for i, prompt in enumerate(prompts)
        for j in range(2)
    ]


def packed(requests: list[Request], got: dict[str, Completion]) -> tuple[Any, np.ndarray]:
    """(tokens, offsets, wanted positions) of all completions as one batch, and the engine's log-probs."""
    tokens: list[int] = []
    offsets, positions = [0], list[int]()
    for request in requests:
        tokens += [*request.tokens, *got[request.id].tokens.tolist()]
        positions += range(offsets[-1] + len(request.tokens), len(tokens))
        offsets.append(len(tokens))
    logp = np.concatenate([got[request.id].logp for request in requests])
    return (torch.tensor(tokens), torch.tensor(offsets), torch.tensor(positions)), logp


def exact(model: Decoder) -> Decoder:
    model.exact = partial(exact_logprobs, model)
    return model


@pytest.mark.parametrize(
    ("dtype", "options"), [*product([torch.bfloat16], SHAPES), *product([torch.float32], SHAPES[::3])], ids=str
)
def test_the_learner_sees_the_engines_very_bits(tools: Any, dtype: torch.dtype, options: dict[str, Any]) -> None:
    model, requests = exact(tools.decoder(dtype, **options)), wanted()
    crowds = []
    # Few in two rows or all in a crowd, and with blocks so few that rows are set aside.
    for rows, blocks, asked in ((2, None, requests[::3]), (64, None, requests), (8, 5, requests)):
        engine = PagedEngine(model, rows, num_blocks=blocks, exact=True)
        crowds.append(tools.run(engine, asked))
        batch, logp = packed(asked, crowds[-1])
        with torch.no_grad():
            np.testing.assert_array_equal(model.token_logprobs(*batch, 0.9)[0].numpy(), logp)
        np.testing.assert_array_equal(model.token_logprobs(*batch, 0.9)[0].detach().numpy(), logp)
        assert (engine.stats.preemptions > 0) == (blocks is not None)
    for few in (crowds[0], crowds[2]):
        for name, completion in few.items():
            np.testing.assert_array_equal(completion.tokens, crowds[1][name].tokens)
            np.testing.assert_array_equal(completion.logp, crowds[1][name].logp)


def test_without_exactness_they_differ_by_rounding(tools: Any) -> None:
    """Without this difference the test above would prove nothing."""
    model, requests = tools.decoder(torch.float32), wanted()
    batch, logp = packed(requests, tools.run(PagedEngine(model, 8), requests))
    with torch.no_grad():
        gap = np.abs(model.token_logprobs(*batch, 0.9)[0].numpy() - logp)
    assert 0 < gap.max() < 1e-4


def test_the_gradient_is_that_of_the_usual_forward(tools: Any) -> None:
    plain, model = tools.decoder(torch.float32), exact(tools.decoder(torch.float32))
    requests = wanted()
    batch, _ = packed(requests, tools.run(PagedEngine(plain, 8), requests))
    for one in (plain, model):
        one.token_logprobs(*batch, 0.9)[0].sum().backward()
    for (name, a), (_, b) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad), name


def test_values_are_right_to_rounding(tools: Any) -> None:
    model = tools.decoder(torch.float64)
    requests = wanted()
    batch, _ = packed(requests, tools.run(PagedEngine(model, 8), requests))
    with torch.no_grad():
        usual = model.token_logprobs(*batch, 0.9)[0]
    torch.testing.assert_close(exact_logprobs(model, *batch, 0.9), usual, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_a_linear_layer_does_not_see_its_neighbours(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(100, 37).to(dtype)
    x = torch.randn(200, 100).to(dtype)
    with torch.no_grad():
        whole = exact_linear(layer, x)
        for some in ([5], [199, 0, 64], list(range(37))):
            assert torch.equal(exact_linear(layer, x[some]), whole[some])


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_activation_is_the_same_wherever_threads_divide_the_rows(two_threads: None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for size in (48, 100):
        x = torch.randn(1501, 2 * size).to(dtype)
        whole = exact_swiglu(x)
        for rows in (1, 37, 700):
            assert torch.equal(torch.cat([exact_swiglu(part.clone()) for part in x.split(rows)]), whole)
        with torch.no_grad():
            torch.testing.assert_close(whole, swiglu(x), rtol=2e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


def test_attention_of_a_token_does_not_see_other_rows_or_what_follows() -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(2, 30, 2, 16, 8)
    table = (1 + torch.randperm(29)[:24]).view(4, 6).int()
    owner, position = torch.tensor([0, 1, 2, 3, 3, 1]), torch.tensor([0, 17, 90, 31, 32, 15])
    q = torch.randn(6, 4, 8)
    whole = exact_attention(q, keys, values, Placement(owner, position, table), None)
    for i in range(6):
        alone = Placement(owner[i : i + 1], position[i : i + 1], table)
        assert torch.equal(exact_attention(q[i : i + 1], keys, values, alone, None)[0], whole[i])


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"top_p": 0.9}, "top_p or top_k"), ({"top_k": 5}, "top_p or top_k"), ({"engine": "transformers"}, "native engine"), ({"mismatch": {"name": "noise"}}, "contradict")],
)  # fmt: skip
def test_what_exactness_cannot_go_with_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Rollout(exact=True, **settings)


def test_float64_is_refused_since_log_probs_travel_in_float32(tools: Any) -> None:
    from burnish.distributed.engine_builder import build_engine
    from burnish.models.policy import PolicyModel
    from burnish.models.tokenizer import Tokenizer

    policy = PolicyModel(tools.decoder(torch.float64), Tokenizer.from_characters("0123456789>"), None, "a test")
    with pytest.raises(UserError, match="float32"):
        build_engine(policy, Rollout(exact=True))
