"""`echo` and top log-probs: the numbers are those of a plain forward pass."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest
import torch
from torch import Tensor

from burnish.models.transformers_model import TransformersPolicy
from burnish.serve import request_to_engine
from burnish.serve.request_to_engine import TokenScorer

IDS = {"return_token_ids": True}


def complete(running: Any, **options: Any) -> Any:
    return running.client().completions.create(**({"model": running.name, "prompt": "the cat"} | options))


def logits_of(running: Any, tokens: list[int]) -> Tensor:
    """[tokens, vocab], by an independent forward over the whole sequence."""
    with torch.no_grad():
        hidden, _ = running.model.states(
            torch.tensor(tokens), torch.tensor([0, len(tokens)]), torch.arange(len(tokens))
        )
        return running.model.logits(hidden)


def likelihood(choice: Any, context: int) -> tuple[float, bool]:
    """What a harness reads of an echoed prompt: the log-likelihood of its end, and whether greedy decoding would write it.

    The last token is the one that was sampled for `max_tokens=1`.
    """
    logp, top = choice.logprobs.token_logprobs[context:-1], choice.logprobs.top_logprobs[context:-1]
    return sum(logp), all(value == max(others.values()) for value, others in zip(logp, top, strict=True))


def test_a_harness_reads_log_likelihoods_of_prompts(random_server: Any) -> None:
    encode = random_server.tokenizer.encode
    greedy = complete(random_server, temperature=0, max_tokens=3, extra_body=IDS).choices[0].token_ids
    contexts = [encode("the cat")] * 2
    rows = [[*contexts[0], *greedy], [*contexts[1], *encode(" sat")]]
    asked = {"prompt": rows, "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1234}
    found = complete(random_server, **asked)
    for choice, row, context, is_greedy in zip(found.choices, rows, contexts, (True, False), strict=True):
        wanted = logits_of(random_server, row).log_softmax(-1)[:-1].gather(1, torch.tensor(row[1:])[:, None])[:, 0]
        assert choice.logprobs.token_logprobs[0] is None
        assert choice.logprobs.top_logprobs[0] is None
        assert choice.logprobs.token_logprobs[1:-1] == pytest.approx(wanted.tolist(), abs=1e-6)
        assert likelihood(choice, len(context)) == (
            pytest.approx(sum(wanted.tolist()[-(len(row) - len(context)) :])),
            is_greedy,
        )
        assert len(choice.logprobs.tokens) == len(row) + 1
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (sum(map(len, rows)), 2)


def test_a_prompt_is_echoed_as_it_was_given(random_server: Any) -> None:
    text = "the cat é"
    tokens = random_server.tokenizer.encode(text)
    for prompt in (text, tokens):
        scored = complete(random_server, prompt=prompt, max_tokens=0, echo=True, logprobs=0).choices[0]
        assert (scored.text, scored.finish_reason) == (text, "length")
        assert scored.logprobs.tokens == random_server.tokenizer.pieces(tokens)
        assert scored.logprobs.text_offset[:3] == [0, 3, 4]
        assert scored.logprobs.top_logprobs is None
        assert len(scored.logprobs.token_logprobs) == len(tokens)
    plain = complete(random_server, prompt=text, max_tokens=4, seed=1, logprobs=0)
    both = complete(random_server, prompt=text, max_tokens=4, seed=1, n=2, logprobs=0, echo=True)
    assert both.choices[0].text == text + plain.choices[0].text
    assert both.choices[0].logprobs.token_logprobs[len(tokens) :] == plain.choices[0].logprobs.token_logprobs
    assert both.choices[0].logprobs.text_offset[len(tokens)] == len(text)
    assert (
        both.choices[1].logprobs.token_logprobs[1 : len(tokens)]
        == both.choices[0].logprobs.token_logprobs[1 : len(tokens)]
    )
    bare = complete(random_server, prompt=text, max_tokens=4, seed=1, echo=True).choices[0]
    assert (bare.text, bare.logprobs) == (both.choices[0].text, None)
    one = complete(random_server, prompt=[5], max_tokens=0, echo=True, logprobs=2).choices[0].logprobs
    assert (one.token_logprobs, one.top_logprobs) == ([None], [None])


@pytest.mark.parametrize(
    ("options", "raw"),
    [
        ({"temperature": 1.0}, False),
        ({"temperature": 0.7, "logit_bias": {"70": 3}, "extra_body": {"top_k": 4}}, False),
        ({"temperature": 0.7, "top_p": 0.5, "logit_bias": {"70": 3}}, True),
        ({"temperature": 0}, False),
    ],
)
def test_alternatives_are_of_the_distribution_that_is_drawn_from_or_the_models_own(
    random_server: Any, options: dict[str, Any], raw: bool
) -> None:
    extra = options.get("extra_body", {}) | IDS | {"raw_logprobs": raw}
    asked = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 6,
        "seed": 3,
        "logprobs": True,
    }
    answer = random_server.client().chat.completions.create(
        **asked, top_logprobs=5, **(options | {"extra_body": extra})
    )
    found, start = answer.choices[0], len(answer.prompt_token_ids)
    logits = logits_of(random_server, answer.prompt_token_ids + found.token_ids)[start - 1 : -1]
    if not raw:
        for token, value in options.get("logit_bias", {}).items():
            logits[:, int(token)] += value
        logits /= options["temperature"] or 1.0
    wanted = logits.log_softmax(-1)
    if top_k := extra.get("top_k"):
        kept = wanted.topk(top_k)
        wanted = torch.full_like(wanted, -math.inf).scatter(1, kept.indices, kept.values.log_softmax(-1))
    for k, (token, entry) in enumerate(zip(found.token_ids, found.logprobs.content, strict=True)):
        best = [x for x in wanted[k].topk(5).values.tolist() if x > -math.inf]
        assert [other.logprob for other in entry.top_logprobs] == pytest.approx(best, abs=1e-5)
        assert entry.logprob == pytest.approx(float(wanted[k, token]), abs=1e-5)


def test_a_chat_has_as_many_alternatives_as_it_asks_for_whole_and_in_a_stream(random_server: Any) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 5,
        "seed": 4,
    }
    asked |= {"logprobs": True, "top_logprobs": 3}
    create = random_server.client().chat.completions.create
    whole = create(**asked).choices[0].logprobs.content
    parts = [part.choices[0].logprobs for part in create(**asked, stream=True) if part.choices[0].logprobs]
    assert [entry for part in parts for entry in part.content] == whole
    for entry in whole:
        values = [other.logprob for other in entry.top_logprobs]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert max(values) >= entry.logprob - 1e-5


def test_prompts_that_are_too_long_to_score_are_refused(random_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_to_engine, "MAX_SCORED_TOKENS", 10)
    for options in ({"echo": True, "prompt": [5] * 11, "max_tokens": 1}, {"prompt": [5] * 5, "max_tokens": 6}):
        with pytest.raises(openai.BadRequestError, match="for 10 tokens at most") as caught:
            complete(random_server, logprobs=2, **options)
        assert caught.value.param == "logprobs"
    assert complete(random_server, prompt=[5] * 11, max_tokens=1, temperature=0, logprobs=1).choices


def test_a_fault_while_scoring_is_that_requests_alone(random_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a fault in scoring")

    with monkeypatch.context() as patch:
        patch.setattr(TokenScorer, "score", fail)
        with pytest.raises(openai.InternalServerError):
            complete(random_server, echo=True, max_tokens=0, logprobs=1)
    assert random_server.loop.failure is None
    assert complete(random_server, echo=True, max_tokens=0, logprobs=1).choices
    random_server.wait_until(random_server.is_idle)


def test_a_model_of_transformers_is_scored_too() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": 50}
    model = GPT2LMHeadModel(GPT2Config(**sizes)).eval()
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    found = TokenScorer(TransformersPolicy(model)).score(tokens, 3, 2)
    with torch.no_grad():
        wanted = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)[2:-1]
    assert found.logp == pytest.approx(wanted.gather(1, torch.tensor(tokens[3:])[:, None])[:, 0].tolist(), abs=1e-6)
    assert [[i for i, _ in row] for row in found.top] == wanted.topk(2).indices.tolist()
