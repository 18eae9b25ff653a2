"""Speculative decoding: verified drafts change no token, and save forward passes where text repeats itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from burnish.config.rollout import Rollout, Speculation
from burnish.core.engine import Completion, Request, SamplingOptions
from burnish.core.random_keys import fold
from burnish.distributed.engine_builder import build_engine, find_paged_engine
from burnish.inference.native.device_state import LAST_TOKEN, LIMIT, LIVE, POSITION, PRODUCED, DeviceRows, SamplerFlags
from burnish.inference.native.paged_engine import PagedEngine
from burnish.inference.native.speculation import MAX_ANSWERS, AnswerStore, ChunkRows
from burnish.models.decoder import Decoder
from burnish.models.expert_shape import ExpertShape
from burnish.models.kernels.draft_lookup import MAX_MATCH, longest_match
from burnish.models.latent_shape import LatentShape
from burnish.models.policy import PolicyModel
from burnish.models.tokenizer import Tokenizer
from burnish.trainers.performance import draft_metrics
from tests.kernels import DEVICE, kernel

EXPERTS = {"family": "qwen3_moe", "experts": ExpertShape(8, 2, 20, (True, False))}
LATENT = {"family": "deepseek_v3", "num_kv_heads": 4, "head_dim": 12, "latent": LatentShape(10, 6, 8, 4, 6)}
TEXT = tuple((5 * i + i * i // 7) % 13 for i in range(200))


def growing(tools: Any) -> list[Request]:
    """Requests that grow by several blocks and stop in the middle of chunks, two of each prompt; some ask for the log-probs of the model itself."""
    base = tools.requests([TEXT[:20], TEXT[:31], TEXT[7:10], TEXT[:33], TEXT[50:66]], 2)
    return [
        replace(
            r,
            id=f"grows {r.id}",
            sampling=SamplingOptions(max_tokens=12 + 17 * (i % 4), temperature=0.6, stop_tokens=(i,) if i < 3 else (), raw_logprobs=i > 7),
        )
        for i, r in enumerate(base)
    ]  # fmt: skip


def assert_equal(got: dict[str, Completion], plain: dict[str, Completion]) -> None:
    """The same bits."""
    assert got.keys() == plain.keys()
    for name, one in got.items():
        other = plain[name]
        assert one.tokens.tolist() == other.tokens.tolist(), name
        assert (one.finish, one.version) == (other.finish, other.version)
        for mine, theirs in ((one.logp, other.logp), (one.raw_logp, other.raw_logp), (one.experts, other.experts)):
            assert (mine is None) == (theirs is None)
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    ("options", "shape", "dtype"),
    [
        (Speculation(draft=3, rows=8), {}, torch.float32),
        (Speculation(draft=1, rows=4, source="context"), {"window": 6}, torch.bfloat16),
        (Speculation(draft=15, rows=8, source="answers"), EXPERTS, torch.float32),
    ],
    ids=["both", "context", "answers, recorded experts"],
)
def test_in_exact_mode_every_bit_is_that_of_plain_decoding(
    tools: Any, native: Any, options: Speculation, shape: dict[str, Any], dtype: torch.dtype
) -> None:
    """For prompts that came before, more requests than rows, preempted rows, and what the listener gets."""
    model = tools.decoder(dtype, **shape)
    model.records_experts = "experts" in shape
    wanted = [*(r for r in native.mixed_requests()[::2] if not r.sampling.logit_bias), *growing(tools)]
    plain = tools.run(PagedEngine(model, 8, exact=True), wanted)
    heard = dict[str, list[int]]()

    def hear(name: str, token: int) -> None:
        heard.setdefault(name, []).append(token)

    for blocks in (None, 9):
        engine = PagedEngine(model, 6, listener=hear, num_blocks=blocks, exact=True, speculation=options)
        for _ in range(2):
            heard.clear()
            assert_equal(tools.run(engine, wanted), plain)
            assert heard == {name: completion.tokens.tolist() for name, completion in plain.items()}
        native.no_block_is_held(engine)
        assert 0 < engine.stats.accepted_tokens < engine.stats.drafted_tokens
        assert engine.stats.tokens == 2 * sum(len(completion.tokens) for completion in plain.values())
        assert (engine.stats.preemptions > 0) == (blocks is not None)


@pytest.mark.parametrize("shape", [{}, {"window": 6}, LATENT], ids=["plain", "window", "latent"])
def test_otherwise_every_token_is_the_one_that_its_number_picks(tools: Any, native: Any, shape: dict[str, Any]) -> None:
    model = tools.decoder(torch.float64, **shape)
    engine = PagedEngine(model, 8, speculation=Speculation(draft=4, rows=8))
    wanted = native.mixed_requests()
    for _ in range(2):
        native.agree(tools, model, tools.run(engine, wanted), wanted)
    assert engine.stats.accepted_tokens > 100


def test_tokens_have_the_distribution_of_the_model(tools: Any) -> None:
    """Pearson's test of the four tokens together, which are drawn in chunks with right and with wrong drafts."""
    model = tools.decoder(torch.float64, vocab=5)
    first, count = (1, 2, 3, 1, 2), 1500
    options = SamplingOptions(max_tokens=4, temperature=0.8)
    wanted = [Request(f"{k}", first, options, fold("chi-square", k)) for k in range(count)]
    engine = PagedEngine(model, 256, speculation=Speculation(draft=3, rows=256, source="context"))
    found = Counter(tuple(c.tokens.tolist()) for c in tools.run(engine, wanted).values())
    assert 300 < engine.stats.accepted_tokens < engine.stats.drafted_tokens / 2
    expected = dict[tuple[int, ...], float]()
    with torch.no_grad():
        states: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(4):
            after = dict[tuple[int, ...], float]()
            for tokens, mass in states.items():
                context = torch.tensor([*first, *tokens])
                logits = model.logits(model.hidden(context, torch.tensor([0, len(context)])))[-1]
                p = tools.distribution(logits, options).tolist()
                after |= {(*tokens, token): mass * p[token] for token in range(5)}
            states = after
        expected = {tokens: mass * count for tokens, mass in states.items()}
    frequent = [tokens for tokens, number in expected.items() if number >= 5]
    pairs = [(found[tokens], expected[tokens]) for tokens in frequent]
    pairs.append((count - sum(seen for seen, _ in pairs), count - sum(number for _, number in pairs)))
    statistic = sum((seen - number) ** 2 / number for seen, number in pairs)
    freedom = len(pairs) - 1
    assert freedom > 30
    assert abs(statistic - freedom) < 4 * (2 * freedom) ** 0.5, "four standard deviations"


