"""`/v1/completions` through the real client: answers are what the engine drew."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import torch

from burnish.gateway.completion_text import completion_text
from burnish.gateway.openai_schema import CompletionRequest
from burnish.inference.native.dense_engine import DenseEngine
from burnish.serve.request_to_engine import EnginePrompt, engine_requests

IDS = {"return_token_ids": True}


def complete(running: Any, **options: Any) -> Any:
    return running.client().completions.create(**({"model": running.name, "prompt": "the cat"} | options))


def text_of(stream: Any) -> dict[int, str]:
    """The joined text of each choice of a stream."""
    texts: dict[int, str] = {}
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    return texts


def test_the_server_names_its_model(random_server: Any) -> None:
    client = random_server.client()
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "burnish"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")


def test_tokens_and_logprobs_are_those_of_the_engine(random_server: Any) -> None:
    asked = {"max_tokens": 24, "n": 3, "seed": 7, "temperature": 0.8, "top_p": 0.9, "logprobs": 0}
    found = complete(random_server, **asked, extra_body={**IDS, "top_k": 200})
    tokenizer = random_server.tokenizer
    prompt = tuple(tokenizer.encode("the cat"))
    request = CompletionRequest(model="tiny", prompt="the cat", top_k=200, **asked)
    requests = engine_requests(request, [EnginePrompt(prompt)], random_server.served, "x")
    engine = DenseEngine(random_server.model, decode=tokenizer.decode)
    engine.submit(requests)
    direct = {c.id: c for c in engine.stream()}
    for choice, wanted in zip(found.choices, requests, strict=True):
        completion = direct[wanted.id]
        assert choice.token_ids == completion.tokens.tolist()
        assert choice.prompt_token_ids == list(prompt)
        assert choice.logprobs.token_logprobs == pytest.approx(completion.logp.tolist(), abs=1e-6)
        assert choice.finish_reason == completion.finish
        assert choice.text == completion_text(choice.token_ids, tokenizer, tokenizer.eos_ids, ())
    assert len({tuple(choice.token_ids) for choice in found.choices}) == 3
    num = sum(len(choice.token_ids) for choice in found.choices)
    assert found.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}) == {
        "prompt_tokens": len(prompt), "completion_tokens": num, "total_tokens": len(prompt) + num,
    }  # fmt: skip


def test_logprobs_are_of_the_tempered_distribution_by_a_full_forward(random_server: Any) -> None:
    found = complete(random_server, max_tokens=16, temperature=0.7, logprobs=0, extra_body=IDS).choices[0]
    packed = torch.tensor(found.prompt_token_ids + found.token_ids)
    wanted = torch.arange(len(found.prompt_token_ids), len(packed))
    with torch.no_grad():
        logp, _ = random_server.model.token_logprobs(packed, torch.tensor([0, len(packed)]), wanted, 0.7)
    assert found.logprobs.token_logprobs == pytest.approx(logp.tolist(), abs=1e-6)
    assert found.logprobs.top_logprobs is None


def test_a_logit_bias_is_obeyed_and_in_the_logprobs(random_server: Any) -> None:
    asked = {"max_tokens": 12, "n": 2, "seed": 3, "logprobs": 0, "extra_body": IDS}
    for choice in complete(random_server, **asked, logit_bias={"70": 100, "71": 0}).choices:
        assert choice.token_ids == [70] * 12
        assert choice.logprobs.token_logprobs == pytest.approx([0.0] * 12, abs=1e-6)
    plain = complete(random_server, **asked).choices
    assert [c.token_ids for c in complete(random_server, **asked, logit_bias={"71": 0}).choices] == [
        c.token_ids for c in plain
    ]
    never = complete(random_server, **asked, logit_bias={str(t): -100 for t in plain[0].token_ids}).choices[0]
    assert not set(never.token_ids) & set(plain[0].token_ids)


def test_raw_logprobs_are_those_of_the_model_itself(random_server: Any) -> None:
    asked = {"max_tokens": 16, "temperature": 0.7, "top_p": 0.9, "seed": 5, "logprobs": 0, "logit_bias": {"70": 3}}
    drawn = complete(random_server, **asked, extra_body=IDS).choices[0]
    found = complete(random_server, **asked, extra_body={**IDS, "raw_logprobs": True}).choices[0]
    assert found.token_ids == drawn.token_ids
    packed = torch.tensor(found.prompt_token_ids + found.token_ids)
    wanted = torch.arange(len(found.prompt_token_ids), len(packed))
    with torch.no_grad():
        logp, _ = random_server.model.token_logprobs(packed, torch.tensor([0, len(packed)]), wanted, 1.0)
    assert found.logprobs.token_logprobs == pytest.approx(logp.tolist(), abs=1e-6)
    assert drawn.logprobs.token_logprobs != pytest.approx(logp.tolist(), abs=1e-2)


def test_min_p_of_one_draws_the_likeliest(random_server: Any) -> None:
    greedy = complete(random_server, max_tokens=16, temperature=0, extra_body=IDS).choices[0]
    sampled = complete(random_server, max_tokens=16, extra_body={**IDS, "min_p": 1.0}).choices[0]
    assert sampled.token_ids == greedy.token_ids


def test_the_pieces_of_the_logprobs_are_the_text(script_server: Any) -> None:
    tokens = script_server.tokenizer.encode("é the end") + list(script_server.tokenizer.eos_ids)
    script_server.model.say(tokens)
    found = complete(script_server, prompt=[65], temperature=0, max_tokens=30, logprobs=1).choices[0]
    assert (found.text, found.finish_reason) == ("é the end", "stop")
    assert found.logprobs.tokens == ["", "é", " ", "the", " ", "e", "n", "d", "<|im_end|>"]
    assert found.logprobs.text_offset == [0, 0, 1, 2, 5, 6, 7, 8, 9]
    assert found.logprobs.top_logprobs[3] == {"the": found.logprobs.token_logprobs[3]}


@pytest.mark.parametrize("options", [{}, {"n": 3}, {"prompt": ["a", "bb"], "n": 2}, {"stop": ["e", "x\ufffd"]}])
def test_a_stream_says_the_same_as_a_whole_answer(random_server: Any, options: dict[str, Any]) -> None:
    asked = {"max_tokens": 40, "seed": 11, **options}
    whole = complete(random_server, **asked)
    assert text_of(complete(random_server, **asked, stream=True)) == {c.index: c.text for c in whole.choices}


def test_a_stream_tells_ids_finishes_and_at_the_end_the_counts(random_server: Any) -> None:
    asked = {"max_tokens": 20, "seed": 2, "n": 2, "extra_body": IDS}
    whole = complete(random_server, **asked)
    chunks = list(complete(random_server, **asked, stream=True, stream_options={"include_usage": True}))
    for choice in whole.choices:
        parts = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert [t for part in parts for t in part.token_ids] == choice.token_ids
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]
        assert parts[0].prompt_token_ids == choice.prompt_token_ids
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].usage == whole.usage
    assert chunks[-1].choices == []
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_a_stream_tells_what_is_drawn_before_the_next_is(script_server: Any) -> None:
    script_server.model.say(script_server.tokenizer.encode("Hello é world"))
    script_server.model.hold_from = 7  # the model stops in the middle of the é, until the text before it has arrived
    script_server.model.gate.clear()
    stream = complete(script_server, prompt=[65], temperature=0, max_tokens=14, stream=True, stop="world!")
    text = ""
    while text != "Hello ":
        text += next(stream).choices[0].text
        assert "Hello ".startswith(text)
    script_server.model.gate.set()
    assert text_of(stream) == {0: "é world"}


def test_logprobs_in_a_stream_are_those_of_the_whole(random_server: Any) -> None:
    asked = {"max_tokens": 12, "seed": 5, "logprobs": 0}
    whole = complete(random_server, **asked).choices[0]
    (chunk,) = complete(random_server, **asked, stream=True)
    assert (chunk.choices[0].text, chunk.choices[0].logprobs) == (whole.text, whole.logprobs)


def test_prompts_are_texts_or_token_ids_one_or_several(random_server: Any) -> None:
    encode = random_server.tokenizer.encode
    forms = ["ab", ["ab"], encode("ab"), [encode("ab")]]
    texts = [complete(random_server, prompt=form, seed=1).choices[0].text for form in forms]
    assert len(set(texts)) == 1
    several = complete(random_server, prompt=["ab", "c"], seed=1, n=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == texts[0]
    assert several.usage.prompt_tokens == 3


def test_a_seed_repeats_and_without_one_answers_differ(random_server: Any) -> None:
    first, again, other = (complete(random_server, seed=seed, max_tokens=12).choices[0].text for seed in (4, 4, 5))
    assert first == again != other
    assert len({complete(random_server, max_tokens=12).choices[0].text for _ in range(3)}) == 3


def test_sixteen_tokens_unless_told_otherwise(random_server: Any) -> None:
    found = complete(random_server, prompt=[5, 6], seed=0, extra_body=IDS)
    assert (len(found.choices[0].token_ids), found.choices[0].finish_reason) == (16, "length")


def test_a_stop_string_is_cut_across_tokens_and_ends_the_answer(script_server: Any) -> None:
    script = script_server.tokenizer.encode("one two STOP three é")
    script_server.model.say(script)
    for stop, text, last in (("o S", "one tw", "S"), ("STOP", "one two ", "P"), (["zz", "TOP"], "one two S", "P")):
        asked = {"prompt": [65], "temperature": 0, "max_tokens": 200, "stop": stop}
        found = complete(script_server, **asked, extra_body=IDS)
        assert (found.choices[0].text, found.choices[0].finish_reason) == (text, "stop")
        # The engine stopped with the token that completed it, which may hold more than the string.
        assert script_server.tokenizer.decode(found.choices[0].token_ids).endswith((last, "STO"))
        assert text_of(complete(script_server, **asked, stream=True)) == {0: text}


def test_a_character_is_never_split_over_chunks(script_server: Any) -> None:
    text = "a 漢字 😀 é!" * 5
    script = script_server.tokenizer.encode(text)
    script_server.model.say(script)
    asked = {"prompt": [65], "temperature": 0, "max_tokens": len(script)}
    pieces = [chunk.choices[0].text for chunk in complete(script_server, **asked, stream=True)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    cut = complete(script_server, **(asked | {"max_tokens": 3})).choices[0]  # inside the second character
    assert (cut.text, cut.finish_reason) == ("a \ufffd", "length")


def test_many_clients_at_once_get_their_own_answers(random_server: Any) -> None:
    prompts = [f"prompt {i}" for i in range(24)]
    asked = {"max_tokens": 20, "seed": 9}
    alone = [complete(random_server, prompt=prompt, **asked).choices[0].text for prompt in prompts]

    def ask(i: int) -> str:
        if i % 2:
            return complete(random_server, prompt=prompts[i], **asked).choices[0].text
        return text_of(complete(random_server, prompt=prompts[i], **asked, stream=True))[0]

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, range(len(prompts)))) == alone
    random_server.wait_until(random_server.is_idle)
