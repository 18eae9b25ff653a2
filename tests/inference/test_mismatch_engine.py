"""Engines with a known fault: each fault has its gap, the true tokens and log-probs stay known, and runs repeat exactly."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from burnish.config.errors import UserError
from burnish.config.model import Lora
from burnish.config.rollout import (
    MISMATCH_FAULTS,
    ExtraBosFault,
    Mismatch,
    MismatchSlot,
    NeverLoadedFault,
    NoiseFault,
    QuantisedFault,
    ReencodedFault,
    StaleFault,
    TemperatureFault,
    TruncatedFault,
)
from burnish.core.engine import Completion, Request, SamplingOptions
from burnish.inference.engine_wrappers import (
    FaultyCompletion,
    MismatchEngine,
    add_noise,
    completion_logprobs,
    reencode,
    round_weight,
)
from burnish.inference.native.dense_engine import DenseEngine
from burnish.inference.native.paged_engine import PagedEngine
from burnish.inference.transformers_engine import TransformersEngine
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, initialise
from burnish.models.kernels.fp8 import dequantised
from burnish.models.lora.adapters import add_lora
from burnish.models.tokenizer import Tokenizer
from burnish.models.transformers_model import TransformersPolicy
from burnish.run.checkpoint.saver import keep_in_place
from burnish.run.checkpoint.snapshot import write_contents

PROMPTS = [(2, 3, 4), (5,), (7, 1, 2, 9)]
EVERY: list[Mismatch] = [
    NoiseFault(scale=0.05),
    StaleFault(steps=2),
    QuantisedFault(kind="int8"),
    TemperatureFault(factor=1.5),
    TemperatureFault(factor=1.5, wrong="reported"),
    ReencodedFault(),
    ExtraBosFault(token=3),
    NeverLoadedFault(),
    TruncatedFault(top_p=0.6),
    TruncatedFault(top_p=0.6, reported="truncated"),
]
NEUTRAL: list[Mismatch] = [
    NoiseFault(scale=0),
    StaleFault(steps=0),
    TemperatureFault(factor=1),
    TruncatedFault(top_p=1, reported="truncated"),
]


@pytest.fixture(scope="module")
def pairs() -> Tokenizer:
    """Tokens for a to d and for "ab" and "cd": a text of single letters comes back as pairs."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "a", "b", "c", "d", "ab", "cd"]
    backend = Backend(models.BPE({w: i for i, w in enumerate(words)}, [("a", "b"), ("c", "d")]))
    backend.decoder = decoders.Fuse()
    inner = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    return Tokenizer(inner)


def faulty(
    tools: Any, model: Decoder, fault: Mismatch, wanted: list[Request], **options: Any
) -> dict[str, FaultyCompletion]:
    return tools.run(MismatchEngine(DenseEngine, model, fault, **options), wanted)


def gap(model: nn.Module, wanted: list[Request], found: dict[str, Completion]) -> float:
    """mean |old - behaviour| over tokens, as the trainer sees it."""
    old = np.concatenate(
        [completion_logprobs(model, r.tokens, found[r.id].tokens, r.sampling.temperature) for r in wanted]
    )
    return float(np.abs(old - np.concatenate([found[r.id].logp for r in wanted])).mean())


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether completions are the same bit for bit."""
    return one.keys() == other.keys() and all(
        np.array_equal(one[i].tokens, other[i].tokens)
        and np.array_equal(one[i].logp, other[i].logp)
        and (one[i].finish, one[i].version) == (other[i].finish, other[i].version)
        for i in one
    )


def step(model: nn.Module, seed: int, size: float = 0.05) -> None:
    """Change the policy in place, as the learner does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(size * torch.randn(p.shape, generator=generator).to(p))


def expected(
    model: Decoder, request: Request, found: FaultyCompletion, distribution: Any, **options: Any
) -> np.ndarray:
    """The log-probs of a completion's tokens, each by a full forward and the definition of the distribution."""
    sampling = replace(request.sampling, **options)
    context, logps = list(request.tokens), []
    for token in found.drawn.tolist():
        logits = next_logits(model, context)
        logps.append(float(distribution(logits, sampling)[token].log()))
        context.append(token)
    return np.array(logps, dtype=np.float32)


