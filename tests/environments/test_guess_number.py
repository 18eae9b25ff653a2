"""The number-guessing game, and token-exact dialogues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from burnish.config.data import Template
from burnish.config.environment import Environment as EnvironmentConfig
from burnish.config.errors import UserError
from burnish.data.prompt_pool import Prompt
from burnish.data.row import Row
from burnish.data.supervised import encode_example
from burnish.data.tasks.guess_number import GuessNumberTask, narrow_range
from burnish.data.tasks.registry import make_demonstrations, make_task, score_answer
from burnish.data.template import render, render_text, template_kind
from burnish.environments.base import Done, TokenEnvironment, Turn
from burnish.environments.registry import check_template_for_turns, environment_factory
from burnish.environments.token_dialogue import Dialogue
from burnish.models.tokenizer import Tokenizer

LETTERS = "".join(map(chr, range(32, 127))) + "\n"
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if think %}(hm){% endif %}{% endif %}"
)


def prompt_of(row: Row, tokenizer: Tokenizer, **template: Any) -> Prompt:
    made = Template(**template)
    is_chat = template_kind(tokenizer, made) == "chat"
    return Prompt(row, render_text(row, tokenizer, made), render(row, tokenizer, made).tokens, is_chat=is_chat)


def game(
    tokenizer: Tokenizer, secret: int = 20, low: int = 17, high: int = 31, words: bool = False
) -> TokenEnvironment:
    extra = {"task": "guess_number", "low": low, "high": high, "words": words}
    row = Row("guess_number/train/0", f"{low:02}-{high:02}?", "guess_number", secret, extra)
    return environment_factory(EnvironmentConfig(name="guess_number"), tokenizer)(prompt_of(row, tokenizer))


@pytest.fixture(scope="module")
def digits() -> Tokenizer:
    alphabet = make_task("guess_number", {}, 0).alphabet
    assert alphabet is not None
    return Tokenizer.from_characters(alphabet)


def test_a_game_tells_what_is_still_possible_until_the_number_is_found(digits: Tokenizer) -> None:
    one = game(digits)
    said = ["24", "50", "18", "-?", "20"]
    found: list[Any] = [one.start()]
    found += [one.observe([*digits.encode(text), 1], text) for text in said]
    assert all(isinstance(turn, Turn) for turn in found[:-1])
    assert [digits.decode(turn.tokens) for turn in found[:-1]] == ["17-31?", "17-23?", "17-23?", "19-23?", "19-23?"]
    assert [turn.state for turn in found[:-1]] == ["17-31", "17-23", "17-23", "19-23", "19-23"]
    assert [turn.reward for turn in found[:-1]] == [0.0] * 5
    assert found[-1] == Done(1.0)


@pytest.mark.parametrize(("guess", "left"), [(24, (17, 23)), (18, (19, 31)), (3, (17, 31)), (99, (17, 31))])
def test_a_wrong_guess_narrows_what_is_possible_and_one_outside_says_nothing(guess: int, left: tuple[int, int]) -> None:
    assert narrow_range(17, 31, guess, 20) == left


def test_the_last_number_is_the_guess(digits: Tokenizer) -> None:
    one = game(digits)
    assert one.observe([], "24-18") == Turn(tuple(digits.encode("19-31?")), "19-31")
    assert one.observe([], "2" * 5000) == Turn(tuple(digits.encode("19-31?")), "19-31"), "too long to be a number"
    assert one.observe([], "not 25 but 20") == Done(1.0)


def test_rows_of_another_task_are_refused(digits: Tokenizer) -> None:
    row = Row("rows/0", "17-31?", "rows", 20)
    with pytest.raises(UserError, match="row rows/0 has no number to guess"):
        environment_factory(EnvironmentConfig(name="guess_number"), digits)(prompt_of(row, digits))


def test_no_text_alone_can_be_scored() -> None:
    with pytest.raises(UserError, match="set environment=guess_number"):
        score_answer("guess_number", "20", 20, {})


# --- rows and demonstrations -----------------------------------------------------------------------------------------


def test_problems_are_on_one_side_whatever_the_seed() -> None:
    sides = {split: set[int]() for split in ("train", "test")}
    for split, seen in sides.items():
        for seed in (0, 1):
            rows = [GuessNumberTask(seed).row(split, k) for k in range(150)]
            seen |= {row.extra["low"] for row in rows}
            assert len({row.answer - row.extra["low"] for row in rows}) == 7, "any number of a range"
            assert all(row.extra["low"] <= row.answer <= row.extra["high"] <= 99 for row in rows)
            assert {row.extra["high"] - row.extra["low"] for row in rows} == {6}
    assert not sides["train"] & sides["test"]
    assert len(sides["train"]) > 20


@pytest.mark.parametrize(("forgetful", "least", "most"), [(0.0, 0.3, 0.55), (1.0, 0.18, 0.36)])
def test_demonstrations_are_games_that_the_environment_would_play(
    digits: Tokenizer, forgetful: float, least: float, most: float
) -> None:
    rows = make_demonstrations("guess_number", {"num": 300, "forgetful": forgetful}, 3)
    won = 0
    for k, record in enumerate(rows):
        said = record["completion"]
        assert [m["role"] for m in said] == ["assistant", "user"] * (len(said) // 2) + ["assistant"]
        assert len(said) <= 5
        tokens, mask, _ = encode_example(Row(str(k), record["prompt"], "d", None, completion=said), digits, Template())
        low, high = (int(part) for part in record["prompt"].strip("?").split("-"))
        secrets = [
            secret
            for secret in range(low, high + 1)
            if replayed(game(digits, secret, low, high), said, digits) == (tokens, mask)
        ]
        assert secrets, "no number explains what was said"
        won += int(said[-1]["content"]) in secrets and len(said) < 5
    assert least < won / len(rows) < most, "found before the last guess"


def replayed(one: TokenEnvironment, said: list[dict[str, str]], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """The tokens of a game in which the model says what the demonstration says."""
    turn: Any = one.start()
    tokens, mask = list(turn.tokens), [False] * len(turn.tokens)
    for message in said[::2]:
        own = [*tokenizer.encode(message["content"]), tokenizer.eos_ids[0]]
        tokens += own
        mask += [True] * len(own)
        turn = one.observe(own, message["content"])
        if isinstance(turn, Done):
            break
        tokens += turn.tokens
        mask += [False] * len(turn.tokens)
    if isinstance(turn, Turn):  # cut off: nothing is learnt from what would come
        del tokens[len(tokens) - len(turn.tokens) :], mask[len(mask) - len(turn.tokens) :]
    return tokens, mask


@pytest.mark.parametrize(
    ("options", "message"),
    [({"numbers": 1}, "numbers should be a whole number from 2 to 100"), ({"numbers": "9"}, "got '9'")],
)
def test_options_that_make_no_game_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_task("guess_number", options, 0)
    with pytest.raises(UserError, match="a share from 0 to 1"):
        make_demonstrations("guess_number", {"forgetful": 2.0}, 0)


# --- dialogues -------------------------------------------------------------------------------------------------------


def chat_tokenizer(template: str = CHAT) -> Tokenizer:
    inner = Tokenizer.from_characters(LETTERS)._inner
    inner.chat_template = template
    return Tokenizer(inner)


def test_a_message_behind_a_completion_is_what_the_template_would_have_written() -> None:
    tokenizer = chat_tokenizer()
    row = Row("s/0", "1+1?", "s", None)
    prompt = prompt_of(row, tokenizer)
    dialogue, eos = Dialogue(prompt, tokenizer), tokenizer.eos_ids[0]
    said = [*tokenizer.encode("two"), eos]
    whole = tokenizer.chat(
        [
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": "two"},
            {"role": "user", "content": "sure?"},
        ]
    )
    assert [*prompt.tokens, *said, *dialogue.reply(said, "sure?")] == whole
    # Without the end of its turn (a stop string ended it) the template's is put behind it.
    assert [*prompt.tokens, *said[:-1], *dialogue.reply(said[:-1], "sure?")] == whole
    assert Dialogue(prompt, tokenizer, role="tool").reply(said, "4") == tuple(
        tokenizer.encode("\n<tool>4<eos>\n<assistant>")
    )


def test_the_assistant_is_opened_as_the_prompt_opened_it() -> None:
    """Also where the run's template has variables, which an environment does not know."""
    tokenizer = chat_tokenizer()
    prompt = prompt_of(Row("s/0", "1+1?", "s", None), tokenizer, kwargs={"think": True})
    assert prompt.text.endswith("<assistant>(hm)")
    assert tokenizer.decode(Dialogue(prompt, tokenizer).reply([], "so?"), skip_special=False).endswith(
        "<assistant>(hm)"
    )


