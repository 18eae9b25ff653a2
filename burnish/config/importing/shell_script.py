"""Finds the commands of a launch script with their words expanded. Nothing is executed.

Assignments are followed in order. Tests of text and numbers (`[ "$X" = y ]`, `[[ -z $X ]]`) are evaluated; a block behind any other test is
left out, with a note. A loop is read once, with its first value.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from burnish.config.errors import UserError
from burnish.config.importing.shell_variables import Variables
from burnish.config.importing.shell_words import Lexer, Segment, Statement, Word

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^]]*\])?(\+?)=", re.DOTALL)
DECLARATIONS = ("export", "declare", "local", "readonly", "typeset")
MAX_VALUE = 1_000_000
"""Longest value of a variable: `A=$A$A`, forty times, would fill the memory."""
NUMBER_TESTS = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
}


class Command(NamedTuple):
    """A command with its expanded words."""

    words: list[str]
    line: int


class ShellCommands(NamedTuple):
    """The commands of a script, and what could not be evaluated."""

    commands: list[Command]
    notes: list[str]


@dataclass
class Block:
    """An open `if`, `for`, `while`, `case` or function."""

    kind: str
    is_active: bool
    is_decided: bool = False
    """Whether a branch was taken, or may have been, so that later branches are not."""
    test: bool | None = None
    """The value of the test so far, between `if` and `then`."""
    is_testing: bool = False
    subject: str = ""
    """The text that the patterns of a case are compared with."""
    is_pattern: bool = False
    """Whether the next words of a case are patterns."""


def read_commands(text: str, where: str, environment: dict[str, str], folder: str) -> ShellCommands:
    """The commands of a script. `environment` has the variables that the script may use without setting them."""
    variables = Variables(environment, folder)
    reader = _Reader(variables)
    try:
        for statement in Lexer(text, where).statements():
            reader.read(statement)
    except RecursionError as error:
        raise UserError(f"{where}: expansions are nested too deeply") from error
    return ShellCommands(reader.commands, variables.notes)


class _Reader:
    """Follows the statements of a script."""

    def __init__(self, variables: Variables) -> None:
        self.variables, self.commands, self.blocks = variables, list[Command](), list[Block]()
        self.status: bool | None = True  # of the last test, for && and ||
        self.joined = ";"  # the operator before the current statement
        self.patterns: list[str] = []

    @property
    def is_active(self) -> bool:
        return all(block.is_active for block in self.blocks)

    def read(self, statement: Statement) -> None:
        words, end = list(statement.words), statement.end
        if self.blocks and self.blocks[-1].is_pattern and not (words and words[0].literal == "esac"):
            self._read_pattern(words, end)
            return
        if self.blocks and self.blocks[-1].is_testing and words and words[0].literal not in ("then", "if"):
            self._continue_test(words, statement)
            words = []
        while words and words[0].literal in ("then", "do", "else", "{", "elif", "!", "time", "nohup", "exec"):
            keyword = words.pop(0).literal
            if keyword == "then" and self.blocks and self.blocks[-1].is_testing:
                self._end_test(self.blocks[-1])
            elif keyword == "else":
                self._open_else(None, 0)
            elif keyword == "elif":
                self._open_else(words, statement.line)
                words = []
        if words:
            self._read_words(words, statement)
        if end == ";;" and self.blocks and self.blocks[-1].kind == "case":
            self.blocks[-1].is_active, self.blocks[-1].is_pattern = False, True
        if words or end != "\n":
            self.joined = end

    def _read_words(self, words: list[Word], statement: Statement) -> None:
        first = words[0].literal
        if first in ("fi", "done", "esac", "}"):
            if self.blocks:
                self.blocks.pop()
        elif first == "if":
            value = self._test(words[1:], statement.line) if self.is_active else False
            self.blocks.append(Block("if", False, test=value, is_testing=True))
        elif first in ("while", "until"):
            if self.is_active:
                self.variables.note(f"line {statement.line}: the {first} loop is left out")
            self.blocks.append(Block(first, False))
        elif first in ("for", "select"):
            self._open_loop(words, statement.line)
        elif first == "case":
            subject = " ".join(self.variables.expand(words[1])) if len(words) > 1 and self.is_active else ""
            self.blocks.append(Block("case", False, subject=subject, is_pattern=True))
            self._read_pattern(words[3:], statement.end)
        elif first == "function" or (statement.end == "(" and len(words) == 1 and "=" not in first):
            self.blocks.append(Block("function", True))
        elif self.is_active and self._follows():
            self._run(words, statement.line)

    def _continue_test(self, words: list[Word], statement: Statement) -> None:
        """The next part of `if a && b`, joined to the test so far by the operator before it."""
        block = self.blocks[-1]
        outer = all(other.is_active for other in self.blocks[:-1])
        value = self._test(words, statement.line) if outer and not block.is_decided else False
        block.test = _joined(block.test, self.joined, value)

    def _end_test(self, block: Block) -> None:
        block.is_testing = False
        block.is_active, block.is_decided = block.test is True, block.is_decided or block.test is not False

    def _open_else(self, test: list[Word] | None, line: int) -> None:
        if not self.blocks or self.blocks[-1].kind != "if":
            return
        block = self.blocks[-1]
        block.is_active = False
        outer = all(other.is_active for other in self.blocks[:-1])
        if test is not None:
            block.test = self._test(test, line) if outer and not block.is_decided else False
            block.is_testing = True
        elif not block.is_decided:
            block.is_active = block.is_decided = True

    def _open_loop(self, words: list[Word], line: int) -> None:
        names = [word.literal for word in words]
        block = Block("for", len(names) > 3 and names[2] == "in")
        if self.is_active:
            values = [text for word in words[3:] for text in self.variables.expand(word)] if block.is_active else []
            block.is_active = bool(values)
            if values:
                self.variables.own[names[1]] = values[:1]
                if len(values) > 1:
                    self.variables.note(f"line {line}: the loop over {names[1]} is read once, with {values[0]}")
            else:
                self.variables.note(f"line {line}: this loop is left out")
        self.blocks.append(block)

    def _read_pattern(self, words: Sequence[Word], end: str) -> None:
        """Collect the patterns of one branch of a case up to its `)`."""
        self.patterns += [self.variables.text(word) for word in words]
        if end != ")":
            return
        block, patterns, self.patterns = self.blocks[-1], self.patterns, []
        is_match = any(fnmatch.fnmatchcase(block.subject, pattern) for pattern in patterns)
        block.is_active, block.is_pattern = is_match and not block.is_decided, False
        block.is_decided = block.is_decided or is_match

    def _follows(self) -> bool:
        """Whether a statement behind && or || is reached. A command that is no test is taken to succeed."""
        if self.joined == "&&":
            return self.status is True
        return self.joined != "||" or self.status is False

    def _run(self, words: list[Word], line: int) -> None:
        if words[0].literal in ("[", "[[", "test"):
            self.status = self._test(words, line)
            return
        self.status = True
        assignments = list(_leading_assignments(words))
        rest = words[len(assignments) :]
        if rest and rest[0].literal in DECLARATIONS:
            assignments, rest = [word for word in rest[1:] if ASSIGNMENT.match(_start(word))], []
        if not rest:
            for word in assignments:
                self._assign(word)
            return
        expanded = [text for word in rest for text in self.variables.expand(word)]
        if expanded and expanded[0] in ("source", "."):
            self.variables.note(f"line {line}: {' '.join(expanded)} is not read")
        if expanded:
            self.commands.append(Command(expanded, line))

    def _assign(self, word: Word) -> None:
        match = ASSIGNMENT.match(_start(word))
        assert match is not None
        name, is_added = match[1], bool(match[3])
        if word.items is not None:
            values = [text for item in word.items for text in self.variables.expand(item)]
            before = (self.variables.get(name) or []) if is_added else []
            self.variables.own[name] = [*before, *values]
            return
        first = word.segments[0]
        value = self.variables.text(Word([Segment(first.text[match.end() :]), *word.segments[1:]]))
        before = (self.variables.get(name) or []) if is_added else []
        self.variables.own[name] = ["".join(before) + value]
        if len(self.variables.own[name][0]) > MAX_VALUE:
            raise UserError(
                f"the variable {name} grows beyond {MAX_VALUE:,} characters; a launch script needs no such value"
            )

    def _test(self, words: list[Word], line: int) -> bool | None:
        """The result of a test, or None if it cannot be known here."""
        brackets = ("[", "[[", "]", "]]", "test")
        texts = [
            word.literal or " ".join(self.variables.expand(word)) for word in words if word.literal not in brackets
        ]
        is_negated = bool(texts) and texts[0] == "!"
        value = _test_value(texts[1:] if is_negated else texts)
        if value is None:
            self.variables.note(
                f"line {line}: `{' '.join(texts)}` is not evaluated, and what depends on it is left out"
            )
            return None
        return value != is_negated


def _joined(first: bool | None, operator: str, second: bool | None) -> bool | None:
    """`first && second` or `first || second`, where None is not known."""
    decisive = operator == "||"
    if decisive in (first, second):
        return decisive
    return None if None in (first, second) else not decisive


def _test_value(texts: list[str]) -> bool | None:
    for operator in ("||", "&&"):  # && binds tighter
        if operator in texts:
            at = texts.index(operator)
            return _joined(_test_value(texts[:at]), operator, _test_value(texts[at + 1 :]))
    if texts[:1] == ["!"]:
        value = _test_value(texts[1:])
        return None if value is None else not value
    if texts in (["true"], ["false"]):
        return texts == ["true"]
    if len(texts) == 2 and texts[0] in ("-z", "-n"):
        return (texts[1] == "") == (texts[0] == "-z")
    if len(texts) == 3 and texts[1] in ("=", "==", "!="):
        return fnmatch.fnmatchcase(texts[0], texts[2]) == (texts[1] != "!=")
    if (
        len(texts) == 3
        and texts[1] in NUMBER_TESTS
        and all(re.fullmatch(r"-?\d+", one) for one in (texts[0], texts[2]))
    ):
        return NUMBER_TESTS[texts[1]](int(texts[0]), int(texts[2]))
    return None


def _start(word: Word) -> str:
    """The unquoted text at the start of a word, where the name of an assignment stands."""
    first = word.segments[0] if word.segments else Segment("")
    return first.text if first.kind == "text" and not first.is_quoted else ""


def _leading_assignments(words: list[Word]) -> Iterator[Word]:
    for word in words:
        if not ASSIGNMENT.match(_start(word)):
            return
        yield word
