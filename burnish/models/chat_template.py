"""Rendering of chat templates with limits on steps, text size and time.

A chat template is an untrusted program in a model directory. Jinja's sandbox blocks access to Python, but does not bound
the work: nested loops of 100,000 passes, a macro that calls itself twice, or a text that is doubled sixty times would
take the process down. Here every loop pass, call and filter counts as a step, and the size of a text is checked before the
text is created. A rendering that exceeds a limit ends with an error.

Templates have the same names as in transformers: `raise_exception`, `strftime_now`, `tojson`, `{% generation %}`, loop controls.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from burnish.config.errors import UserError

MAX_STEPS, STEPS_PER_MESSAGE = 1_000_000, 200
MAX_CHARS = 64 << 20
"""Characters of a rendering, and of any intermediate text."""
MAX_ITEMS = 1 << 20
"""Items of an intermediate list."""
MAX_BITS = 4096
MAX_WIDTH = 10_000
"""Width of padding and indentation."""
MAX_SECONDS = 60.0
"""Time limit, in case single steps are slow."""
WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*\d{5,}|\{[^{}]*:[^{}]*\d{5,}")
"""A width of five digits in a format string: `%10000d` or `{:>10000}`."""
DYNAMIC_WIDTH = re.compile(r"%[^a-zA-Z%]*\*|\{[^{}]*:[^{}]*\{")
"""A width that is taken from the formatted values: `%*d` or `{:{}}`."""
SIZED_TYPES = (str, bytes, list, tuple, dict, set, frozenset, range)
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys under which messages carry reasoning; templates read the first two."""


class TemplateLimit(Exception):
    """A template exceeded a limit."""


@dataclass
class Budget:
    """The steps and characters that one rendering has used, and its limits."""

    max_steps: int
    deadline: float
    steps: int = 0
    chars: int = 0

    def step(self, count: int = 1, chars: int = 0) -> None:
        """Count steps and the characters that they write; raise past a limit."""
        self.steps += count
        self.chars += chars
        if self.steps > self.max_steps:
            raise TemplateLimit(f"takes more than {self.max_steps:,} steps")
        if self.chars > MAX_CHARS:
            raise TemplateLimit(f"writes more than {MAX_CHARS:,} characters")
        if time.monotonic() > self.deadline:
            raise TemplateLimit(f"takes more than {MAX_SECONDS:g} seconds")


_budget: ContextVar[Budget] = ContextVar("budget")


def render(source: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """Render a template for messages; raise a `UserError` if it fails or exceeds a limit."""
    max_steps = MAX_STEPS + STEPS_PER_MESSAGE * len(messages)
    used = _budget.set(Budget(max_steps, time.monotonic() + MAX_SECONDS))
    try:
        given = {"tools": None, "documents": None, **variables, "messages": [_with_reasoning(m) for m in messages]}
        return _compiled_template(source).render(given)
    except (TemplateLimit, RecursionError, MemoryError, OverflowError) as error:
        reason = str(error) if isinstance(error, TemplateLimit) else f"does not end ({type(error).__name__}: {error})"
        raise UserError(
            f"the chat template of this tokenizer {reason}; the model's directory is damaged or malicious"
        ) from error
    except Exception as error:  # a template is a program and may raise anything
        reason = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        roles = ", ".join(str(m.get("role")) for m in messages)
        raise UserError(f"the chat template refuses messages with roles {roles}: {reason}") from error
    finally:
        _budget.reset(used)


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


@functools.lru_cache(maxsize=16)
def _compiled_template(source: str) -> Any:
    environment = BoundedEnvironment()
    return environment.from_string(source)


SEARCH_METHODS = frozenset(
    [
        "startswith",
        "endswith",
        "split",
        "rsplit",
        "partition",
        "rpartition",
        "replace",
        "removeprefix",
        "removesuffix",
        "find",
        "rfind",
        "index",
        "count",
    ]
)


@functools.lru_cache(maxsize=16)
def searched_texts(source: str) -> tuple[str, ...]:
    """Texts that a template searches for in its messages, such as `</think>`; a message that contains one may be rendered differently.

    They are the constants of `'text' in value`, of string methods such as `split`, and of the filter `replace`. The longest come first.
    A plain name before `in` is a key of a message (`'tool_calls' in message`), not a text.
    """
    try:
        tree = BoundedEnvironment().parse(source)
    except TemplateError:  # `render` raises the same error, with its reason
        return ()
    holders: list[nodes.Node] = [test.expr for test in tree.find_all(nodes.Compare) if _searches_text(test)]
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in SEARCH_METHODS:
            holders += call.args
    for step in tree.find_all(nodes.Filter):
        holders += step.args if step.name == "replace" else []
    constants = [part for holder in holders for part in [holder, *holder.find_all(nodes.Const)]]
    texts = {part.value for part in constants if isinstance(part, nodes.Const) and isinstance(part.value, str)}
    return tuple(sorted((text for text in texts if text.strip()), key=lambda text: (-len(text), text)))


def _searches_text(test: nodes.Compare) -> bool:
    is_name = isinstance(test.expr, nodes.Const) and str(test.expr.value).isidentifier()
    return not is_name and any(operand.op in ("in", "notin") for operand in test.ops)


class Generation(Extension):
    """`{% generation %}`, which marks the assistant's text for other programs. Here its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own form)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with all work counted against the `Budget` of the rendering."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        # Not optimized: constant expressions would be evaluated at compile time, before anything is counted.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[Generation, loopcontrols],
            finalize=_count_output,
        )
        self.filters["tojson"] = _tojson
        self.filters = {name: _counted_filter(name, function) for name, function in self.filters.items()}
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise, "strftime_now": lambda form: datetime.now().strftime(form)}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = _method_call("items_of", loop.iter)
        for kind in (nodes.For, nodes.Macro, nodes.CallBlock):
            for block in list(tree.find_all(kind)):
                body: list[nodes.Node] = block.body  # type: ignore[attr-defined]  # all three kinds have one
                written = sum(len(data.data) for part in body for data in _literal_text_nodes(part))
                body.insert(0, nodes.ExprStmt(_method_call("count", nodes.Const(written))))
        _replace_concatenations(tree)
        return tree

    def count(self, chars: int) -> None:
        """Count one loop pass or macro call, and the template's own text in it."""
        _budget.get().step(1, chars)

    def items_of(self, items: Any) -> Any:
        """Count the items of a loop."""
        _budget.get().step(len(items) if isinstance(items, SIZED_TYPES) else 1)
        return items

    def concatenate(self, *parts: Any) -> str:
        """The operator `~`, with its size checked."""
        texts = [str(part) for part in parts]
        _check_size(sum(map(len, texts)))
        return "".join(texts)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        _budget.get().step()
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(owner, str):
            _check_text_call(getattr(function, "__name__", ""), owner, args, kwargs)
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, SIZED_TYPES) and isinstance(right, SIZED_TYPES):
            _check_size(len(left) + len(right), not isinstance(left, str))
        elif operator == "*":
            _check_product(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * max(right, 0))
        elif operator == "%" and isinstance(left, str):
            _check_widths(left, right if isinstance(right, tuple) else (right,))
        return super().call_binop(context, operator, left, right)