def test_a_chat_goes_on_as_one_where_the_users_message_opens_the_assistant() -> None:
    """The templates of Mistral and Llama 2 have no words of their own before the assistant speaks."""
    inst = "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}{{ m.content }}<eos>{% endif %}{% endfor %}"
    for template in (inst, inst + "{% if add_generation_prompt %} {% endif %}"):
        tokenizer = chat_tokenizer(template)
        prompt = prompt_of(Row("s/0", "1+1?", "s", None), tokenizer)
        said = [*tokenizer.encode("two"), tokenizer.eos_ids[0]]
        end = prompt.text.removeprefix("[INST] 1+1? [/INST]")
        assert Dialogue(prompt, tokenizer).reply(said, "so?") == tuple(tokenizer.encode("[INST] so? [/INST]" + end))
        assert Dialogue(prompt, tokenizer).reply(said[:-1], "so?") == tuple(
            tokenizer.encode("<eos>[INST] so? [/INST]" + end)
        )


def test_a_template_whose_variables_change_how_the_assistant_is_opened_is_refused() -> None:
    tokenizer = chat_tokenizer(
        "{% for m in messages %}{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}{% if terse %}>{% else %}<assistant>{% endif %}{% endif %}"
    )
    prompt = prompt_of(Row("s/0", "1+1?", "s", None), tokenizer, kwargs={"terse": True})
    with pytest.raises(
        UserError, match="opens the assistant's turn with '<assistant>', which this prompt does not contain"
    ):
        Dialogue(prompt, tokenizer)