@torch.no_grad()
def next_logits(model: Decoder, context: list[int]) -> Tensor:
    return model.logits(model.hidden(torch.tensor(context), torch.tensor([0, len(context)])))[-1]


# --- no fault ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", NEUTRAL, ids=lambda f: f.name)
def test_without_strength_completions_are_bit_identical_to_the_wrapped_engines(tools: Any, fault: Mismatch) -> None:
    model = tools.decoder()
    wanted = tools.requests(PROMPTS, 4, temperature=0.8, stop_tokens=(1,))
    engine, plain = MismatchEngine(DenseEngine, model, fault), DenseEngine(model)
    for version in range(3):
        assert same(tools.run(engine, wanted), tools.run(plain, wanted))
        step(model, version)
        engine.load(version + 1, ())
        plain.load(version + 1, ())


def test_the_gap_is_rounding_without_a_fault(tools: Any) -> None:
    model = tools.decoder()
    wanted = tools.requests(PROMPTS, 8)
    assert gap(model, wanted, faulty(tools, model, NoiseFault(scale=0), wanted)) < 1e-6


def test_score_is_the_log_prob_of_the_full_forward(tools: Any) -> None:
    model = tools.decoder()
    tokens = np.array([4, 1, 7])
    found = completion_logprobs(model, (2, 3), tokens, 0.7)
    context = [2, 3]
    for token, logp in zip(tokens.tolist(), found, strict=True):
        assert logp == pytest.approx(float((next_logits(model, context) / 0.7).log_softmax(-1)[token]), abs=1e-6)
        context.append(token)
    assert completion_logprobs(model, (2, 3), np.empty(0, dtype=np.int64), 1.0).shape == (0,)


# --- faults in the weights -----------------------------------------------------------------------------------------------


def test_noise_makes_a_gap_that_grows_with_its_scale_and_reports_the_truth(tools: Any) -> None:
    model = tools.decoder()
    wanted = tools.requests(PROMPTS, 16)
    gaps = []
    for scale in (0.003, 0.01, 0.03, 0.1):
        engine = MismatchEngine(DenseEngine, model, NoiseFault(scale=scale))
        found = tools.run(engine, wanted)
        gaps.append(gap(model, wanted, found))
        assert gap(engine.sampler, wanted, found) < 1e-6
    assert gaps == sorted(gaps)
    assert gaps[3] > 10 * gaps[0] > 1e-3


def test_noise_is_the_same_after_every_load_and_another_for_another_seed_or_tensor() -> None:
    weight = torch.full((300, 40), 2.0, dtype=torch.float64)
    moved = add_noise("a", weight, 0.1, 0) - weight
    torch.testing.assert_close(add_noise("a", weight, 0.1, 0) - weight, moved, rtol=0, atol=0)
    torch.testing.assert_close(add_noise("a", 3 * weight, 0.1, 0), 3 * (weight + moved))  # a share of the tensor's size
    torch.testing.assert_close(add_noise("a", -weight, 0.1, 0) + weight, moved)  # whatever the weights
    assert float(moved.std()) == pytest.approx(0.2, rel=0.05)
    for other in (add_noise("a", weight, 0.1, 1), add_noise("b", weight, 0.1, 0)):
        assert not torch.allclose(other - weight, moved)
    assert add_noise("a", torch.zeros(5), 0.1, 0).tolist() == [0.0] * 5
    assert add_noise("a", weight.bfloat16(), 0.1, 0).dtype == torch.bfloat16


def test_int8_rounds_each_row_by_its_largest_weight_and_leaves_vectors() -> None:
    weight = torch.tensor([[127.0, 0.6, -3.4], [0.0, 0.0, 0.0], [1.0, -2.54, 0.013]])
    kept = round_weight(weight, "int8")
    torch.testing.assert_close(kept, torch.tensor([[127.0, 1.0, -3.0], [0.0, 0.0, 0.0], [1.0, -2.54, 0.02]]))
    assert torch.equal(round_weight(weight[0], "int8"), weight[0])
    assert torch.equal(round_weight(weight, "bf16"), weight.bfloat16().float())


