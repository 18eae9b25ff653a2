"""The paged engine on CUDA, with kernels and graphs, against models and samplers without them."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from burnish.config.errors import UserError
from burnish.config.rollout import Speculation
from burnish.core.engine import Completion, Request, SamplingOptions
from burnish.core.random_keys import to_int64, uniforms
from burnish.inference.native.device_state import MAX_STOP_TOKENS
from burnish.inference.native.paged_engine import PagedEngine
from burnish.models.decoder import Decoder
from burnish.models.expert_shape import ExpertShape
from burnish.models.latent_shape import LatentShape
from burnish.models.weight_files import save_decoder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DEVICE = torch.device("cuda")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "tied": True},
    "mistral": {"window": 24},
    "deepseek_v3": {
        "latent": LatentShape(40, 32, 48, 16, 40), "num_kv_heads": 4,
        "experts": ExpertShape(8, 2, 96, (False, True), True, "sigmoid", True, 4, 2, shared_size=96),
    },
    "qwen3_moe": {"qk_norm": True, "experts": ExpertShape(8, 2, 96)},
    "mixtral": {"experts": ExpertShape(6, 2, 96)},
    "olmoe": {"wide_qk_norm": True, "head_dim": 32, "experts": ExpertShape(12, 3, 64, normalised=False)},
    "gemma2": {
        "out_norms": True, "norm_shift": 1.0, "activation": "gelu_tanh", "scaled_embedding": True, "tied": True, "window": 24,
        "local_layers": (True, False), "score_softcap": 2.0, "logit_softcap": 5.0, "query_scale": 0.9,
    },
    "gemma3_text": {
        "qk_norm": True, "out_norms": True, "norm_shift": 1.0, "activation": "gelu_tanh", "scaled_embedding": True,
        "tied": True, "window": 24, "local_layers": (True, False), "local_theta": 10_000.0, "rope_theta": 1e6,
    },
}  # fmt: skip
TEXT = tuple((5 * i + i * i // 7) % 13 for i in range(600))


def decoder(tools: Any, family: str = "llama", **options: Any) -> Decoder:
    """A float32 decoder on the CPU with realistic shapes, and with biases and norms that matter."""
    sizes = {"hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "mlp_size": 192}
    model: Decoder = tools.decoder(
        torch.float32, family=family, max_positions=1024, **(sizes | FAMILIES[family] | options)
    )
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.mul_(0.5)  # twice the width of the tests' usual models
    return model


def near(tools: Any, model: Decoder, got: Mapping[str, Completion], wanted: Sequence[Request], gap: float) -> None:
    """Each token is the one that the request's noise picks from the float64 model's distribution, but for `gap`."""
    exact = copy.deepcopy(model).cpu().double()
    for request in wanted:
        completion, options = got[request.id], request.sampling
        tokens = completion.tokens.tolist()
        context = torch.tensor([*request.tokens, *tokens])
        with torch.no_grad():
            logits = exact.logits(exact.hidden(context, torch.tensor([0, len(context)])))
        count = torch.arange(len(tokens))
        noise = uniforms(torch.full_like(count, to_int64(request.key)), request.generated + count)
        for k, token in enumerate(tokens):
            p = tools.distribution(logits[len(request.tokens) - 1 + k], options)
            if options.temperature == 0:
                assert p[token] >= p.max() - gap, request.id
            else:
                end = float(p.cumsum(0)[token])
                assert end - float(p[token]) - gap <= float(noise[k]) <= end + gap, request.id
            assert abs(float(p[token].log()) - completion.logp[k]) <= 100 * gap, request.id
            if options.raw_logprobs:
                assert completion.raw_logp is not None
                raw = logits[len(request.tokens) - 1 + k].log_softmax(-1)
                assert abs(float(raw[token]) - completion.raw_logp[k]) <= 100 * gap, request.id
        assert (completion.raw_logp is not None) == options.raw_logprobs
        assert completion.finish == ("stop" if tokens[-1] in options.stop_tokens else "length")
        assert completion.finish == "stop" or len(tokens) == options.max_tokens


# --- the right tokens ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_argmax_is_that_of_transformers_wherever_it_is_clear(tools: Any, tmp_path: Path, family: str) -> None:
    model = decoder(tools, family, vocab=97)
    save_decoder(model, tmp_path, source=None)
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).to(DEVICE)
    prompts = [tuple((t * 7 + i) % 97 for t in TEXT[i : i + 1 + (i * 5) % 60]) for i in range(64)]
    wanted = tools.requests(prompts, temperature=0.0, max_tokens=24)
    engine = PagedEngine(model.to(DEVICE), max_rows=48)
    got = tools.run(engine, wanted)
    assert engine.stats.graphs
    clear = 0
    for request in wanted:
        tokens = torch.tensor([*request.tokens, *got[request.id].tokens.tolist()], device=DEVICE)
        with torch.no_grad():
            logits = theirs(input_ids=tokens[None], use_cache=False).logits[0, len(request.tokens) - 1 : -1]
        best = logits.topk(2).values
        sure = best[:, 0] - best[:, 1] > 1e-3
        assert torch.equal(logits.argmax(-1)[sure], tokens[len(request.tokens) :][sure]), request.id
        clear += int(sure.sum())
    assert clear > 0.9 * 64 * 24


@pytest.mark.parametrize("options", [{}, {"window": 6}, {"qk_norm": True}], ids=str)
@pytest.mark.parametrize("steps", [1, 8])
def test_a_crowd_draws_what_its_noise_picks(tools: Any, native: Any, options: dict[str, Any], steps: int) -> None:
    model = decoder(tools, **options).to(DEVICE)
    wanted = native.mixed_requests()
    engine = PagedEngine(model, max_rows=4, steps_per_launch=steps)
    near(tools, model, tools.run(engine, wanted), wanted, 1e-4)
    native.no_block_is_held(engine)


def test_float64_runs_without_kernels_and_is_exact(tools: Any, native: Any) -> None:
    model = tools.decoder()
    engine = PagedEngine(copy.deepcopy(model).to(DEVICE), max_rows=4)
    wanted = native.mixed_requests()
    native.agree(tools, model, tools.run(engine, wanted), wanted)
    engine.sleep()
    native.agree(tools, model, tools.run(engine, wanted), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 7, "top_p": 0.9, "min_p": 0.02},
        {"top_p": 0.6},
        {"logit_bias": ((3, 1.5), (5, -2.0), (12, 0.5))},
        {"temperature": 1.4, "top_k": 6, "logit_bias": ((0, 2.0),)},
    ],
    ids=str,
)
def test_sampled_frequencies_follow_the_model(tools: Any, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Frequencies of token pairs: the first is drawn after the prefill, the second in a graph."""
    model, n, prompt = decoder(tools).to(DEVICE, dtype), 8192, [3, 4, 5]
    wanted = tools.requests([tuple(prompt)], n, max_tokens=2, **options)
    got = tools.run(PagedEngine(model, max_rows=1024), wanted)

    def after(tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            ids = torch.tensor(tokens, device=DEVICE)
            hidden = model.hidden(ids, torch.tensor([0, len(tokens)], device=DEVICE))
            return tools.distribution(model.logits(hidden[-1:])[0].double().cpu(), wanted[0].sampling)

    p = torch.cat([q * after([*prompt, token]) for token, q in enumerate(after(prompt))]).numpy()
    pairs = [int(c.tokens[0]) * 13 + int(c.tokens[1]) for c in got.values()]
    count = np.bincount(pairs, minlength=13 * 13)
    assert count[p == 0].sum() == 0
    common = n * p >= 5
    seen = np.append(count[common], count[~common].sum())
    expected = np.append(n * p[common], n * p[~common].sum())
    if expected[-1] < 5:
        seen, expected = seen[:-1], expected[:-1]
    statistic = float(((seen - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    chance = torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(statistic / 2).double())
    assert float(chance) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logprobs_are_the_learners(tools: Any, native: Any, family: str, dtype: torch.dtype) -> None:
    model = decoder(tools, family).to(DEVICE, dtype)
    prompts = [TEXT[:3], TEXT[9:10], TEXT[:70], TEXT[:65], TEXT[100:300]]
    wanted = tools.requests(prompts, 4, max_tokens=60, temperature=0.8)
    got = tools.run(PagedEngine(model, max_rows=12), wanted)
    gap = np.concatenate([np.abs(got[r.id].logp - native.learner_logp(model, r, got[r.id])) for r in wanted])
    assert gap.size == 20 * 60
    if model.arch.experts is not None and dtype != torch.float32:
        # Where two experts are nearly equal, rounding decides, and a token with another expert is far away.
        assert np.quantile(gap, 0.9) <= {torch.bfloat16: 0.1, torch.float16: 3e-2}[dtype]
        return
    assert gap.mean() <= {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    assert gap.max() <= {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}[dtype]


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_errs_no_more_than_transformers_does(tools: Any, tmp_path: Path, family: str) -> None:
    """Errors of the same tokens against a float32 forward of the same weights: mean and 99th percentile."""
    model = decoder(tools, family, vocab=97)
    if model.arch.scaled_embedding:
        # Else it is nearly certain of every token, and the errors are those of the few others.
        model.embedding.weight.data.mul_(0.3)
    model.to(torch.bfloat16)
    save_decoder(model, tmp_path, source=None)
    wide, theirs = (
        # Eager: sdpa of transformers before 5.20 leaves out Gemma 2's soft cap.
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, attn_implementation="eager").to(DEVICE)
        for dtype in (torch.float32, torch.bfloat16)
    )
    prompts = [tuple((t * 7 + i) % 97 for t in TEXT[i : i + 1 + (i * 5) % 60]) for i in range(64)]
    wanted = tools.requests(prompts, max_tokens=40)
    got = tools.run(PagedEngine(model.to(DEVICE), max_rows=48), wanted)

    def logp(of: Any, request: Request) -> np.ndarray:
        drawn = torch.tensor(got[request.id].tokens, device=DEVICE)
        tokens = torch.cat([torch.tensor(request.tokens, device=DEVICE), drawn])
        with torch.no_grad():
            logits = of(input_ids=tokens[None], use_cache=False).logits[0, len(request.tokens) - 1 : -1]
        return np.asarray(logits.float().log_softmax(-1).gather(1, drawn[:, None])[:, 0].cpu())

    truth = np.concatenate([logp(wide, request) for request in wanted])
    ours = np.abs(np.concatenate([got[request.id].logp for request in wanted]) - truth)
    other = np.abs(np.concatenate([logp(theirs, request) for request in wanted]) - truth)
    assert ours.size == 64 * 40
    if model.arch.experts is not None:
        # Tokens with another expert are left out. transformers computes DeepSeek-V3's router in float32, and errs less.
        assert np.quantile(ours, 0.9) <= 1.5 * np.quantile(other, 0.9)
        return
    assert ours.mean() <= 1.1 * other.mean()
    assert np.quantile(ours, 0.99) <= 1.1 * np.quantile(other, 0.99)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_an_8_bit_cache_is_read_as_it_is_written_and_its_gap_shows(tools: Any, native: Any, dtype: torch.dtype) -> None:
    model = decoder(tools).to(DEVICE, dtype)
    wanted = tools.requests([TEXT[:3], TEXT[:70], TEXT[:65], TEXT[100:300]], 4, max_tokens=60)
    gaps, sizes = [], []
    for quantised in (False, True):
        engine = PagedEngine(model, max_rows=12, quantised=quantised)
        got = tools.run(engine, wanted)
        gaps.append(np.concatenate([np.abs(got[r.id].logp - native.learner_logp(model, r, got[r.id])) for r in wanted]))
        sizes.append(engine.runner.held_bytes)
        engine.sleep()
        again = tools.run(engine, wanted)
        assert {k: c.tokens.tolist() for k, c in again.items()} == {k: c.tokens.tolist() for k, c in got.items()}
    assert 1e-3 < gaps[1].mean() < 0.15
    assert gaps[1].mean() > 2 * gaps[0].mean()
    assert sizes[1] < 0.6 * sizes[0]


def test_a_bias_or_a_truncation_gets_a_graph_of_its_own_and_leaves_the_others_alone(tools: Any, native: Any) -> None:
    model = decoder(tools).to(DEVICE)
    plain = tools.requests([TEXT[:20]], 3, max_tokens=40)
    engine = PagedEngine(model, max_rows=8)
    alone = tools.run(engine, plain)
    graphs = engine.stats.graphs
    assert graphs == len(engine.runner._graphs) >= 1
    options = SamplingOptions(max_tokens=25, top_p=0.8, logit_bias=((3, 4.0),), raw_logprobs=True)
    beside = [replace(r, id=f"beside {r.id}", sampling=options) for r in plain]
    crowd = tools.run(engine, [*plain, *beside])
    near(tools, model, crowd, [*plain, *beside], 1e-4)
    assert engine.stats.graphs > graphs
    for request in plain:
        assert crowd[request.id].tokens.tolist() == alone[request.id].tokens.tolist()


def test_a_fixed_cache_and_a_reserved_one(tools: Any) -> None:
    model = decoder(tools).to(DEVICE)
    engine = PagedEngine(model, max_rows=4, cache_bytes=64 << 20)
    engine.reserve(1000, rows=4)
    assert engine.stats.plan is not None
    assert 62 << 20 < engine.stats.plan.bytes <= 64 << 20
    assert engine.stats.compile_s > 0
    address = engine.runner.arena.address.value  # type: ignore[union-attr]
    wanted = tools.requests([TEXT[:500]], 2, max_tokens=300)
    near(tools, model, tools.run(engine, wanted), wanted, 1e-4)
    assert engine.runner.arena.address.value == address  # type: ignore[union-attr]


def test_the_engine_starts_without_torchs_compiler() -> None:
    """The compiler takes seconds to import."""
    code = """
import sys, torch
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, initialise
from burnish.core.engine import Request, SamplingOptions
from burnish.inference.native.paged_engine import PagedEngine
model = Decoder(Architecture("llama", 97, 64, 2, 2, 1, 32, 96, 256))
initialise(model, 0)
engine = PagedEngine(model.to("cuda", torch.bfloat16), 4)
engine.submit([Request("a", (1, 2, 3), SamplingOptions(max_tokens=12, top_p=0.9), 5)])
assert len(list(engine.stream())) == 1
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# --- scheduling ------------------------------------------------------------------------------------------------------------


def test_a_common_beginning_is_prefilled_once(tools: Any) -> None:
    model = decoder(tools).to(DEVICE)
    tails = [(i % 13, i // 13, 3) for i in range(64)]
    wanted = tools.requests([TEXT[:512] + tail for tail in tails], max_tokens=3)
    engine = PagedEngine(model, max_rows=64)
    got = tools.run(engine, wanted)
    assert engine.stats.prefilled_tokens == 512 + 3 * 64
    near(tools, model, got, wanted[::9], 1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_preempted_rows_keep_their_tokens(tools: Any, native: Any, dtype: torch.dtype) -> None:
    """The model's next token is certain, so no rounding can change it."""
    heard: dict[str, list[int]] = {}
    model = tools.successor(64, dtype).to(DEVICE)
    engine = PagedEngine(
        model, 6, listener=lambda name, token: heard.setdefault(name, []).append(token), num_blocks=1 + 10
    )
    wanted = tools.requests([tuple(range(k, k + 20)) for k in (0, 0, 7, 30)], 2, max_tokens=100)
    got = tools.run(engine, wanted)
    for request in wanted:
        last = request.tokens[-1]
        assert got[request.id].tokens.tolist() == [(last + 1 + k) % 64 for k in range(100)]
        assert np.abs(got[request.id].logp).max() < 1e-3
    assert engine.stats.preemptions > 0
    assert heard == {name: c.tokens.tolist() for name, c in got.items()}
    native.no_block_is_held(engine)


def test_stops_that_the_device_or_only_the_host_can_see(tools: Any, native: Any) -> None:
    engine = PagedEngine(tools.successor(64, torch.bfloat16).to(DEVICE), 2, native.spell)
    many = tuple(range(100, 100 + MAX_STOP_TOKENS))
    wanted = [
        Request("token", (3,), SamplingOptions(max_tokens=60, stop_tokens=(9,)), 1),
        Request("many", (3,), SamplingOptions(max_tokens=60, stop_tokens=(*many, 14)), 2),
        Request("string", (3,), SamplingOptions(max_tokens=60, stop=(native.spell([10, 11]),)), 3),
        Request("limit", (3,), SamplingOptions(max_tokens=15), 4),
    ]
    got = tools.run(engine, wanted)
    ends = {"token": (9, "stop"), "many": (14, "stop"), "string": (11, "stop"), "limit": (18, "length")}
    assert {name: (c.tokens.tolist(), c.finish) for name, c in got.items()} == {
        name: (list(range(4, end + 1)), finish) for name, (end, finish) in ends.items()
    }
    native.no_block_is_held(engine)


@pytest.mark.parametrize("steps", [1, 5, 8])
def test_random_sequences_answer_every_request_and_leak_no_block(
    tools: Any, native: Any, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    monkeypatch.setattr("burnish.inference.native.paged_engine.BLOCK_SIZE", 4)
    dice = random.Random(steps)
    engine = PagedEngine(decoder(tools).to(DEVICE), max_rows=6, num_blocks=16, steps_per_launch=steps)
    draw: dict[str, Any] = {
        "submit": lambda: [dice.randrange(70) for _ in range(dice.randint(1, 7))],
        "stream": lambda: dice.randint(1, 4),
        "take": lambda: dice.randint(1, 3),
        "keep": lambda: {dice.randrange(13) for _ in range(3)},
        "drop": lambda: {dice.randrange(13) for _ in range(3)},
        "rest": lambda: None,
    }
    for _ in range(100):
        verbs = dice.choices(list(draw), weights=[3, 3, 1, 1, 1, 1], k=dice.randint(2, 14))
        native.play(engine, [(verb, draw[verb]()) for verb in verbs], None)
    assert engine.stats.preemptions > 0


# --- weights and memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_new_weights_are_read_without_a_new_graph(tools: Any, native: Any, dtype: torch.dtype) -> None:
    model = decoder(tools).to(DEVICE, dtype)
    engine = PagedEngine(model, max_rows=4)
    wanted = tools.requests([TEXT[:40], TEXT[:5]], 2, max_tokens=20)
    before = tools.run(engine, wanted)
    graphs = dict(engine.runner._graphs)
    assert graphs
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.7)
    engine.load(1, [])
    after = tools.run(engine, wanted)
    assert engine.runner._graphs == graphs
    gap = [np.abs(after[r.id].logp - native.learner_logp(model, r, after[r.id])).mean() for r in wanted]
    assert max(gap) <= (1e-5 if dtype == torch.float32 else 5e-2)
    assert not np.allclose(before["0.0"].logp, after["0.0"].logp, atol=1e-2)


def test_sleep_frees_the_memory_and_wake_keeps_addresses_and_results(tools: Any, native: Any) -> None:
    model = decoder(tools).to(DEVICE)
    engine = PagedEngine(model, max_rows=4, num_blocks=1 << 14)
    wanted = native.mixed_requests()
    before = tools.run(engine, wanted)
    size = engine.runner.cache.numel() * engine.runner.cache.element_size()
    assert size >= 256 << 20
    address, graphs = engine.runner.cache.data_ptr(), dict(engine.runner._graphs)
    torch.cuda.synchronize()
    freed, taken = [], []
    for _ in range(5):  # other processes take and give memory of the same GPU meanwhile: the middle one counts
        awake, _ = torch.cuda.mem_get_info()
        engine.sleep()
        asleep, _ = torch.cuda.mem_get_info()
        engine.wake()
        again, _ = torch.cuda.mem_get_info()
        freed.append(asleep - awake)
        taken.append(asleep - again)
    assert sorted(freed)[2] >= 0.95 * size
    assert sorted(taken)[2] >= 0.95 * size
    engine.sleep()
    torch.full((size // 4,), torch.nan, device=DEVICE)  # a training step has the memory meanwhile
    torch.cuda.empty_cache()
    engine.wake()
    after = tools.run(engine, wanted)
    assert engine.runner.cache.data_ptr() == address
    assert engine.runner._graphs == graphs
    for name, completion in after.items():
        assert completion.tokens.tolist() == before[name].tokens.tolist()
        np.testing.assert_allclose(completion.logp, before[name].logp, atol=1e-5)


def test_a_request_that_the_free_memory_cannot_hold_is_refused_and_disturbs_nobody(
    tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = decoder(tools).to(DEVICE)
    engine = PagedEngine(model, max_rows=2)
    wanted = tools.requests([TEXT[:10], TEXT[:12]], max_tokens=40)
    wanted[0] = replace(wanted[0], sampling=SamplingOptions(max_tokens=5))
    engine.submit(wanted)
    stream = engine.stream()
    got = [next(stream)]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (0, 1 << 30))
    with pytest.raises(UserError, match=r"request wide: 500 prompt tokens \+ 100 new ones need 38 blocks of 16"):
        engine.submit([Request("wide", TEXT[:500], SamplingOptions(max_tokens=100), 1)])
    got += list(stream)
    near(tools, model, {c.id: c for c in got}, wanted, 1e-4)
    assert engine.stats.preemptions == 0


@pytest.mark.parametrize("exact", [False, True])
def test_a_prepared_engine_captures_no_graph_on_the_way(tools: Any, exact: bool) -> None:
    model = decoder(tools).to(DEVICE, torch.bfloat16)
    engine = PagedEngine(model, max_rows=100, exact=exact)
    wanted = tools.requests([(i % 13, 3) for i in range(90)], max_tokens=40)
    engine.prepare(48, len(wanted), wanted[0].sampling)
    assert engine.stats.graphs == 8  # of 1, 2, 4, 8, 16, 32, 64 and, since there are no more rows, 100
    tools.run(engine, wanted)
    assert engine.stats.graphs == 8


def test_a_long_row_beside_short_ones_is_split(tools: Any) -> None:
    model = decoder(tools).to(DEVICE)
    engine = PagedEngine(model, max_rows=64)
    wanted = tools.requests([TEXT[:590], *(TEXT[i : i + 5] for i in range(63))], max_tokens=12)
    near(tools, model, tools.run(engine, wanted), wanted[:9], 1e-4)
    assert {splits for _, _, splits in engine.runner._graphs} == {8}  # 602 tokens in splits of at least 128
    assert engine.stats.plan is not None
    assert engine.stats.graphs <= engine.stats.plan.graphs


# --- speculative decoding ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_verified_drafts_change_no_bit_in_exact_mode(tools: Any, family: str, dtype: torch.dtype) -> None:
    """The second time, drafts come from earlier answers too. Verification steps are graphs of their own."""
    model = decoder(tools, family).to(DEVICE, dtype)
    base = tools.requests([TEXT[:20], TEXT[:300], TEXT[7:10]], 3, temperature=0.6, raw_logprobs=True)
    wanted = [replace(r, sampling=replace(r.sampling, max_tokens=30 + 17 * i)) for i, r in enumerate(base)]
    plain = tools.run(PagedEngine(model, 16, exact=True), wanted)
    for draft, rows in ((3, 4), (7, 16)):
        engine = PagedEngine(model, 16, exact=True, speculation=Speculation(draft=draft, rows=rows))
        for _ in range(2):
            for name, one in tools.run(engine, wanted).items():
                np.testing.assert_array_equal(one.tokens, plain[name].tokens)
                np.testing.assert_array_equal(one.logp, plain[name].logp)
                np.testing.assert_array_equal(one.raw_logp, plain[name].raw_logp)
        assert 0 < engine.stats.accepted_tokens < engine.stats.drafted_tokens
        assert engine.runner._verification_graphs


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("qwen3_moe", "mixtral", "olmoe")])
@pytest.mark.parametrize("quantised", [False, True])
def test_verified_drafts_change_no_token_but_by_rounding(tools: Any, family: str, quantised: bool) -> None:
    """All attention kernels, with heads of 64: the tokens are those of plain decoding, but for rounding."""
    if quantised and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no 8-bit floats (Ada, Hopper and later have them)")
    model = decoder(tools, family, experts=None).to(DEVICE, torch.bfloat16)  # another expert is more than rounding
    wanted = tools.requests([TEXT[:20], TEXT[:290], TEXT[7:10]], max_tokens=80, temperature=0.0)
    plain = tools.run(PagedEngine(model, 4, quantised=quantised), wanted)
    engine = PagedEngine(model, 4, quantised=quantised, speculation=Speculation(draft=7, rows=4))
    tools.run(engine, wanted)
    again = tools.run(engine, wanted)
    assert engine.stats.accepted_tokens > 80
    for name, one in again.items():
        agrees = one.tokens == plain[name].tokens
        first = int(agrees.argmin()) if not agrees.all() else len(agrees)
        assert first > 10, "greedy tokens differ only where two are equally likely but for rounding"
        np.testing.assert_allclose(one.logp[:first], plain[name].logp[:first], atol=0.15)