def test_a_plain_prompt_goes_on_in_plain_text() -> None:
    for tokenizer, template in ((Tokenizer.from_characters(LETTERS), {}), (chat_tokenizer(), {"kind": "plain"})):
        prompt = prompt_of(Row("s/0", "1+1?", "s", None), tokenizer, **template)
        assert Dialogue(prompt, tokenizer).reply([1], "so?") == tuple(tokenizer.encode("so?"))


def test_a_template_that_does_not_write_answers_is_refused() -> None:
    tokenizer = chat_tokenizer(LAST_ONLY)
    prompt = prompt_of(Row("s/0", "1+1?", "s", None), tokenizer)
    with pytest.raises(UserError, match="does not write the answers of earlier turns"):
        Dialogue(prompt, tokenizer).reply([1], "so?")


LAST_ONLY = (
    "{{ messages | length }}<{{ messages[-1].role }}>{{ messages[-1].content }}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LAST_THINKS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}(thought){% endif %}{{ m.content }}<eos>\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_template_without_answers_is_refused_before_anything_is_sampled(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from burnish.environments.base import SingleTurn\nfrom burnish.environments.token_dialogue import Dialogue\n"
        "class Talks(SingleTurn): ...\n"
    )
    (tmp_path / "other.py").write_text("from burnish.environments.base import SingleTurn\nclass Own(SingleTurn): ...\n")
    forgetting, adding = chat_tokenizer(LAST_ONLY), chat_tokenizer()

    def check(name: str, tokenizer: Tokenizer, max_turns: int = 3, **template: Any) -> None:
        config = EnvironmentConfig(name=name, max_turns=max_turns)
        check_template_for_turns(config, tokenizer, Template(**template), tmp_path)

    for name in ("guess_number", "own.py:Talks"):
        with pytest.raises(UserError, match="does not write the answers of earlier turns"):
            check(name, forgetting)
        check(name, adding)
        check(name, chat_tokenizer(LAST_THINKS))
        check(name, forgetting, kind="plain")
        check(name, forgetting, max_turns=1)
    check("other.py:Own", forgetting)
    with pytest.raises(UserError, match="without the markup of the chat template"):
        check("guess_number", adding, kind="prerendered")
    check("guess_number", adding, max_turns=1, kind="prerendered")


def test_a_dialogue_appends_where_the_template_drops_earlier_thinking() -> None:
    tokenizer = chat_tokenizer(LAST_THINKS)
    prompt = prompt_of(Row("s/0", "1+1?", "s", None), tokenizer)
    said = [*tokenizer.encode("(thought)two"), tokenizer.eos_ids[0]]
    assert Dialogue(prompt, tokenizer).reply(said, "so?") == tuple(tokenizer.encode("\n<user>so?<eos>\n<assistant>"))


def test_a_game_in_words_for_a_model_that_chats() -> None:
    tokenizer = chat_tokenizer()
    row = make_task("guess_number", {"words": True}, 0).row("train", 0)
    assert make_task("guess_number", {"words": True}, 0).alphabet is None
    one = environment_factory(EnvironmentConfig(name="guess_number"), tokenizer)(prompt_of(row, tokenizer))
    low, high = row.extra["low"], row.extra["high"]
    assert f"from {low} to {high}. Guess it" in tokenizer.decode(one.start().tokens)
    wrong = high if row.answer != high else low
    left = (low, high - 1) if wrong == high else (low + 1, high)
    turn = one.observe([*tokenizer.encode(f"{wrong}!"), 1], f"Is it {wrong}?")
    assert isinstance(turn, Turn)
    text = tokenizer.decode(turn.tokens, skip_special=False)
    assert text == f"\n<user>No. It is from {left[0]} to {left[1]}.<eos>\n<assistant>"
    assert one.observe([], f"then {row.answer}") == Done(1.0)
