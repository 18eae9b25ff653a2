from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from burnish.config.data import Source, Template
from burnish.config.errors import UserError
from burnish.data.row import Row
from burnish.data.supervised import encode_example, example_order, load_examples
from burnish.data.template import render
from burnish.models.tokenizer import Tokenizer

SHARED = Path(__file__).parents[2] / "../shared/data"
LETTERS = "".join(map(chr, range(32, 127))) + "\n"
TURNS = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4!"},
    {"role": "user", "content": "thanks"},
]
NO_MARKUP = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
FORGETFUL = "{% for m in messages[-2:] %}{{ m.content }};{% endfor %}"


def tokenizer_with(template: str | None) -> Tokenizer:
    inner = Tokenizer.from_characters(LETTERS)._inner
    inner.chat_template = template
    return Tokenizer(inner)


def qwen() -> Tokenizer:
    if not (SHARED / "tokenizers/qwen2.5").is_dir():
        pytest.skip("the qwen2.5 tokenizer is not on this machine")
    return Tokenizer.load(SHARED / "tokenizers/qwen2.5")


def learnt(tokenizer: Tokenizer, row: Row, **template: Any) -> tuple[str, list[str]]:
    """The whole text, and each contiguous run of trained text."""
    tokens, mask, _ = encode_example(row, tokenizer, Template(**template))
    assert len(tokens) == len(mask)
    runs: list[list[int]] = []
    for i, token in enumerate(tokens):
        if mask[i]:
            if i == 0 or not mask[i - 1]:
                runs.append([])
            runs[-1].append(token)
    return tokenizer.decode(tokens, skip_special=False), [tokenizer.decode(r, skip_special=False) for r in runs]


def pair(prompt: Any, completion: Any) -> Row:
    return Row("s/0", prompt, "s", None, {}, completion=completion)


def conversation(messages: list[dict[str, Any]]) -> Row:
    return Row("s/0", [], "s", None, {}, messages=messages)


def test_a_plain_completion_is_learnt_with_its_end_token() -> None:
    tokenizer = tokenizer_with(None)
    assert learnt(tokenizer, pair("1+1=", "2")) == ("1+1=2<eos>", ["2<eos>"])
    text, runs = learnt(tokenizer, pair([TURNS[0]], [TURNS[1]]), text="Q {prompt} A ")
    assert (text, runs) == ("Q 1+1? A 2<eos>", ["2<eos>"])


@pytest.mark.parametrize("template", [None, NO_MARKUP])
def test_a_whole_text_is_learnt_as_it_stands_from_its_second_token_on(template: str | None) -> None:
    tokenizer, row = tokenizer_with(template), Row("s/0", [], "s", None, {}, text="1+1=2")
    assert learnt(tokenizer, row) == ("1+1=2<eos>", ["+1=2<eos>"])
    with pytest.raises(UserError, match=r"template\.text has no effect on whole texts"):
        learnt(tokenizer, row, text="Q {prompt}")


def test_exactly_the_assistant_turns_are_learnt_with_their_end_of_turn_token() -> None:
    tokenizer = qwen()
    text, runs = learnt(tokenizer, conversation(TURNS))
    assert runs == ["2<|im_end|>", "4!<|im_end|>"]
    assert text == tokenizer.chat_text(TURNS[:4], add_generation_prompt=False)


def test_a_chat_completion_follows_the_very_tokens_of_the_rollout_prompt() -> None:
    tokenizer = qwen()
    for prompt in ("1+1?", [TURNS[0]], TURNS[:3]):
        row = pair(prompt, "4! ")
        tokens, mask, _ = encode_example(row, tokenizer, Template(system="be brief"))
        rendered = render(row, tokenizer, Template(system="be brief")).tokens
        assert tokens[: len(rendered)] == rendered
        assert mask.index(True) == len(rendered)
        assert learnt(tokenizer, row, system="be brief")[1] == ["4! <|im_end|>"]


