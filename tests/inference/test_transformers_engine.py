"""The transformers engine on a tiny GPT-2: the same contract as the native engines. And gpt-oss, which only it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, GptOssConfig, GptOssForCausalLM

from burnish.algorithms.losses.policy_loss import PolicyLoss
from burnish.algorithms.terms.loss_terms import aggregation_weights
from burnish.config.errors import UserError
from burnish.config.model import Optimizer
from burnish.core.batch import Batch
from burnish.core.engine import Completion, Request, SamplingOptions
from burnish.core.random_keys import fold
from burnish.core.segments import offsets_from_lengths
from burnish.inference.transformers_engine import TransformersEngine
from burnish.models.transformers_model import TransformersPolicy
from burnish.training.learner import Learner

VOCAB = 17
SAMPLINGS = [
    SamplingOptions(max_tokens=9),
    SamplingOptions(max_tokens=20, temperature=0.7, stop_tokens=(1, 4)),
    SamplingOptions(max_tokens=7, top_k=4),
    SamplingOptions(max_tokens=7, top_p=0.8),
    SamplingOptions(max_tokens=7, min_p=0.3),
    SamplingOptions(max_tokens=8, temperature=0.0),
    SamplingOptions(max_tokens=9, temperature=0.7, top_k=9, logit_bias=((3, 2.0), (5, -100.0)), raw_logprobs=True),
]


def make(eos: int | None = None) -> TransformersPolicy:
    config = GPT2Config(
        vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=64, bos_token_id=None, eos_token_id=eos,
        pad_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise + (1.0 if "ln_" in name and name.endswith("weight") else 0.0))
    return TransformersPolicy(model)


@pytest.fixture(scope="module")
def policy() -> TransformersPolicy:
    return make()


def spell(tokens: list[int]) -> str:
    return "".join(chr(97 + t) for t in tokens)


def engine_of(policy: TransformersPolicy, max_rows: int = 8) -> TransformersEngine:
    return TransformersEngine(policy, max_rows, spell, pad_id=0)


def full_forward(policy: TransformersPolicy) -> Callable[[list[int]], Tensor]:
    def next_logits(tokens: list[int]) -> Tensor:
        with torch.no_grad():
            return policy.inner(torch.tensor([tokens])).logits[0, -1]

    return next_logits


def mixed_requests() -> list[Request]:
    prompts = [(3,), (4, 5, 6), (3, 3, 9, 2, 7, 7, 8, 1, 0, 4), (0, 0, 5), (11, 2)]
    return [
        Request(f"r{i}.{k}", prompt, sampling, fold("mixed", i, k), generated=i)
        for k, sampling in enumerate(SAMPLINGS)
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("max_rows", [1, 3, 8])
def test_every_request_gets_the_tokens_and_logprobs_of_a_sampler_on_full_forwards(
    tools: Any, policy: TransformersPolicy, max_rows: int
) -> None:
    """Prompts of different lengths are padded on the left, options are mixed: neither may matter."""
    wanted = mixed_requests()
    got = tools.run(engine_of(policy, max_rows), wanted)
    for request in wanted:
        tokens, logp, finish = tools.reference(full_forward(policy), request)
        assert got[request.id].tokens.tolist() == tokens, request.id
        assert got[request.id].finish == finish
        np.testing.assert_allclose(got[request.id].logp, logp, atol=1e-5)
        assert (got[request.id].raw_logp is None) != request.sampling.raw_logprobs


def test_raw_logprobs_are_those_of_the_model_itself(tools: Any, policy: TransformersPolicy) -> None:
    wanted = [r for r in mixed_requests() if r.sampling.raw_logprobs]
    for name, completion in tools.run(engine_of(policy), wanted).items():
        (request,) = (r for r in wanted if r.id == name)
        tokens = torch.tensor([*request.tokens, *completion.tokens.tolist()])
        with torch.no_grad():
            logp = policy.inner(tokens[None]).logits[0].log_softmax(-1)
        expected = logp[len(request.tokens) - 1 : -1].gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        np.testing.assert_allclose(completion.raw_logp, expected.numpy(), atol=1e-5)
        assert 5 not in completion.tokens
        assert np.abs(completion.raw_logp - completion.logp).max() > 0.1
    bad = replace(wanted[0], sampling=replace(wanted[0].sampling, logit_bias=((VOCAB, 1.0),)))
    with pytest.raises(UserError, match=f"names token {VOCAB}"):
        engine_of(policy).submit([bad])


def test_logprobs_are_the_learners(tools: Any, policy: TransformersPolicy) -> None:
    wanted = tools.requests([(3, 4, 5), (9,)], 3, temperature=0.8)
    got = tools.run(engine_of(policy), wanted)
    for request in wanted:
        tokens = torch.tensor([*request.tokens, *got[request.id].tokens.tolist()])
        wanted_positions = torch.arange(len(request.tokens), len(tokens))
        with torch.no_grad():
            logp, _ = policy.token_logprobs(tokens, torch.tensor([0, len(tokens)]), wanted_positions, 0.8)
        np.testing.assert_allclose(got[request.id].logp, logp.numpy(), atol=1e-5)


def test_the_models_own_generation_settings_change_nothing(tools: Any, policy: TransformersPolicy) -> None:
    """The model's own end token, penalties and forbidden tokens must not apply."""
    other = make(eos=5)
    settings = {"eos_token_id": 5, "repetition_penalty": 3.0, "suppress_tokens": [2, 3, 4], "min_new_tokens": 6}
    settings |= {"forced_eos_token_id": 5, "no_repeat_ngram_size": 1, "stop_strings": ["a", "b"], "do_sample": True}
    for name, value in settings.items():
        setattr(other.inner.generation_config, name, value)
    wanted = mixed_requests()
    plain, got = (tools.run(engine_of(p), wanted) for p in (policy, other))
    for request in wanted:
        assert got[request.id].tokens.tolist() == plain[request.id].tokens.tolist()
        assert got[request.id].finish == plain[request.id].finish
        np.testing.assert_array_equal(got[request.id].logp, plain[request.id].logp)
    assert any(5 in c.tokens[:-1] for c in got.values())