def test_int8_makes_a_larger_gap_than_bf16(tools: Any) -> None:
    model = tools.decoder()
    wanted = tools.requests(PROMPTS, 16)
    bf16, int8 = (gap(model, wanted, faulty(tools, model, QuantisedFault(kind=k), wanted)) for k in ("bf16", "int8"))
    assert 1e-4 < bf16 < int8 < 0.5


def test_quantised_and_noisy_weights_follow_the_policy(tools: Any) -> None:
    for fault in (QuantisedFault(kind="int8"), NoiseFault(scale=0.05)):
        model = tools.decoder()
        engine = MismatchEngine(DenseEngine, model, fault)
        step(model, 1)
        engine.load(1, ())
        found = dict(engine.sampler.named_parameters())
        for name, weight in MismatchEngine(DenseEngine, model, fault).sampler.named_parameters():
            assert torch.equal(found[name], weight)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_stale_engine_samples_exactly_as_the_policy_did_so_many_loads_ago(tools: Any, steps: int) -> None:
    model = tools.decoder()
    wanted = tools.requests(PROMPTS, 4)
    engine, past = MismatchEngine(DenseEngine, model, StaleFault(steps=steps)), []
    for version in range(6):
        plain = DenseEngine(copy.deepcopy(model))
        plain.load(version, ())
        past.append(tools.run(plain, wanted))
        assert same(tools.run(engine, wanted), past[max(0, version - steps)])
        step(model, version)
        engine.load(version + 1, ())
    assert not same(past[0], past[1])


def test_the_gap_grows_with_staleness(tools: Any) -> None:
    wanted = tools.requests(PROMPTS, 16)
    gaps = []
    for steps in (0, 1, 3):
        model = tools.decoder()
        engine = MismatchEngine(DenseEngine, model, StaleFault(steps=steps))
        for version in range(4):
            step(model, version, 0.02)
            engine.load(version + 1, ())
        gaps.append(gap(model, wanted, tools.run(engine, wanted)))
    assert gaps[0] < 1e-6 < gaps[1] < gaps[2]


@pytest.mark.parametrize("saved_after_load", [True, False])
def test_a_stale_engine_resumes_from_a_checkpoint(tools: Any, tmp_path: Path, saved_after_load: bool) -> None:
    model = tools.decoder()
    wanted = tools.requests(PROMPTS, 2)
    engine = MismatchEngine(DenseEngine, model, StaleFault(steps=2))
    for version in (1, 2, 3):
        step(model, version)
        if version == 3 and not saved_after_load:
            write_contents(tmp_path, engine.contents(keep_in_place))
        engine.load(version, ())
    if saved_after_load:
        write_contents(tmp_path, engine.contents(keep_in_place))
    again = MismatchEngine(
        DenseEngine, tools.decoder(), StaleFault(steps=2)
    )  # the run's start, as a resumed run has it
    again.policy.load_state_dict(model.state_dict())
    again.restore(tmp_path)
    again.load(3, ())
    for version in (4, 5, 6):
        assert same(tools.run(again, wanted), tools.run(engine, wanted))
        for one in (engine, again):
            step(one.policy, version)
            one.load(version, ())


def test_weights_that_never_arrive_leave_the_first_ones_under_the_new_version(tools: Any) -> None:
    model = tools.decoder()
    wanted = tools.requests(PROMPTS, 4)
    first = tools.run(DenseEngine(copy.deepcopy(model)), wanted)
    engine = MismatchEngine(DenseEngine, model, NeverLoadedFault())
    assert same(tools.run(engine, wanted), first)
    for version in (1, 2):
        step(model, version)
        engine.load(version, ())
    found = tools.run(engine, wanted)
    assert {c.version for c in found.values()} == {2}
    for i in first:
        assert np.array_equal(found[i].tokens, first[i].tokens)
        assert np.array_equal(found[i].logp, first[i].logp)
    assert gap(model, wanted, found) > 0.01


def test_weights_that_are_sent_count_instead_of_the_policys(tools: Any) -> None:
    model, other = tools.decoder(), tools.decoder(seed=1)
    engine = MismatchEngine(DenseEngine, model, QuantisedFault(kind="int8"))
    engine.load(1, other.named_parameters())
    for name, weight in MismatchEngine(DenseEngine, other, QuantisedFault(kind="int8")).sampler.named_parameters():
        assert torch.equal(dict(engine.sampler.named_parameters())[name], weight)


