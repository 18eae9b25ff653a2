"""The variables of a shell script, and the expansion of its words. Nothing is executed.

A command substitution is not run: `$(pwd)` is the working directory, the folder of the script is known, and any other is empty and noted.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import re

from burnish.config.importing.shell_words import NAME, SPECIAL_PARAMETERS, Lexer, Segment, Word

BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
PARAMETER = re.compile(r"(!?[A-Za-z_]\w*|[@*#?$!0-9-])(\[[^]]*\])?(.*)", re.DOTALL)


class Variables:
    """The variables of a script: its own assignments, else those of the environment. Notes say what could not be known."""

    def __init__(self, environment: dict[str, str], folder: str) -> None:
        self.own: dict[str, list[str]] = {"#": ["0"], "?": ["0"]}  # a script without arguments
        self.environment, self.folder = environment, folder
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        """Remember what could not be evaluated, once."""
        if text not in self.notes:
            self.notes.append(text)

    def get(self, name: str) -> list[str] | None:
        """The values of a variable: one for a scalar, all items of an array, None if it is not set."""
        if name in self.own:
            return self.own[name]
        if name in self.environment:
            if name not in ("HOME", "PWD", "USER"):
                self.note(f"{name}={self.environment[name]} is taken from the environment")
            return [self.environment[name]]
        return None

    def expand(self, word: Word) -> list[str]:
        """The texts that a word becomes: several for an array or an unquoted value with spaces, none for an empty one."""
        texts, is_kept = [""], False
        for segment in word.segments:
            if segment.kind == "text":
                texts[-1] += segment.text
                is_kept = is_kept or segment.is_quoted or bool(segment.text)
                continue
            values = self._values(segment)
            is_list = re.search(r"\[@\]|^@$", segment.text) is not None
            if not segment.is_quoted:
                values = " ".join(values).split()
            elif not is_list:
                values, is_kept = [" ".join(values)], True
            if values:
                is_kept = True
                texts[-1] += values[0]
                texts += values[1:]
        return texts if is_kept else []

    def text(self, word: Word) -> str:
        """The value of an assignment: no splitting at spaces."""
        return "".join(s.text if s.kind == "text" else " ".join(self._values(s)) for s in word.segments)

    def _values(self, segment: Segment) -> list[str]:
        if segment.kind == "arithmetic":
            return [self._arithmetic(segment.text)]
        if segment.kind == "command":
            return [self._command(segment.text)]
        return self._parameter(segment.text)

    def _parameter(self, body: str) -> list[str]:
        if body.startswith("#") and len(body) > 1:
            counted = self.get(NAME.findall(body)[0] if NAME.findall(body) else "") or []
            return [str(len(counted) if "[" in body else len("".join(counted)))]
        match = PARAMETER.match(body)
        if match is None or match[1].startswith("!"):
            self.note(f"${{{body}}} is not evaluated")
            return []
        name, index, rest = match[1], match[2], match[3]
        values = self.get(name)
        if index is not None and index[1:-1].isdecimal() and values is not None:
            values = values[int(index[1:-1]) : int(index[1:-1]) + 1]
        elif index is None and values is not None and len(values) > 1:
            values = values[:1]  # as in bash: an array without an index is its first item
        if rest:
            return self._with_operator(name, values, rest)
        if values is None and name not in SPECIAL_PARAMETERS:
            self.note(
                f"{name} is not set in the script: give it as an environment variable ({name}=... burnish import ...)"
            )
        if values is None and name.isdecimal() and name != "0":
            self.note(
                f"${name} is an argument of the script or of a function in it, which is not known: it is left empty"
            )
        return values or []

    def _with_operator(self, name: str, values: list[str] | None, rest: str) -> list[str]:
        is_missing = values is None or (rest.startswith(":") and not "".join(values))
        sign, other = rest.lstrip(":")[:1], rest.lstrip(":")[1:]
        if sign in ("-", "="):
            if is_missing and sign == "=":
                self.own[name] = [self.text(_inner_word(other))]
            return [self.text(_inner_word(other))] if is_missing else values or []
        if sign == "+":
            return [] if is_missing else [self.text(_inner_word(other))]
        if sign == "?":
            if is_missing:
                self.note(
                    f"{name} must be given: {self.text(_inner_word(other)) or 'the script has no default for it'}"
                )
            return values or []
        if sign in ("%", "#") and values:
            return [_without_pattern("".join(values), rest, self)]
        if sign == "/" and values:
            old, _, new = other.lstrip("/").partition("/")
            return ["".join(values).replace(old, new, -1 if other.startswith("/") else 1)]
        if rest.startswith((",,", "^^")) and values:
            return ["".join(values).lower() if rest[0] == "," else "".join(values).upper()]
        self.note(f"${{{name}{rest}}} is not evaluated")
        return values or []

    def _arithmetic(self, body: str) -> str:
        try:
            text = self.text(_inner_word(body)).strip()
            return str(self._number(ast.parse(text, mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, KeyError):
            self.note(f"$(({body})) is not evaluated")
            return ""

    def _number(self, node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            return int("".join(self.get(node.id) or [""]))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._number(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in BINARY:
            return int(BINARY[type(node.op)](self._number(node.left), self._number(node.right)))
        raise ValueError("not arithmetic that is known here")

    def _command(self, body: str) -> str:
        if body.strip() == "pwd":
            return "."
        if re.search(r"dirname|realpath", body) and re.search(r"\$0|BASH_SOURCE", body):
            return self.folder
        self.note(f"$({body.strip()}) is not run: it is left empty")
        return ""


def _inner_word(text: str) -> Word:
    """The word inside `${NAME:-...}`, with its own quotes and expansions. Its spaces do not end it."""
    lexer, word = Lexer(text, "an expansion"), Word()
    while lexer.at < len(text):
        if text[lexer.at] in " \t\n;&|<>()":
            word.segments.append(Segment(text[lexer.at]))
            lexer.at += 1
        else:
            word.segments += lexer.word().segments
    return word


def _without_pattern(text: str, rest: str, variables: Variables) -> str:
    """`${NAME%pattern}` and its relatives: the text without the shortest or longest match at one end."""
    sign, is_longest = rest[0], rest[:2] in ("%%", "##")
    pattern = variables.text(_inner_word(rest[2 if is_longest else 1 :]))
    cuts = range(len(text) + 1)
    if sign == "#":
        found = [at for at in cuts if fnmatch.fnmatchcase(text[:at], pattern)]
        return text if not found else text[max(found) if is_longest else min(found) :]
    found = [at for at in cuts if fnmatch.fnmatchcase(text[at:], pattern)]
    return text if not found else text[: min(found) if is_longest else max(found)]