def _method_call(method: str, *args: nodes.Node) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), list(args), [], None, None)


def _literal_text_nodes(node: nodes.Node) -> list[nodes.TemplateData]:
    own = [node] if isinstance(node, nodes.TemplateData) else []
    return own + list(node.find_all(nodes.TemplateData))


def _replace_concatenations(node: nodes.Node) -> None:
    """Replace every `~` by a call of `concatenate`, which checks the size."""
    for name, value in list(node.iter_fields()):
        parts = value if isinstance(value, list) else [value]
        for part in parts:
            if isinstance(part, nodes.Node):
                _replace_concatenations(part)
        measured = [_method_call("concatenate", *p.nodes) if isinstance(p, nodes.Concat) else p for p in parts]
        setattr(node, name, measured if isinstance(value, list) else measured[0])


def _count_output(value: Any) -> Any:
    """Count the output of `{{ ... }}`: jinja passes every such value through this function."""
    _budget.get().step(1, len(value) if isinstance(value, str) else 0)
    return value


def _check_size(size: int, is_list: bool = False) -> None:
    if size > (MAX_ITEMS if is_list else MAX_CHARS):
        raise TemplateLimit(f"makes {'a list of' if is_list else 'a text of'} {size:,}")


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise TemplateLimit(f"makes a number of {bits:,} bits")


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    for many, times in ((left, right), (right, left)):
        if isinstance(many, SIZED_TYPES) and isinstance(times, int):
            _check_size(len(many) * max(times, 0), not isinstance(many, str))


def _check_widths(form: str, args: Sequence[Any]) -> None:
    """Limit the padding width of a format. The formatted values may have any size."""
    if WIDE_FORMAT.search(form):
        raise TemplateLimit(f"formats with a width above {MAX_WIDTH:,}")
    if DYNAMIC_WIDTH.search(form):
        _check_padding(args)


def _check_text_call(name: str, text: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check a string method that can return a longer string."""
    if name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        _check_size(len(text) + text.count(args[0]) * len(args[1]))
    elif name == "join" and args and isinstance(args[0], SIZED_TYPES):
        _check_items(args[0], len(text))
    elif name in ("ljust", "rjust", "center", "zfill", "expandtabs"):
        _check_padding([*args, *kwargs.values()])
    elif name in ("format", "format_map"):
        values = [value for arg in args for value in (arg.values() if isinstance(arg, dict) else [arg])]
        _check_widths(text, [*values, *kwargs.values()])
    elif name == "translate":
        raise TemplateLimit("calls translate, whose result size cannot be checked")


def _check_padding(args: Sequence[Any]) -> None:
    if any(isinstance(arg, int) and abs(arg) > MAX_WIDTH for arg in args):
        raise TemplateLimit(f"pads with a width above {MAX_WIDTH:,}")


def _check_items(items: Any, between: int = 0) -> None:
    """Check the size of joined texts or summed lists."""
    _budget.get().step(len(items))
    _check_size(sum((len(item) if isinstance(item, SIZED_TYPES) else 1) + between for item in items))


PADDING_FILTERS = frozenset({"center", "indent", "tojson", "batch", "slice", "wordwrap", "xmlattr", "urlize"})
"""Filters whose arguments after the value are widths or counts."""


def _counted_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        _budget.get().step()
        if name in PADDING_FILTERS:
            _check_padding([*args[1:], *kwargs.values()])
        if name == "replace":
            texts = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, str)]
            if len(texts) > 2:
                _check_size(len(texts[0]) + texts[0].count(texts[1]) * len(texts[2]))
        for arg in args:
            if name == "format" and isinstance(arg, str):
                _check_widths(arg, args)
            if isinstance(arg, list | tuple):
                _check_items(arg, max((len(a) for a in args if isinstance(a, str)), default=0))
        return function(*args, **kwargs)

    return counted


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)