def test_a_load_that_the_engine_refuses_changes_nothing(tools: Any) -> None:
    model = tools.decoder()
    engine = MismatchEngine(DenseEngine, model, StaleFault(steps=0))
    wanted = tools.requests(PROMPTS, 2, max_tokens=6)
    alone = tools.run(DenseEngine(copy.deepcopy(model)), wanted)
    engine.submit([*wanted, Request("short", (3,), tools.requests([(3,)], max_tokens=1)[0].sampling, 5)])
    found = {}
    for completion in engine.stream():
        found[completion.id] = completion
        if completion.id == "short":
            step(model, 0)
            with pytest.raises(RuntimeError, match="rows are running"):
                engine.load(1, ())
    del found["short"]
    assert same(found, alone)


# --- faults in requests and reports --------------------------------------------------------------------------------------


def test_a_wrong_sampling_temperature_is_reported_truly_and_the_gap_grows_with_it(tools: Any) -> None:
    model = tools.decoder()
    wanted = tools.requests(PROMPTS, 8, temperature=0.8)
    gaps = []
    for factor in (1.05, 1.3, 2.0):
        found = faulty(tools, model, TemperatureFault(factor=factor), wanted)
        gaps.append(gap(model, wanted, found))
        for r in wanted[:3]:
            truth = expected(model, r, found[r.id], tools.distribution, temperature=0.8 * factor)
            np.testing.assert_allclose(found[r.id].logp, truth, atol=1e-5)
    assert 1e-3 < gaps[0] < gaps[1] < gaps[2]


def test_a_wrong_reported_temperature_leaves_the_tokens_and_their_true_log_probs(tools: Any) -> None:
    model = tools.decoder()
    wanted = tools.requests(PROMPTS, 4, temperature=0.8)
    plain = tools.run(DenseEngine(model), wanted)
    found = faulty(tools, model, TemperatureFault(factor=1 / 0.8, wrong="reported"), wanted)
    for r in wanted:
        assert np.array_equal(found[r.id].tokens, plain[r.id].tokens)
        assert np.array_equal(found[r.id].drawn_logp, plain[r.id].logp)
        np.testing.assert_allclose(
            found[r.id].logp, expected(model, r, found[r.id], tools.distribution, temperature=1.0), atol=1e-5
        )
    assert gap(model, wanted, found) > 0.01


@pytest.mark.parametrize("wrong", ["sampled", "reported"])
def test_greedy_requests_stay_greedy_at_any_temperature(tools: Any, wrong: Any) -> None:
    model = tools.decoder()
    wanted = tools.requests(PROMPTS, temperature=0.0)
    found = faulty(tools, model, TemperatureFault(factor=2, wrong=wrong), wanted)
    assert same(found, tools.run(DenseEngine(model), wanted))


def test_top_p_left_on_is_invisible_in_full_log_probs_and_one_sided_in_truncated_ones(tools: Any) -> None:
    model = tools.decoder()
    wanted = tools.requests(PROMPTS, 8)
    full = faulty(tools, model, TruncatedFault(top_p=0.6), wanted)
    truncated = faulty(tools, model, TruncatedFault(top_p=0.6, reported="truncated"), wanted)
    assert gap(model, wanted, full) < 1e-6
    assert gap(model, wanted, truncated) > 0.1
    for r in wanted:
        one, other = full[r.id], truncated[r.id]
        assert np.array_equal(one.tokens, other.tokens)
        assert np.array_equal(one.drawn_logp, other.logp)
        assert (other.logp >= one.logp - 1e-6).all()
    for r in wanted[:3]:
        truth = expected(model, r, full[r.id], tools.distribution, top_p=0.6)
        np.testing.assert_allclose(full[r.id].drawn_logp, truth, atol=1e-5)


def test_top_p_that_is_asked_for_is_not_widened(tools: Any) -> None:
    model = tools.decoder()
    wanted = tools.requests(PROMPTS, 4, top_p=0.4)
    found = faulty(tools, model, TruncatedFault(top_p=0.9, reported="truncated"), wanted)
    assert same(found, tools.run(DenseEngine(model), wanted))