def test_a_template_without_end_of_turn_tokens_gets_one_end_token_at_the_end() -> None:
    text, runs = learnt(tokenizer_with(NO_MARKUP), conversation(TURNS))
    assert text == "u:1+1?\na:2\nu:2+2?\na:4!\n<eos>"
    assert runs == ["2\n", "4!\n<eos>"]


def test_a_template_that_rewrites_earlier_turns_is_an_error_that_names_the_row() -> None:
    with pytest.raises(UserError, match=r"row s/0: the chat template rewrites earlier text"):
        encode_example(conversation(TURNS), tokenizer_with(FORGETFUL), Template())


def test_messages_need_a_chat_template_and_a_completion_needs_an_assistant() -> None:
    with pytest.raises(UserError, match="needs a chat template"):
        encode_example(conversation(TURNS), tokenizer_with(None), Template())
    with pytest.raises(UserError, match="no assistant turn"):
        encode_example(pair("x", [TURNS[0]]), tokenizer_with(NO_MARKUP), Template())


def write(path: Path, records: list[dict[str, Any]]) -> list[Source]:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return [Source(path=str(path))]


def test_overlong_examples_are_left_out_and_counted_or_stop_the_run(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(None)
    sources = write(tmp_path / "d.jsonl", [{"prompt": "1", "completion": c} for c in ("2", "2222", "22")])
    examples, num_filtered = load_examples(sources, tokenizer, Template(), 4, "filter")
    assert ([e.id for e in examples], num_filtered) == (["d.jsonl/0", "d.jsonl/2"], 1)
    assert examples[1].mask == [False, True, True, True]
    with pytest.raises(UserError, match=r"d\.jsonl:2: 6 tokens, more than max_tokens=4"):
        load_examples(sources, tokenizer, Template(), 4, "error")
    with pytest.raises(UserError, match=r"weight=2\.0 has no effect on supervised data"):
        load_examples([sources[0].model_copy(update={"weight": 2.0})], tokenizer, Template(), 4, "filter")
    with pytest.raises(UserError, match="prompt_key and answer_key have no effect on supervised rows"):
        load_examples([sources[0].model_copy(update={"answer_key": "said"})], tokenizer, Template(), 4, "filter")
    with pytest.raises(UserError, match="no examples left"):
        load_examples(sources, tokenizer, Template(), 2, "filter")


def test_an_example_that_cannot_be_encoded_names_file_and_line(tmp_path: Path) -> None:
    sources = write(tmp_path / "d.jsonl", [{"prompt": "1", "completion": "2"}, {"prompt": "é", "completion": "2"}])
    with pytest.raises(UserError, match=r"d\.jsonl:2: the character 'é'"):
        load_examples(sources, tokenizer_with(None), Template(), 9, "filter")


def test_a_tasks_demonstrations_are_examples() -> None:
    tokenizer = Tokenizer.from_characters("0123456789>")
    source = Source(task="sort_digits", options={"num": 50, "clean": True, "max_digits": 5})
    examples, _ = load_examples([source], tokenizer, Template(), 64, "error", seed=1)
    assert len(examples) == 50
    for example in examples:
        digits, _, answer = tokenizer.decode(example.tokens).partition(">")
        assert answer == "".join(sorted(digits))
        assert example.mask == [False] * (len(digits) + 1) + [True] * (len(digits) + 1)
    assert len(load_examples([source.model_copy(update={"limit": 7})], tokenizer, Template(), 64, "error")[0]) == 7
    with pytest.raises(UserError, match="train split only"):
        load_examples([source.model_copy(update={"split": "test"})], tokenizer, Template(), 64, "error")


def test_example_order_is_whole_seeded_epochs() -> None:
    order = example_order(5, seed=0, num_draws=13)
    assert len(order) == 13
    assert sorted(order[:5]) == sorted(order[5:10]) == [0, 1, 2, 3, 4]
    assert order[:5] != order[5:10]
    assert order[:7] == example_order(5, 0, 7)
    assert order != example_order(5, 1, 13)
