"""What all games share: reading an answer, checking options, and the board that a seed stands for.

A model may write its answer in one of three formats:

- `answer_tag`: `<think>...</think><answer>Up || Right</answer>`, as in RAGEN (Wang et al., 2025, arXiv 2504.20073). The first answer
  behind the thoughts counts.
- `brackets`: the last text in square brackets counts, `[Up || Right]`.
- `last_word`: the last word counts, so an answer has one action.

Boards of training and of tests never overlap. The text of a board alone decides its split (`burnish.data.tasks.task.is_held_out`); a game
proposes boards from (seed, 0), (seed, 1), ... until one belongs to the split of its row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, get_args

from burnish.config.errors import UserError, unknown_name_error
from burnish.data.row import Message
from burnish.data.tasks.task import SPLITS, Dice, first_on_split
from burnish.environments.base import Answer, Environment, Episode

Format = Literal["answer_tag", "last_word", "brackets"]
FORMATS: tuple[str, ...] = get_args(Format)
SEPARATOR = "||"
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
BRACKETS = re.compile(r"\[([^\[\]]*)\]")
WORD_PUNCTUATION = ".,;:!?\"'`*()[]<>"

T = TypeVar("T")


def answer_text(text: str, format: Format, last: Literal["word", "line"] = "word") -> str | None:
    """The answer in a completion, without its markup; None if there is none. With `last_word`, it is the last word or the last line."""
    if format == "answer_tag":
        found = ANSWER.search(_after_thoughts(text))
        return found[1].strip() if found else None
    if format == "brackets":
        groups = BRACKETS.findall(_after_thoughts(text))
        return groups[-1].strip() if groups else None
    parts = text.split() if last == "word" else [line for line in text.splitlines() if line.strip()]
    if not parts:
        return None
    return parts[-1].strip(WORD_PUNCTUATION) if last == "word" else parts[-1].strip()


def _after_thoughts(text: str) -> str:
    """The text behind the first `</think>`: an example inside the thoughts is not an answer."""
    return text.partition("</think>")[2] or text


def write_answer(answer: str, format: Format, think: str = "") -> str:
    """The text of an answer in a format, as a player writes it."""
    if format == "answer_tag":
        return f"<think>{think}</think><answer>{answer}</answer>"
    return " ".join(filter(None, (think, f"[{answer}]" if format == "brackets" else answer)))


def read_answer(answer: Answer, format: Format, last: Literal["word", "line"] = "word") -> str | None:
    """The answer of a turn; None if there is none, or if the completion was cut off."""
    return None if answer.finish == "length" else answer_text(answer.text, format, last)


def format_sentence(format: Format, example: str = "", last: Literal["word", "line"] = "word") -> str:
    """The sentence of a prompt that states the format. Without an example it suggests no choice."""
    if format == "answer_tag":
        return f"Answer in the form <think>your thoughts</think><answer>{example or 'your choice'}</answer>."
    if format == "brackets":
        return f"End your answer with your choice in square brackets: [{example or 'your choice'}]."
    return f"End your answer with your choice as the last {last}" + (f", such as: {example}" if example else ".")


def user_message(content: str | list[dict[str, Any]]) -> Message:
    """A message that the model reads: a text, or blocks of texts and pictures."""
    return {"role": "user", "content": content}


def split_of(episode: Episode) -> str:
    """The split of an episode's row. Rows without a column `split` are train rows in training, and test rows elsewhere."""
    split = episode.extra.get("split")
    if split in SPLITS:
        return str(split)
    return "train" if episode.is_training else "test"


def board_of_seed(
    game: str,
    seed: int,
    split: str,
    propose: Callable[[Dice], tuple[str, T] | None],
    options: Sequence[int | str] = (),
) -> T:
    """The board of a seed in a split. `options` are those that shape boards.

    `propose` draws (the text that identifies the board, the board), or None for a failed attempt.
    """
    return first_on_split(split, lambda attempt: propose(Dice(game, *options, seed, attempt)), f"{game}, seed {seed}")


def choice(dice: Dice, items: Sequence[T]) -> T:
    """One of the items, each with equal probability."""
    return items[dice.between(0, len(items) - 1)]


def sample(dice: Dice, items: Sequence[T], num: int) -> list[T]:
    """Different items in random order."""
    rest = list(items)
    return [rest.pop(dice.between(0, len(rest) - 1)) for _ in range(num)]


def shuffled(dice: Dice, items: Sequence[T]) -> list[T]:
    """The items in random order."""
    return sample(dice, items, len(items))


# --- Options ----------------------------------------------------------------------------------------------------------------


def check_choice(game: str, key: str, value: Any, known: Sequence[str]) -> None:
    """Raise a UserError unless an option has one of the known values."""
    if value not in known:
        raise unknown_name_error(f"{key} of {game}", str(value), known)


def check_whole(game: str, key: str, value: Any, least: int, most: int | None = None) -> None:
    """Raise a UserError unless an option is a whole number in least..most."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or value < least or (most is not None and value > most):
        span = f"from {least} to {most}" if most is not None else f"of {least} or more"
        raise UserError(f"{game}: {key} should be a whole number {span}, got {value!r}")


def check_number(game: str, key: str, value: Any, least: float | None = None, most: float | None = None) -> None:
    """Raise a UserError unless an option is a finite number in least..most."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")
    if not is_number or (least is not None and value < least) or (most is not None and value > most):
        span = f" from {least:g} to {most:g}" if least is not None and most is not None else ""
        raise UserError(f"{game}: {key} should be a number{span}, got {value!r}")


class Game(Environment):
    """Base class of games. Every game also has two players, for tests and for supervised warm starts.

    `random_answer(dice)` writes a random legal answer, and `best_answer()` writes the best one, both in the configured format.
    """

    runs_in = "runner"
    takes_truncated = True
    name: str

    def random_answer(self, dice: Dice) -> str:
        raise NotImplementedError

    def best_answer(self) -> str:
        raise NotImplementedError


class TextGame(Game):
    """A game whose answers have one of the three formats."""

    def __init__(self, format: Format, words: bool) -> None:
        check_choice(self.name, "format", format, FORMATS)
        if not isinstance(words, bool):
            raise UserError(f"{self.name}: words should be true or false, got {words!r}")
        self.format: Format = format
        self.words = words
        """Whether prompts state rules and format. Without words the model reads the bare board, for tiny models from nothing."""