def test_an_extra_bos_is_what_the_engine_sees_and_the_trainer_does_not(tools: Any) -> None:
    model = tools.decoder()
    wanted = tools.requests(PROMPTS, 8)
    found = faulty(tools, model, ExtraBosFault(token=3), wanted)
    assert gap(model, wanted, found) > 0.01
    for r in wanted:
        np.testing.assert_allclose(
            found[r.id].logp, completion_logprobs(model, (3, *r.tokens), found[r.id].tokens, 1.0), atol=1e-6
        )


def test_reencoded_text_has_other_tokens_under_the_log_probs_of_the_drawn_ones(tools: Any, pairs: Tokenizer) -> None:
    model = tools.decoder(vocab=8)
    wanted = tools.requests([(2,), (4, 5)], 16, stop_tokens=(1,))
    plain = tools.run(DenseEngine(model), wanted)
    found = faulty(tools, model, ReencodedFault(), wanted, tokenizer=pairs)
    changed = 0
    for r in wanted:
        one = found[r.id]
        assert np.array_equal(one.drawn, plain[r.id].tokens)
        assert np.array_equal(one.drawn_logp, plain[r.id].logp)
        assert pairs.decode(one.tokens) == pairs.decode(one.drawn)
        assert (one.tokens[-1:] == 1).all() == (one.finish == "stop")
        shared = min(len(one.tokens), len(one.drawn))
        assert np.array_equal(one.logp[:shared], one.drawn_logp[:shared])
        assert len(one.logp) == len(one.tokens)
        assert not one.logp[shared:].any()
        changed += not np.array_equal(one.tokens, one.drawn)
    assert changed > 5
    assert gap(model, wanted, found) > 0.01


def test_reencoding_pairs_by_position(pairs: Tokenizer) -> None:
    request = Request("r", (2,), SamplingOptions(stop_tokens=(1,)), 0)

    def again(*drawn: int) -> tuple[list[int], list[float]]:
        logp = -np.arange(1, len(drawn) + 1, dtype=np.float32)
        tokens, paired = reencode(pairs, request, Completion("r", np.array(drawn, dtype=np.int64), logp, "stop", 0))
        assert (tokens.dtype, paired.dtype) == (np.int64, np.float32)
        return tokens.tolist(), paired.tolist()

    assert again(2, 3, 4, 1) == ([6, 4, 1], [-1, -2, -3])  # "ab" is one token, and what follows slips
    assert again(6, 7) == ([6, 7], [-1, -2])  # already as the tokenizer writes it
    assert again(2, 0, 3, 1) == ([6, 1], [-1, -2])  # a special token inside is no text
    assert again(1) == ([1], [-1])
    assert again(0) == ([], [])
    assert again() == ([], [])


def test_reencoding_needs_a_tokenizer(tools: Any) -> None:
    with pytest.raises(UserError, match="tokenizer"):
        MismatchEngine(DenseEngine, tools.decoder(), ReencodedFault())


