"""Random sessions in the token tree: every token stays as it was drawn, whatever the client sends."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.environments.dialogue import ChatRenderer
from burnish.models.tokenizer import Tokenizer
from tests.environments.chat_templates import small_tokenizer
from tests.gateway.answered_session import shared_renderer
from tests.gateway.random_sessions import RandomSession
from tests.models.test_tokenizer import real

oracle_of = functools.cache(ChatRenderer)


def play(name: str, tokenizer: Tokenizer, choose: Any, history: Any, is_canonical: bool, num_calls: int) -> None:
    renderer = shared_renderer(name, tokenizer, history)
    session = RandomSession(name, renderer, choose, is_canonical, oracle_of(tokenizer))
    for _ in range(num_calls):
        session.call()
    session.check()


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)], ids=["2,000 calls", "10,000 calls"])
def test_thousands_of_random_calls_keep_every_token_as_it_was_drawn(every: int) -> None:
    cheap, others = ["llama3", "llama3.1", "gemma"], ["qwen2.5", "qwen3", "mistral"]  # others have more to render
    for seed in range(0, 250, every):
        name = (others if seed % 8 == 0 else cheap)[seed // 8 % 3]
        history = ("keep", "as_template")[seed // 24 % 2]
        choose = random.Random(seed).randrange
        play(name, small_tokenizer(name), choose, history, is_canonical=seed % 16 == 0, num_calls=40)


@settings(max_examples=25, deadline=None)
@given(st.data(), st.sampled_from(["qwen2.5", "qwen3", "mistral"]), st.booleans(), st.booleans())
def test_a_random_session_agrees_with_the_model(data: Any, name: str, keeps: bool, is_canonical: bool) -> None:
    def choose(size: int) -> int:
        return int(data.draw(st.integers(0, size - 1)))

    play(name, small_tokenizer(name), choose, "keep" if keeps else "as_template", is_canonical, num_calls=8)


@pytest.mark.parametrize("name", ["qwen2.5", "smollm2"])
def test_random_sessions_with_the_template_of_a_model(name: str) -> None:
    for seed, history in enumerate(("keep", "as_template")):
        play(name, real(name), random.Random(seed).randrange, history, is_canonical=False, num_calls=100)
    play(name, real(name), random.Random(2).randrange, "as_template", is_canonical=True, num_calls=30)