# --- what it saves ----------------------------------------------------------------------------------------------------------


def test_drafts_of_a_repetitive_text_are_accepted_and_save_passes(tools: Any) -> None:
    """The model counts from 0 to 12 again and again: after the first round every draft is right."""
    model = tools.successor(13)
    wanted = [replace(r, sampling=replace(r.sampling, max_tokens=90 + k)) for k, r in enumerate(tools.requests([(0, 1), (4,), (7, 8)]))]  # fmt: skip
    steps = dict[int, int]()
    for draft in (0, 3, 7):
        speculation = Speculation(draft=draft, rows=4, source="context") if draft else None
        engine = PagedEngine(model, 4, speculation=speculation)
        for request in wanted:
            tokens = tools.run(engine, [request])[request.id].tokens
            start = request.tokens[-1]
            assert tokens.tolist() == [(start + 1 + k) % 13 for k in range(len(tokens))]
        steps[draft] = engine.stats.decode_steps
        assert engine.stats.accepted_tokens == engine.stats.drafted_tokens
        assert (engine.stats.drafted_tokens > 0) == (draft > 0)
    assert steps[7] < steps[3] < steps[0] / 2
    assert steps[7] < steps[0] / 3


def test_earlier_answers_to_a_prompt_are_drafts_for_the_next_ones(tools: Any) -> None:
    """Greedy answers come again, except where other weights change them."""
    model = tools.decoder(torch.float32)
    wanted = tools.requests([TEXT[:20], TEXT[3:40]], temperature=0.0, max_tokens=40)
    found = dict[str, tuple[int, int]]()
    for source in ("context", "answers", "both"):
        engine = PagedEngine(model, 4, exact=True, speculation=Speculation(draft=7, source=source))  # type: ignore[arg-type]
        first = tools.run(engine, wanted)
        before = engine.stats.decode_steps
        assert_equal(tools.run(engine, wanted), first)
        found[source] = before, engine.stats.decode_steps - before
    assert found["context"][0] == found["context"][1], "it keeps nothing"
    assert found["answers"][0] == 39, "the first answers have no drafts"
    assert found["answers"][1] <= 9, "five steps of eight tokens, and the rest of the last launch"
    assert found["both"][0] == found["context"][0]
    assert found["both"][1] <= 9
    with torch.no_grad():
        model.head_weight.mul_(-1)
    engine.load(1, ())
    again = tools.run(engine, wanted)
    assert_equal(again, {name: replace(c, version=1) for name, c in tools.run(PagedEngine(model, 4, exact=True), wanted).items()})  # fmt: skip
    assert all(again[name].tokens.tolist() != first[name].tokens.tolist() for name in first)