def test_any_engine_can_be_wrapped(tools: Any) -> None:
    """With a transformers model whose head is tied to its embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=13, n_embd=16, n_layer=1, n_head=2, n_positions=64, bos_token_id=None, eos_token_id=None
    )
    policy = TransformersPolicy(GPT2LMHeadModel(config).double())
    step(policy, 0, 0.3)

    def make(module: TransformersPolicy) -> TransformersEngine:
        return TransformersEngine(module, 8, str, pad_id=0)

    wanted = tools.requests(PROMPTS, 4)
    assert same(tools.run(MismatchEngine(make, policy, NoiseFault(scale=0)), wanted), tools.run(make(policy), wanted))
    engine = MismatchEngine(make, policy, QuantisedFault(kind="int8"))
    found = tools.run(engine, wanted)
    assert gap(engine.sampler, wanted, found) < 1e-6 < 1e-4 < gap(policy, wanted, found)


# --- every fault ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", EVERY, ids=lambda f: "-".join(map(str, f.model_dump().values())))
def test_a_run_repeats_bit_for_bit_whatever_the_batch(tools: Any, pairs: Tokenizer, fault: Mismatch) -> None:
    wanted = tools.requests([(2,), (4, 5)], 3, temperature=0.9, stop_tokens=(1,))
    results = []
    for max_rows in (8, 2):
        model = tools.decoder(vocab=8)
        engine = MismatchEngine(lambda m, rows=max_rows: DenseEngine(m, rows), model, fault, pairs)
        for version in (1, 2):
            step(model, version)
            engine.load(version, ())
        results.append(tools.run(engine, wanted))
        again = tools.run(engine, wanted)
        assert same(results[-1], again)
    for r in wanted:
        one, other = (result[r.id] for result in results)
        assert np.array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logp, other.logp, atol=1e-6)


@pytest.mark.parametrize("fault", EVERY, ids=lambda f: "-".join(map(str, f.model_dump().values())))
def test_aborted_requests_come_back_through_the_fault_or_not_at_all(
    tools: Any, pairs: Tokenizer, fault: Mismatch
) -> None:
    engine = MismatchEngine(lambda m: DenseEngine(m, 2), tools.decoder(vocab=8), fault, pairs)
    wanted = tools.requests([(2,), (4, 5)], 2, max_tokens=9)
    wanted[0] = replace(wanted[0], sampling=replace(wanted[0].sampling, max_tokens=3))
    engine.submit([*wanted, Request("never", (3,), wanted[1].sampling, 1)])
    assert next(engine.stream()).id == wanted[0].id
    assert engine.abort(["never"], keep=False) == []
    kept = engine.abort([r.id for r in wanted[1:]], keep=True)  # one that runs, two that wait
    assert sorted(c.id for c in kept) == [r.id for r in wanted[1:]]
    assert all(isinstance(c, FaultyCompletion) and len(c.tokens) == len(c.logp) for c in kept)
    assert max(len(c.drawn) for c in kept if isinstance(c, FaultyCompletion)) == 3
    assert list(engine.stream()) == []
    engine.sleep()
    engine.wake()
    tools.run(engine, wanted)  # the names are free again


def test_records_are_told_apart_by_name_and_refuse_what_makes_no_sense() -> None:
    slot = TypeAdapter[Any](MismatchSlot)
    assert slot.validate_python("never_loaded") == NeverLoadedFault()
    assert slot.validate_python({"name": "stale", "steps": 3}) == StaleFault(steps=3)
    assert {type(f) for f in EVERY} == set(MISMATCH_FAULTS)
    for wrong in (
        {"name": "noise", "scale": -1},
        {"name": "stale", "steps": -1},
        {"name": "temperature", "factor": 0},
        {"name": "truncated", "top_p": 0},
        {"name": "quantised", "kind": "fp4"},
        {"name": "never_loaded", "steps": 1},
    ):
        with pytest.raises(ValidationError):
            slot.validate_python(wrong)


@pytest.mark.parametrize("fault", [NoiseFault(scale=0.05), QuantisedFault(kind="int8")], ids=lambda fault: fault.name)
def test_weights_in_4_bits_have_no_fault_made_of_them(fault: Mismatch) -> None:
    model = Decoder(Architecture("llama", 13, 16, 1, 2, 2, 8, 24, 64))
    initialise(model, 0)
    MismatchEngine(DenseEngine, model, fault)
    add_lora(model, Lora(rank=2, base="nf4"), 0)
    with pytest.raises(
        UserError, match=f"mismatch={fault.name} changes weights that are plain numbers, and the policy"
    ):
        MismatchEngine(DenseEngine, model, fault)


def test_a_faulty_engine_with_8_bit_copies_multiplies_by_its_own_weights() -> None:
    model = Decoder(Architecture("llama", 16, 32, 2, 2, 1, 16, 32, 64))
    initialise(model, seed=0, std=0.2)
    engine = MismatchEngine(lambda module: PagedEngine(module, weights="fp8"), model, NoiseFault(scale=0.05))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1.5)
    engine.load(1, [])
    products = engine.engine.products
    for module in products.modules:
        copy_ = dequantised(products.matrices[id(module)], torch.float32)
        assert torch.allclose(copy_, module.weight, atol=0.05 * float(module.weight.abs().max()))
        assert any(module is one for one in engine.sampler.modules())