def test_stop_strings_end_a_completion_across_token_borders(tools: Any, policy: TransformersPolicy) -> None:
    plain = tools.requests([(3, 4, 5), (9,), (6, 6)], 2, max_tokens=20)
    free = tools.run(engine_of(policy), plain)
    text = spell(free["0.0"].tokens.tolist())
    stop = (text[4:7], "\n")
    got = tools.run(engine_of(policy), [replace(r, sampling=replace(r.sampling, stop=stop)) for r in plain])
    for name, completion in got.items():
        whole = free[name].tokens.tolist()
        where = spell(whole).find(stop[0])
        assert completion.finish == ("length" if where < 0 else "stop")
        assert completion.tokens.tolist() == (whole if where < 0 else whole[: where + 3])
    assert got["0.0"].finish == "stop"


def test_completions_carry_the_version_and_new_weights_are_taken_in_place(tools: Any) -> None:
    policy = make()
    engine = engine_of(policy)
    wanted = tools.requests([(3, 4, 5)], 2)
    before = tools.run(engine, wanted)
    assert {c.version for c in before.values()} == {0}
    addresses = [p.data_ptr() for p in policy.parameters()]
    engine.load(4, [(name, 0.5 * p.detach()) for name, p in policy.inner.named_parameters()])
    after = tools.run(engine, wanted)
    assert {c.version for c in after.values()} == {4}
    assert [p.data_ptr() for p in policy.parameters()] == addresses
    for request in wanted:
        tokens, logp, _ = tools.reference(full_forward(policy), request)
        assert after[request.id].tokens.tolist() == tokens
        np.testing.assert_allclose(after[request.id].logp, logp, atol=1e-5)
    assert not np.allclose(after["0.0"].logp, before["0.0"].logp)


