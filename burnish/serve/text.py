"""The text of a completion, cut at stop strings, whole or as its tokens come.

The text ends before the stop string that is complete first, as OpenAI cuts it; an end token is no text. Both ways give the same:
streamed pieces joined are the whole text. What is shown is final: no half character, nothing a stop string could still take back.
"""

from __future__ import annotations

from collections.abc import Sequence

from burnish.evaluation.stream import TextStream
from burnish.models.tokenizer import Tokenizer


def stop_position(text: str, stops: Sequence[str]) -> int | None:
    """Where the stop string begins that is complete first (of two complete at once, the longer); None without one."""
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found)[1] if found else None


def undecided(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of a text that is the beginning of one of the marks, and not all of it."""
    longest = max((len(mark) - 1 for mark in marks), default=0)
    for size in range(min(longest, len(text)), 0, -1):
        if any(len(mark) > size and mark.startswith(text[-size:]) for mark in marks):
            return size
    return 0


def whole_text(tokens: Sequence[int], tokenizer: Tokenizer, end_tokens: Sequence[int], stops: Sequence[str]) -> str:
    """The text of all tokens of a completion."""
    if tokens and tokens[-1] in end_tokens:
        tokens = tokens[:-1]
    text = tokenizer.decode(tokens)
    return text[: stop_position(text, stops)]


class ShownText:
    """The text of a completion piece by piece."""

    def __init__(self, tokenizer: Tokenizer, end_tokens: Sequence[int], stops: Sequence[str]) -> None:
        self.end_tokens, self.stops = end_tokens, stops
        self._stream = TextStream(tokenizer)
        self._pending = ""  # decoded, perhaps the beginning of a stop string
        self._has_stopped = False

    def push(self, token: int) -> str:
        """The text that is sure to stay now that this token is known, perhaps none."""
        if self._has_stopped or token in self.end_tokens:
            return ""
        return self._show(self._stream.push(token), is_last=False)

    def finish(self) -> str:
        """What was held back, once no token follows."""
        return "" if self._has_stopped else self._show(self._stream.finish(), is_last=True)

    def _show(self, text: str, is_last: bool) -> str:
        self._pending += text
        at = stop_position(self._pending, self.stops)
        if at is not None:
            self._has_stopped = True
        else:
            at = len(self._pending) - (0 if is_last else undecided(self._pending, self.stops))
        shown, self._pending = self._pending[:at], self._pending[at:]
        return shown