def test_more_rows_than_the_limit_decode_plainly(tools: Any) -> None:
    """Rows of different lengths: the drafts begin when the short ones have ended, and end while new requests fill the rows."""
    model = tools.successor(13)
    engine = PagedEngine(model, 8, speculation=Speculation(rows=2))
    equal = tools.requests([(k, 1, 2) for k in range(3)], max_tokens=40)
    tools.run(engine, equal)
    assert engine.stats.drafted_tokens == 0
    tail = [replace(r, sampling=replace(r.sampling, max_tokens=n)) for r, n in zip(equal, (20, 90, 60), strict=True)]
    got = tools.run(engine, tail)
    assert engine.stats.accepted_tokens > 60
    assert [len(got[r.id].tokens) for r in tail] == [20, 90, 60]
    tools.run(engine, [replace(r, id=f"again {r.id}") for r in tail])


def test_the_keys_build_the_engine_and_change_its_work(tools: Any) -> None:
    model = tools.successor(13)
    policy = PolicyModel(model, Tokenizer.from_characters("0123456789>"), None, "a test")
    wanted = tools.requests([(0, 1)], 2, max_tokens=60)
    work = []
    for given_keys in ({}, {"draft": 2}, {"rows": 1}, {"source": "answers"}):
        rollout = Rollout(max_rows=4, speculation={"name": "lookup"} | given_keys)  # type: ignore[arg-type]
        engine = find_paged_engine(build_engine(policy, rollout))
        assert engine is not None
        tools.run(engine, wanted)
        tools.run(engine, wanted)
        drafted, accepted = engine.stats.drafted_tokens, engine.stats.accepted_tokens
        work.append((engine.stats.decode_steps, drafted))
        found = draft_metrics(engine)
        assert found["performance/drafted_tokens"] == drafted
        assert found["performance/accepted_tokens"] == accepted
        assert found.get("performance/draft_acceptance") == (accepted / drafted if drafted else None)
        assert draft_metrics(engine) == {"performance/drafted_tokens": 0, "performance/accepted_tokens": 0}
    assert len(set(work)) == 4
    assert draft_metrics(build_engine(policy, Rollout(cache_gib=0.1))) == {}
    for engine_name in ("transformers", "vllm", "sglang"):
        with pytest.raises(ValueError, match=f"rollout.speculation applies to the native engine, but rollout.engine={engine_name}"):  # fmt: skip
            Rollout(engine=engine_name, speculation={"name": "lookup"}, sglang={"urls": ["http://a:1"]} if engine_name == "sglang" else None)  # type: ignore[arg-type] # fmt: skip


# --- life cycle -------------------------------------------------------------------------------------------------------------

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.lists(st.integers(0, 69), min_size=1, max_size=5)),
        st.tuples(st.just("stream"), st.integers(1, 4)),
        st.tuples(st.just("take"), st.integers(1, 3)),
        st.tuples(st.sampled_from(["keep", "drop"]), st.lists(st.integers(0, 5), max_size=3)),
        st.tuples(st.just("sleep"), st.none()),
    ),
    min_size=2,
    max_size=12,
)


@pytest.fixture(scope="module")
def small(tools: Any) -> tuple[Decoder, dict[str, Completion]]:
    model = tools.decoder()
    return model, {}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=ACTIONS, draft=st.integers(1, 15), rows=st.integers(1, 4), blocks=st.sampled_from([None, 7]))
