"""Splits a shell script into statements of words. Nothing is executed.

The grammar is the part of bash that launch scripts use: quotes, backslash continuations, comments, `$NAME`, `${NAME:-default}` and its
relatives, arrays, `$((...))`, redirections and here-documents.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from burnish.config.errors import UserError

NAME = re.compile(r"[A-Za-z_]\w*")
SPECIAL_PARAMETERS = "@*#?$!-0123456789"
OPERATORS = (
    ";;",
    "&&",
    "||",
    "&>>",
    "&>",
    ">>",
    ">&",
    "<<<",
    "<<-",
    "<<",
    "<&",
    "|&",
    ";",
    "&",
    "|",
    "<",
    ">",
    "(",
    ")",
)
REDIRECTIONS = ("&>>", "&>", ">>", ">&", "<<<", "<&", "<", ">")
HERE_DOCUMENTS = ("<<", "<<-")


class Segment(NamedTuple):
    """A piece of a word: text, or the body of an expansion (`NAME:-default` of `${NAME:-default}`)."""

    text: str
    kind: str = "text"
    """text, parameter, arithmetic or command."""
    is_quoted: bool = False


@dataclass
class Word:
    """A word before expansion. An array assignment `NAME=(...)` has its elements in `items`."""

    segments: list[Segment] = field(default_factory=list)
    items: list[Word] | None = None

    @property
    def literal(self) -> str:
        """The text of a word without quotes and expansions; other words give the empty string, so that no keyword matches."""
        plain = all(segment.kind == "text" and not segment.is_quoted for segment in self.segments)
        return "".join(segment.text for segment in self.segments) if plain else ""


class Statement(NamedTuple):
    """Words up to an operator, with that operator (`\\n` at the end of a line) and the line of the first word."""

    words: list[Word]
    end: str
    line: int


class Lexer:
    """Reads statements from the text of a script. `where` names the script in errors."""

    def __init__(self, text: str, where: str) -> None:
        self.text, self.where, self.at = text.replace("\r\n", "\n"), where, 0

    @property
    def line(self) -> int:
        """The line of the current position."""
        return self.text.count("\n", 0, self.at) + 1

    def statements(self) -> Iterator[Statement]:
        """All statements of the script, also empty ones whose operator matters."""
        words: list[Word] = []
        line, delimiters = self.line, list[str]()
        while True:
            self._skip_blanks()
            end = self._operator()
            if end is not None and end != "\n" and _is_open_test(words):  # `[[ a && b ]]`: an operator of the test
                words.append(Word([Segment(end)]))
                continue
            if end in HERE_DOCUMENTS:
                self._skip_blanks()
                delimiters.append("".join(s.text for s in self.word().segments))
                continue
            if end in REDIRECTIONS:
                self._skip_blanks()
                self.word()
                continue
            if end is not None:
                if end == "\n" and delimiters:
                    self._skip_here_documents(delimiters)
                    delimiters = []
                yield Statement(words, end, line)
                if self.at >= len(self.text) and end == "\n":
                    return
                words = []
                continue
            if not words:
                line = self.line
            word = self.word()
            if not (word.literal.isdecimal() and self._peek() in ("<", ">")):  # `2>&1`: the number of a descriptor
                words.append(word)

    def _peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def _skip_blanks(self) -> None:
        while True:
            if self.text.startswith("\\\n", self.at):
                self.at += 2
            elif self._peek() in (" ", "\t") and self._peek():
                self.at += 1
            elif self._peek() == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return

    def _operator(self) -> str | None:
        if self.at >= len(self.text):
            return "\n"
        if self._peek() == "\n":
            self.at += 1
            return "\n"
        found = next((one for one in OPERATORS if self.text.startswith(one, self.at)), None)
        if found is not None:
            self.at += len(found)
        return found

    def _skip_here_documents(self, delimiters: list[str]) -> None:
        for delimiter in delimiters:
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line, self.at = self.text[self.at : end], min(end + 1, len(self.text))
                if line.strip("\t") == delimiter:
                    break

    def word(self) -> Word:
        """The word at the current position."""
        word = Word()
        while (char := self._peek()) and char not in " \t\n;&|<>()":
            if char == "\\":
                if not self.text.startswith("\\\n", self.at):
                    word.segments.append(Segment(self.text[self.at + 1 : self.at + 2], is_quoted=True))
                self.at += 2
            elif char == "'":
                word.segments.append(Segment(self._until("'"), is_quoted=True))
            elif char == '"':
                word.segments += self._double_quoted()
            elif char in "$`":
                word.segments.append(self._expansion(is_quoted=False))
            else:
                match = re.compile(r"[^\s;&|<>()\\'\"$`]+").match(self.text, self.at)
                assert match is not None
                self.at = match.end()
                word.segments.append(Segment(match[0]))
        if self._peek() == "(" and word.literal.endswith("="):
            self.at += 1
            word.items = self._array()
        return word

    def _array(self) -> list[Word]:
        line, items = self.line, list[Word]()
        while True:
            self._skip_blanks()
            if self._peek() == "\n":
                self.at += 1
            elif self._peek() == ")":
                self.at += 1
                return items
            elif not self._peek() or self._peek() in ";&|<>(":
                raise UserError(f"{self.where}, line {line}: this array has no closing parenthesis")
            else:
                items.append(self.word())

    def _until(self, quote: str) -> str:
        start, end = self.at + 1, self.text.find(quote, self.at + 1)
        if end < 0:
            raise UserError(f"{self.where}, line {self.line}: this {quote} is never closed")
        self.at = end + 1
        return self.text[start:end]

    def _double_quoted(self) -> list[Segment]:
        line, segments, text = self.line, list[Segment](), ""
        self.at += 1
        while (char := self._peek()) != '"':
            if not char:
                raise UserError(f'{self.where}, line {line}: this " is never closed')
            if char == "\\" and self.text[self.at + 1 : self.at + 2] in tuple('"\\$`\n'):
                escaped = self.text[self.at + 1]
                text, self.at = text + ("" if escaped == "\n" else escaped), self.at + 2
            elif char in "$`":
                segments += [Segment(text, is_quoted=True)] if text else []
                segments.append(self._expansion(is_quoted=True))
                text = ""
            else:
                text, self.at = text + char, self.at + 1
        self.at += 1
        return [*segments, Segment(text, is_quoted=True)] if text or not segments else segments

    def _expansion(self, is_quoted: bool) -> Segment:
        if self._peek() == "`":
            return Segment(self._until("`"), "command", is_quoted)
        rest = self.text[self.at + 1 :]
        if rest.startswith("(("):
            return Segment(self._enclosed("((", "))"), "arithmetic", is_quoted)
        if rest.startswith("("):
            return Segment(self._enclosed("(", ")"), "command", is_quoted)
        if rest.startswith("{"):
            return Segment(self._enclosed("{", "}"), "parameter", is_quoted)
        match = NAME.match(rest)
        if match is not None or (rest[:1] and rest[0] in SPECIAL_PARAMETERS):
            name = rest[0] if match is None else match[0]
            self.at += 1 + len(name)
            return Segment(name, "parameter", is_quoted)
        self.at += 1
        return Segment("$", is_quoted=is_quoted)

    def _enclosed(self, opening: str, closing: str) -> str:
        """The text between `$` with its opening and the matching closing."""
        line, start = self.line, self.at + 1 + len(opening)
        depth, at = len(opening), start
        while at < len(self.text):
            char = self.text[at]
            if char == "'" and opening != "((":
                end = self.text.find("'", at + 1)
                at = len(self.text) if end < 0 else end
            elif char == opening[0]:
                depth += 1
            elif char == closing[0]:
                depth -= 1
                if depth == 0:
                    self.at = at + 1
                    return self.text[start : at + 1 - len(closing)]
            at += 1
        raise UserError(f"{self.where}, line {line}: ${opening} is never closed")


def _is_open_test(words: list[Word]) -> bool:
    """Whether the words are inside `[[ ... ]]`."""
    names = [word.literal for word in words]
    return "[[" in names and "]]" not in names