def test_waiting_requests_are_aborted_and_new_ones_taken_while_streaming(
    tools: Any, policy: TransformersPolicy
) -> None:
    engine = engine_of(policy, max_rows=2)
    first, second, third, fourth = tools.requests([(3,)], 4)
    engine.submit([third, fourth, replace(second, priority=1), replace(first, priority=2)])  # the highest goes first
    stream = engine.stream()
    assert next(stream).id == first.id
    (kept,) = engine.abort([third.id], keep=True)
    assert (kept.id, kept.finish, len(kept.tokens)) == (third.id, "aborted", 0)
    assert engine.abort([fourth.id], keep=False) == []
    engine.submit([replace(first, id="later")])
    rest = {c.id: c for c in stream}
    assert rest.keys() == {second.id, "later"}
    engine.sleep()
    engine.wake()
    assert tools.run(engine, [third])[third.id].finish == "length"


def test_requests_that_can_never_run_are_refused_with_the_numbers(tools: Any, policy: TransformersPolicy) -> None:
    engine = engine_of(policy)
    with pytest.raises(UserError, match=r"request 0\.0 may need 65 positions, but the model has 64"):
        engine.submit(tools.requests([(3,) * 53]))
    with pytest.raises(UserError, match=r"request 0\.0: the prompt has no tokens"):
        engine.submit(tools.requests([()]))
    with pytest.raises(ValueError, match=r"0\.0 is already waiting"):
        engine.submit(tools.requests([(3,)]) * 2)
    assert list(engine.stream()) == []


# --- gpt-oss ---------------------------------------------------------------------------------------------------------------


def gpt_oss() -> TransformersPolicy:
    """A tiny gpt-oss: attention sinks, a sliding window in every other layer, experts with biases."""
    config = GptOssConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=12, num_local_experts=4, num_experts_per_tok=2, sliding_window=4, max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = GptOssForCausalLM(config)  # in float32: torch's grouped product has no float64
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return TransformersPolicy(model)


def test_gpt_oss_trains_on_exactly_what_its_engine_sampled(tools: Any) -> None:
    """Before and after an update, the learner's log-probs of the samples are the engine's."""
    policy = gpt_oss()
    learner = Learner(policy, Optimizer(lr=0.05), 2, token_budget=40)
    wanted = tools.requests([(3, 4, 5), (9,)], 2)
    sampled = []
    for _ in range(2):
        got = tools.run(engine_of(policy), wanted)
        batch = batch_of(wanted, got)
        gap = (learner.logprobs(batch) - batch.token["behaviour_logp"])[batch.token["loss_mask"]]
        assert gap.abs().max() < 1e-5
        sampled.append(float(batch.token["behaviour_logp"].sum()))
        before = {name: p.detach().clone() for name, p in policy.named_parameters()}
        assert learner.update(batch, PolicyLoss()).skipped is None
        unmoved = [name for name, p in policy.named_parameters() if torch.equal(p, before[name])]
        assert unmoved == []
    assert abs(sampled[0] - sampled[1]) > 1e-3


def batch_of(wanted: list[Request], got: dict[str, Completion]) -> Batch:
    """The samples as a batch, with advantages of both signs."""
    rows = [(list(r.tokens), got[r.id]) for r in wanted]
    tokens = [token for prompt, c in rows for token in (*prompt, *c.tokens.tolist())]
    mask = torch.tensor([k >= len(prompt) for prompt, c in rows for k in range(len(prompt) + len(c.tokens))])
    logp = [value for prompt, c in rows for value in (*[0.0] * len(prompt), *c.logp.tolist())]
    batch = Batch(
        torch.tensor(tokens),
        offsets_from_lengths(torch.tensor([len(prompt) + len(c.tokens) for prompt, c in rows])),
        {"action_mask": mask, "loss_mask": mask, "behaviour_logp": torch.tensor(logp)},
        {"advantages": torch.tensor([1.0 if k % 2 else -1.0 for k in range(len(rows))])},
    )
    return batch.with_token(weight=aggregation_weights(batch, "token-mean"))