def test_requests_come_and_go_during_verification(
    tools: Any, native: Any, small: tuple[Decoder, dict[str, Completion]], actions: Any, draft: int, rows: int, blocks: int | None
) -> None:  # fmt: skip
    model, whole = small
    if not whole:
        whole |= tools.run(PagedEngine(model, 8), native.pool())
    speculation = Speculation(draft=draft, rows=rows)
    native.play(PagedEngine(model, 4, num_blocks=blocks, speculation=speculation), actions, whole)


def test_an_aborted_request_continues_with_its_tokens(tools: Any) -> None:
    """A request that goes on behind the kept tokens gets the rest of the same sample."""
    model = tools.decoder(torch.float32)
    wanted = tools.requests([TEXT[:20], TEXT[:33]], 2, max_tokens=60, temperature=0.5)
    whole = tools.run(PagedEngine(model, 4, exact=True), wanted)
    engine = PagedEngine(model, 4, exact=True, speculation=Speculation(draft=4))
    engine.listener = lambda name, token: engine.interrupt()
    engine.submit(wanted)
    for _ in range(3):
        assert list(engine.stream()) == []
    engine.listener = None
    kept = {c.id: c for c in engine.abort([r.id for r in wanted], keep=True)}
    assert all(0 < len(c.tokens) < 60 for c in kept.values())
    later = [
        replace(
            r,
            tokens=(*r.tokens, *kept[r.id].tokens.tolist()),
            generated=len(kept[r.id].tokens),
            sampling=replace(r.sampling, max_tokens=60 - len(kept[r.id].tokens)),
        )
        for r in wanted
    ]
    rest = tools.run(engine, later)
    for name, completion in whole.items():
        np.testing.assert_array_equal(np.concatenate([kept[name].tokens, rest[name].tokens]), completion.tokens)
        np.testing.assert_array_equal(np.concatenate([kept[name].logp, rest[name].logp]), completion.logp)


# --- drafts -----------------------------------------------------------------------------------------------------------------


def expected_match(text: list[int], end: int, searched: int) -> int:
    """The definition in plain Python."""
    best, where = 0, -1
    for column in range(searched):
        length = 0
        while length < MAX_MATCH and column >= length and text[column - length] == text[end - length] >= 0:
            length += 1
        if length and length >= best:
            best, where = length, column
    return where


@pytest.mark.parametrize("search", ["torch", pytest.param("kernel", marks=kernel)])
def test_the_longest_match_is_found(search: str) -> None:
    random = np.random.default_rng(0)
    texts = random.integers(-1, 3, (12, 1100)).astype(np.int32)
    texts[:2] = random.integers(0, 1000, (2, 1100))
    texts[2] = -1
    texts[3, 40:50] = texts[3, 1060:1070] = np.arange(10)
    end = np.array([30, 1099, 5, 1069, 0, 1, 2, 7, 500, 1025, 1024, 1023])
    searched = np.minimum(end, random.integers(0, 1100, 12))
    searched[3] = 1069
    expected = [expected_match(*row) for row in zip(texts.tolist(), end.tolist(), searched.tolist(), strict=True)]
    assert expected[3] == 49
    arrays = [torch.from_numpy(x) for x in (texts, end, searched)]
    if search == "torch":
        assert longest_match(*arrays).tolist() == expected
        return
    from burnish.models.kernels.triton.draft_lookup import chunk_scores

    best = chunk_scores(*(x.to(DEVICE) for x in arrays), MAX_MATCH).amax(1).tolist()
    assert [score & 0xFFFFFFFF if score >= 0 else -1 for score in best] == expected


