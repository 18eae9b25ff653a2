"""Codes as text, and the task whose answers are codes of a codec."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.config.errors import UserError
from burnish.config.model import Model
from burnish.data.codes import read_codes, write_codes
from burnish.data.tasks.registry import make_demonstrations, make_task, score_answer
from burnish.data.tasks.speak import LETTERS, SILENCE, decode_codes, edit_distance, encode_waveform, recognise
from burnish.data.tasks.task import is_held_out
from burnish.models.policy import load_policy


@given(st.lists(st.integers(0, 255)))
def test_codes_are_read_as_they_were_written_in_either_spelling(codes: list[int]) -> None:
    assert read_codes(write_codes(codes)) == codes
    assert read_codes("".join(f"<|s_{code}|>" for code in codes)) == codes


def test_a_text_with_anything_but_codes_has_none() -> None:
    assert read_codes("⠁ <|action_7|>\n") == [1, 7]
    assert read_codes("⠁b") is None
    assert read_codes("<|s_|>") is None
    with pytest.raises(UserError, match="code 256 has no Braille pattern"):
        write_codes([256])


@given(st.lists(st.integers(0, 255), max_size=12))
def test_the_codec_reads_back_the_frames_that_it_wrote(codes: list[int]) -> None:
    assert encode_waveform(decode_codes(codes)) == codes


def test_the_recogniser_hears_letters_of_two_frames_through_noise() -> None:
    codes = {letter: 64 * (i // 4) + 4 * (i % 4) + 17 for i, letter in enumerate(LETTERS)}
    spoken = [code for letter in "batok" for code in [codes[letter]] * 2]
    assert recognise(decode_codes(spoken)) == "batok"
    noise = np.random.default_rng(0).normal(0, 0.05, len(spoken) * 160)
    assert recognise(decode_codes(spoken) + noise) == "batok"
    a, b = codes["a"], codes["b"]
    assert recognise(decode_codes([a, a, a, b, a, a])) == "aa"  # one frame is not heard, but ends the letter before it
    assert recognise(decode_codes([a, a, SILENCE, a, a])) == "aa"
    assert recognise(decode_codes([a, a, a, a])) == "a"


def test_the_reward_falls_with_the_error_rate() -> None:
    codes = [code for code in (17, 17, 81, 81)]  # a, then e's row below it
    said = recognise(decode_codes(codes))
    assert len(said) == 2
    assert score_answer("speak", write_codes(codes), said, {}) == 1.0
    assert score_answer("speak", write_codes(codes[:2]), said, {}) == pytest.approx(1 - math.tanh(1.5))
    assert score_answer("speak", write_codes(codes * 100), said, {}) < 1e-4
    for wrong in ("", "ab", write_codes(codes) + "a", "<|s_300|>"):
        assert score_answer("speak", wrong, said, {}) == 0.0


@given(st.text("abc", max_size=6), st.text("abc", max_size=6))
def test_edit_distance_is_that_of_the_recursive_definition(first: str, second: str) -> None:
    def slow(a: str, b: str) -> int:
        if not a or not b:
            return len(a) + len(b)
        return min(slow(a[1:], b) + 1, slow(a, b[1:]) + 1, slow(a[1:], b[1:]) + (a[0] != b[0]))

    assert edit_distance(first, second) == slow(first, second)


def test_a_careless_speaker_swallows_letters_of_train_words() -> None:
    careful = make_demonstrations("speak", {"num": 200, "swallowed": 0.0}, seed=0)
    careless = make_demonstrations("speak", {"num": 200}, seed=0)
    right = [
        [score_answer("speak", r["completion"], r["prompt"][:-1], {}) == 1 for r in rows]
        for rows in (careful, careless)
    ]
    assert all(right[0])
    assert 0.2 < sum(right[1]) / 200 < 0.4  # 0.7 to the power of 2 to 5: 0.32 on average
    assert not any(is_held_out(f"speak {row['prompt'][:-1]}") for row in careful)
    assert all(is_held_out(f"speak {make_task('speak', {}, 3).row('test', i).answer}") for i in range(50))
    with pytest.raises(UserError, match="swallowed should be a chance"):
        make_demonstrations("speak", {"swallowed": 1.0}, seed=0)


def test_the_tokenizer_of_the_docs_gives_every_code_one_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "modalities.md").read_text(encoding="utf-8")
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], {})  # the block that writes codes-model
    policy = load_policy(Model(path="codes-model", device="cpu"), tmp_path / "codes-model", None, seed=0)
    tokenizer = policy.tokenizer
    codes = [0, 7, 1023]
    text = "".join(f"<|s_{code}|>" for code in codes)
    tokens = tokenizer.encode(tokenizer.literal(f"ab>{text}"))
    assert len(tokens) == 3 + len(codes)
    assert read_codes(tokenizer.decode(tokens[3:])) == codes
    assert tokenizer.pieces(tokens)[3:] == [f"<|s_{code}|>" for code in codes]
