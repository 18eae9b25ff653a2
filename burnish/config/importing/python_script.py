"""Reads a Python script by its syntax tree, without running it: calls, the values of their arguments, and definitions.

A value is known if it is a constant, or is made of constants by names, arithmetic, f-strings, lists and dictionaries. `torch.bfloat16` is
the text bfloat16. `os.environ.get` reads the environment that is given. An argument of argparse has its default. Anything else is
`Unknown`, with its source text.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from burnish.config.errors import UserError

BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
TEXT_METHODS = (
    "split",
    "rsplit",
    "partition",
    "rpartition",
    "lower",
    "upper",
    "strip",
    "replace",
    "removeprefix",
    "removesuffix",
    "join",
)
"""Methods of text that are evaluated."""
MAX_POWER = 1024
"""Largest base and exponent of a power that is computed."""
MAX_TEXT = 80
"""Longest source text of an unknown value."""
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Unknown(NamedTuple):
    """A value that is not known without running the script."""

    text: str


class PythonScript:
    """The syntax tree of a script, and its names."""

    def __init__(self, path: Path, text: str, environment: Mapping[str, str]) -> None:
        try:
            self.tree = ast.parse(text, str(path))
        except SyntaxError as error:
            raise UserError(f"{path}, line {error.lineno}: not valid Python: {error.msg}") from error
        self.path, self.text, self.environment = path, text, environment
        self.assigned: dict[str, list[ast.Assign | ast.AnnAssign]] = {}
        self.definitions: dict[str, Definition] = {}
        self.imports: dict[
            str, tuple[str, str]
        ] = {}  # name in the script: module, name in the module ("" for a module)
        self.options: dict[str, ast.expr] = {}  # defaults of argparse
        for node in ast.walk(self.tree):
            self._collect(node)

    def _collect(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    self.assigned.setdefault(target.id, []).append(node)
        elif isinstance(node, Definition):
            self.definitions[node.name] = node
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                self.imports[alias.asname or alias.name] = (node.module or "", alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                self.imports[alias.asname or alias.name.partition(".")[0]] = (alias.name, "")
        elif isinstance(node, ast.Call) and called_name(node) == "add_argument" and node.args:
            flag = node.args[-1]
            default = next((word.value for word in node.keywords if word.arg == "default"), None)
            if isinstance(flag, ast.Constant) and default is not None:
                self.options[str(flag.value).lstrip("-").replace("-", "_")] = default

    def calls(self, names: Mapping[str, Any]) -> list[ast.Call]:
        """The calls of functions or classes with these names, in the order of the script."""
        found = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call) and called_name(node) in names]
        return sorted(found, key=lambda call: call.lineno)

    def source(self, node: ast.AST) -> str:
        """The source of a node on one line, cut to a readable length."""
        text = " ".join(ast.unparse(node).split())
        return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."

    def resolve(self, node: ast.expr) -> ast.expr:
        """The expression that a name stands for: its last assignment before the line of the name."""
        for _ in range(20):
            if not isinstance(node, ast.Name):
                return node
            before = [a for a in self.assigned.get(node.id, []) if a.lineno <= node.lineno and not _contains(a, node)]
            if not before or before[-1].value is None:
                return node
            node = before[-1].value
        return node

    def attribute_changes(self, call: ast.Call) -> dict[str, ast.expr]:
        """Attributes that are set later on the variable that a call is assigned to: `args.beta = 0.1`."""
        names = {name for name, assigns in self.assigned.items() if any(a.value is call for a in assigns)}
        found = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if (
                        isinstance(target, ast.Attribute)
                        and isinstance(target.value, ast.Name)
                        and target.value.id in names
                    ):
                        found[target.attr] = node.value
        return found

    def arguments(self, call: ast.Call, positional: tuple[str, ...] = ()) -> dict[str, ast.expr]:
        """The arguments of a call by name. A dictionary that is unpacked with ** is included if it is known."""
        found = dict(zip(positional, call.args, strict=False))
        for word in call.keywords:
            if word.arg is not None:
                found[word.arg] = word.value
                continue
            unpacked = self.resolve(word.value)
            if isinstance(unpacked, ast.Dict):
                pairs = zip(unpacked.keys, unpacked.values, strict=True)
                found |= {str(key.value): value for key, value in pairs if isinstance(key, ast.Constant)}
            elif isinstance(unpacked, ast.Call) and called_name(unpacked) == "dict":
                found |= self.arguments(unpacked)
            else:
                found[f"**{self.source(word.value)}"] = word.value
        return found

    def value(self, node: ast.expr) -> Any:
        """The value of an expression, or `Unknown`."""
        try:
            return self._value(self.resolve(node))
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
            return Unknown(self.source(node))

    def _value(self, node: ast.expr) -> Any:
        node = self.resolve(node)
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return [self._value(item) for item in node.elts]
        if isinstance(node, ast.Dict):
            return {
                self._value(k): self._value(v) for k, v in zip(node.keys, node.values, strict=True) if k is not None
            }
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._value(node.operand)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return not self._value(node.operand)
        if isinstance(node, ast.BinOp):
            return self._binary(node)
        if isinstance(node, ast.JoinedStr):
            return "".join(
                str(self._value(part.value if isinstance(part, ast.FormattedValue) else part)) for part in node.values
            )
        if isinstance(node, ast.IfExp):
            return self._value(node.body if self._value(node.test) else node.orelse)
        if isinstance(node, ast.Subscript):
            return self._value(node.value)[self._value(node.slice)]
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Call):
            return self._known_call(node)
        raise ValueError(f"{self.source(node)} is not known")

    def _binary(self, node: ast.BinOp) -> Any:
        left, right = self._value(node.left), self._value(node.right)
        if isinstance(node.op, ast.Pow) and all(
            isinstance(one, int | float) and abs(one) <= MAX_POWER for one in (left, right)
        ):
            return left**right
        if isinstance(node.op, ast.Div) and isinstance(left, str):  # a Path
            return str(Path(left) / str(right))
        if not isinstance(node.op, ast.Add) and not all(isinstance(one, int | float) for one in (left, right)):
            raise ValueError("text is only added: a factor or a format could make it huge")
        return BINARY[type(node.op)](left, right)

    def _attribute(self, node: ast.Attribute) -> Any:
        if isinstance(node.value, ast.Name) and node.value.id == "torch":
            return node.attr
        base = self.resolve(node.value)
        if (
            node.attr in self.options
            and isinstance(base, ast.Call)
            and called_name(base) in ("parse_args", "parse_known_args")
        ):
            return self._value(self.options[node.attr])
        if isinstance(base, ast.Call):  # an argument of a config class or a dataclass
            given = self.arguments(base)
            if node.attr in given:
                return self._value(given[node.attr])
        raise ValueError(f"{self.source(node)} is not known")

    def _known_call(self, node: ast.Call) -> Any:
        name, text = called_name(node), ast.unparse(node.func)
        if text in ("os.environ.get", "os.getenv"):
            key, default = self._value(node.args[0]), self._value(node.args[1]) if len(node.args) > 1 else None
            return self.environment.get(key, default)
        if text == "os.path.join":
            return str(Path(*[str(self._value(arg)) for arg in node.args]))
        if text == "os.path.expanduser":
            return str(Path(str(self._value(node.args[0]))).expanduser())
        if name in ("int", "float", "str", "bool", "Path", "list", "tuple") and len(node.args) == 1:
            value = self._value(node.args[0])
            return {"int": int, "float": float, "bool": bool, "list": list, "tuple": list}.get(name, str)(value)
        if isinstance(node.func, ast.Attribute) and name in TEXT_METHODS:
            text_value = self._value(node.func.value)
            if isinstance(text_value, str):
                return getattr(text_value, name)(*[self._value(arg) for arg in node.args])
        if name == "dict":
            return {key: self._value(value) for key, value in self.arguments(node).items()}
        raise ValueError(f"{self.source(node)} is not known")

    # --- definitions

    def runs_on_import(self, names: Mapping[str, Any]) -> bool:
        """Whether importing the script would call one of these names: a call outside functions and of `if __name__ == ...`."""
        return any(called_name(node) in names for node in _top_level_calls(self.tree))

    def extract(self, names: list[str]) -> str:
        """The source of definitions and of all imports, functions, classes and assignments of the module that they use."""
        wanted, queue = set[ast.stmt](), list(names)
        seen = set(queue)
        while queue:
            name = queue.pop()
            for statement in self.tree.body:
                if name not in _bound_names(statement) or statement in wanted:
                    continue
                wanted.add(statement)
                used = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
                queue += [one for one in used if one not in seen]
                seen |= used
        parts = [self._statement_source(statement) for statement in self.tree.body if statement in wanted]
        return "\n\n".join(parts) + "\n"

    def _statement_source(self, statement: ast.stmt) -> str:
        decorators = getattr(statement, "decorator_list", [])
        first = min([statement.lineno, *(decorator.lineno for decorator in decorators)])
        return "\n".join(self.text.splitlines()[first - 1 : statement.end_lineno])


def called_name(call: ast.Call) -> str:
    """The name of the function or class that is called, without its module."""
    function = call.func
    return (
        function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""
    )


def _contains(outer: ast.AST, inner: ast.AST) -> bool:
    return any(node is inner for node in ast.walk(outer))


def _bound_names(statement: ast.stmt) -> set[str]:
    """The names that a statement of the module defines."""
    if isinstance(statement, Definition):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
    if isinstance(statement, ast.Assign):
        return {node.id for target in statement.targets for node in ast.walk(target) if isinstance(node, ast.Name)}
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return {statement.target.id}
    return set()


def _top_level_calls(tree: ast.Module) -> Iterator[ast.Call]:
    for statement in tree.body:
        if isinstance(statement, Definition):
            continue
        if isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
            continue
        yield from (node for node in ast.walk(statement) if isinstance(node, ast.Call))