@kernel
@pytest.mark.parametrize("has_all", [False, True])
def test_the_kernels_expand_and_accept_as_torch_does(has_all: bool) -> None:
    """Live, ended and limited rows, with right and wrong drafts, with and without biases, raw log-probs and rotation positions."""
    random = torch.Generator().manual_seed(0)
    flags = SamplerFlags(biased=has_all, raw=has_all)
    num_rows, width = 9, 6

    def numbers(shape: torch.Size, high: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=random).to(dtype)

    def made() -> tuple[DeviceRows, ChunkRows]:
        state, own = (DeviceRows(rows, 5, torch.device("cpu"), has_deltas=True) for rows in (12, 12 * width))
        return state, ChunkRows(Speculation(draft=width - 1), own, 12, 80)

    def tensors(rows: DeviceRows) -> dict[str, torch.Tensor]:
        return {name: x for name, x in vars(rows).items() if isinstance(x, torch.Tensor)}

    (state, chunks), (twin, twin_chunks) = made(), made()
    for rows in (state, chunks.rows):
        for x in tensors(rows).values():
            x.copy_(numbers(x.shape, 3 if x is rows.ring_token else 50, x.dtype))
    state.ints[LIVE] = torch.arange(12) % 4 > 0
    state.ints[POSITION] = torch.where(state.ints[LIVE] > 0, 7 + torch.arange(12), -1)
    state.ints[LIMIT] = state.ints[PRODUCED] + torch.arange(12) % 8 + 1
    chunks.texts.copy_(numbers(chunks.texts.shape, 9, torch.int32))
    draft = numbers(torch.Size((num_rows, width - 1)), 2, torch.int64)
    draft[1, 2:] = draft[2] = -1
    for source, target in ((state, twin), (chunks.rows, twin_chunks.rows)):
        for name, x in tensors(source).items():
            tensors(target)[name].copy_(x)
    twin_chunks.texts.copy_(chunks.texts)
    fed, kernel_fed = chunks.expand(state, draft, flags), twin_chunks._expand_with_triton(twin, draft, flags)
    assert torch.equal(fed, kernel_fed.bool())
    assert set(fed.sum(1).tolist()) >= {0, 1, 2, 4, 6}
    skipped = () if has_all else ("bias_token", "bias_value")
    for name, x in tensors(chunks.rows).items():
        rows_of = (
            (slice(None), slice(num_rows * width))
            if name in ("ints", "counts", "thresholds")
            else slice(num_rows * width)
        )
        assert name in skipped or torch.equal(tensors(twin_chunks.rows)[name][rows_of], x[rows_of]), name
    drawn = numbers(torch.Size((12 * width,)), 2, torch.int64)
    behind = drawn.view(12, width)[:num_rows, :-1]
    behind.copy_(torch.where(torch.rand(behind.shape, generator=random) < 0.8, draft, behind))
    goes_on = numbers(torch.Size((12 * width,)), 8, torch.int64).clamp(max=1)
    for rows in (chunks.rows, twin_chunks.rows):
        rows.ints[LAST_TOKEN] = torch.where(rows.ints[LIVE] > 0, drawn, rows.ints[LAST_TOKEN])
        rows.ints[LIVE] *= goes_on
    chunks.accept(state, draft, fed, flags)
    twin_chunks._accept_with_triton(twin, draft, kernel_fed, flags)
    for name, x in tensors(state).items():
        assert torch.equal(tensors(twin)[name], x), name
    assert torch.equal(twin_chunks.texts, chunks.texts)
    assert twin_chunks.counts.tolist() == chunks.counts.tolist()
    assert 3 < chunks.counts[1] < chunks.counts[0]


def test_the_store_of_answers_forgets_the_oldest() -> None:
    store = AnswerStore(max_tokens=100)
    prompt = tuple(range(20))
    for k in range(3):
        store.add(prompt, [100 + k] * 5)
    tail = list(prompt[-MAX_MATCH:])
    assert store.text(prompt, 1000).tolist() == [x for k in range(3) for x in (*tail, *[100 + k] * 5, -1)]
    assert store.text(prompt, 2 * (MAX_MATCH + 6)).tolist() == [x for k in (1, 2) for x in (*tail, *[100 + k] * 5, -1)]
    assert store.text((1,), 1000).tolist() == []
    store.add((1,), [2] * 60)
    assert (store.num_tokens, store.text((1,), 100).tolist()) == (96, [1, *[2] * 60, -1])
    store.add((3,), [2] * 10)
    assert store.text(prompt, 1000).tolist() == [], "it was used least recently"
    for _ in range(MAX_ANSWERS + 5):
        store.add((7,), [1])
    assert len(store.text((7,), 1000)) == 3 * MAX_ANSWERS
