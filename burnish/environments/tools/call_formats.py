"""The formats in which models write tool calls: `FORMATS` by name, `detect_format` for a model.

`parse` reads an answer and never raises. Its rules are the same in all formats:

- Calls are in the order written. A block inside the marks of a call that cannot be read is a `MalformedCall`, for which the model should
  get an error. Nothing is repaired.
- Calls inside `<think>...</think>` are not calls. A text that begins inside such a block, because the prompt opened it, is understood.
- Text around the calls is kept, also behind the last one.
- Whether a tool exists, and whether it takes the arguments, is for the caller to check.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from burnish.config.errors import UserError, unknown_name_error
from burnish.environments.tools import call_readers as plain
from burnish.environments.tools import control_token_readers as control
from burnish.environments.tools.call_readers import Reader, Writer, malformed
from burnish.environments.tools.call_values import (
    MAX_CALLS,
    BadCall,
    Call,
    MalformedCall,
    ParsedCall,
    Schema,
    check_encodable,
    function_of,
    skip_space,
)
from burnish.models.tokenizer import Tokenizer

__all__ = [
    "FORMATS",
    "Call",
    "CallFormat",
    "MalformedCall",
    "ParsedAnswer",
    "ParsedCall",
    "call_format",
    "detect_format",
    "render_tool_prompt",
]

THINK, END_THINK = "<think>", "</think>"


@dataclass(frozen=True)
class ParsedAnswer:
    """An answer, split into text, reasoning and calls."""

    content: str
    """The text outside of reasoning and calls; to the letter if there is neither."""
    reasoning: str | None
    """The text inside `<think>`, or None without such a block."""
    calls: list[Call] = field(default_factory=list)
    calls_at: int | None = None
    """Position of the first call in the raw text; None without calls."""
    text_after: str = ""
    """The part of `content` behind the first call."""


class CallFormat(Protocol):
    """One format of tool calls."""

    @property
    def name(self) -> str: ...

    @property
    def marks(self) -> tuple[str, ...]:
        """Strings of which one stands at the beginning of every call."""

    @property
    def control_tokens(self) -> tuple[str, ...]:
        """Names of the special tokens that a call may contain. A decoder must not leave them out."""

    @property
    def is_bare(self) -> bool:
        """Whether a call may also be a JSON object without marks, at the beginning of an answer."""

    @property
    def is_framed(self) -> bool:
        """Whether all text of an answer stands in messages with markup around them, so that `content` is not a part of the raw text."""

    @property
    def is_in_template(self) -> bool:
        """Whether the family's chat template lists tools and has a role for results. Otherwise a prompt must say it."""

    @property
    def result_text(self) -> str:
        """How a result is written in a user's message, where the template has no role for it."""

    def parse(self, raw_text: str, tools: Sequence[Schema] = ()) -> ParsedAnswer:
        """Read an answer, given with its control tokens. `tools` give the types of raw values."""

    def write(self, calls: Sequence[ParsedCall]) -> str:
        """The text that a model writes for some calls."""


@dataclass(frozen=True)
class BlockFormat:
    """A format whose calls stand between text, each behind a mark."""

    name: str
    marks: tuple[str, ...]
    reader: Reader
    writer: Writer
    bare_reader: Reader | None = None
    inner_tokens: tuple[str, ...] = ()
    """Special tokens of a call besides the marks."""
    is_framed: bool = False
    is_in_template: bool = True
    result_text: str = "<tool_response>\n{result}\n</tool_response>"

    @property
    def control_tokens(self) -> tuple[str, ...]:
        return self.marks + self.inner_tokens

    @property
    def is_bare(self) -> bool:
        return self.bare_reader is not None

    def write(self, calls: Sequence[ParsedCall]) -> str:
        return self.writer(calls)

    def parse(self, raw_text: str, tools: Sequence[Schema] = ()) -> ParsedAnswer:
        closing = raw_text.find(END_THINK)
        if closing >= 0 and raw_text.find(THINK, 0, closing) < 0:
            # The prompt has opened the reasoning, unless the closing tag stands inside an argument of a call.
            scan = _Scan(self, raw_text, tools, 0)
            if not any(start < closing < end for start, end, is_call in scan.blocks if is_call):
                scan = _Scan(self, raw_text, tools, closing + len(END_THINK))
                scan.reasoning.insert(0, raw_text[:closing])
        else:
            scan = _Scan(self, raw_text, tools, 0)
        return scan.answer()


class _Scan:
    """One pass over an answer from a position on."""

    def __init__(self, call_format: BlockFormat, text: str, tools: Sequence[Schema], start: int) -> None:
        self.format, self.text, self.tools = call_format, text, tools
        self.reasoning: list[str] = []
        self.calls: list[Call] = []
        self.blocks: list[tuple[int, int, bool]] = []
        """Start and end of each block of calls, and whether all of it could be read."""
        self.outside: list[str] = []
        self.num_before: int | None = None  # pieces of text before the first call
        self._read(start)

    def _read(self, start: int) -> None:
        text, marks = self.text, self.format.marks
        position = piece = start  # `piece` is where the current text began
        think_at = _find(text, [THINK], position)
        mark_at = _find(text, marks, position)
        is_at_start = True
        while position < len(text):
            # Search again only behind the last match: a text of many marks is then searched once.
            think_at = think_at if think_at >= position else _find(text, [THINK], position)
            mark_at = mark_at if mark_at >= position else _find(text, marks, position)
            first = skip_space(text, position)
            if is_at_start and self.format.bare_reader is not None and text.startswith("{", first):
                is_at_start = False
                found = self.format.bare_reader(text, first, self.tools)
                if found is not None:
                    position = piece = self._add(piece, first, *found)
                    continue
            if think_at < mark_at:
                closing = text.find(END_THINK, think_at)
                if closing < 0 and text[:think_at].strip():  # a tag that is only mentioned
                    position, think_at, is_at_start = think_at + len(THINK), len(text), False
                    continue
                is_at_start = is_at_start and not text[piece:think_at].strip()
                self.outside.append(text[piece:think_at])
                closing = len(text) if closing < 0 else closing
                self.reasoning.append(text[think_at + len(THINK) : closing])
                position = piece = min(closing + len(END_THINK), len(text))
                continue
            if mark_at >= len(text):
                break
            is_at_start = False
            if len(self.blocks) >= MAX_CALLS:
                position = piece = self._add(piece, mark_at, [malformed(text, mark_at, len(text), TOO_MANY)], len(text))
                break
            found = self.format.reader(text, mark_at, self.tools)
            if found is None:  # plain text after all
                position = mark_at + 1
            else:
                position = piece = self._add(piece, mark_at, *found)
        self.outside.append(text[piece:])

    def _add(self, piece: int, start: int, calls: list[Call], end: int) -> int:
        self.outside.append(self.text[piece:start])
        if self.num_before is None:
            self.num_before = len(self.outside)
        self.calls += calls
        self.blocks.append((start, end, all(isinstance(call, ParsedCall) for call in calls)))
        return end

    def answer(self) -> ParsedAnswer:
        reasoning = "\n".join(part.strip() for part in self.reasoning) if self.reasoning else None
        if not self.calls:
            content = "".join(self.outside)
            return ParsedAnswer(content if reasoning is None else content.strip(), reasoning)
        if len(self.calls) > MAX_CALLS:
            self.calls[MAX_CALLS:] = [MalformedCall("", TOO_MANY)]
        after = _joined(self.outside[self.num_before :])
        return ParsedAnswer(_joined(self.outside), reasoning, self.calls, self.blocks[0][0], after)


TOO_MANY = f"an answer has more than {MAX_CALLS} calls; the others were not read"


def _find(text: str, marks: Sequence[str], start: int) -> int:
    """Position of the first mark; the length of the text without one."""
    return min((at for mark in marks if (at := text.find(mark, start)) >= 0), default=len(text))


def _joined(pieces: Sequence[str]) -> str:
    return "\n".join(piece.strip() for piece in pieces if piece.strip())


# --- gpt-oss ------------------------------------------------------------------------------------------------------------

_RECIPIENT = re.compile(r"\bto=([\w.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_MESSAGE_END = re.compile(r"<\|(?:end|call|return)\|>")


@dataclass(frozen=True)
class HarmonyFormat:
    """The format of gpt-oss: an answer is a list of messages, each with a channel, and calls have a recipient.

    `analysis` is reasoning, `final` and `commentary` are content, and `to=functions.name` is a call with JSON arguments.
    """

    name: str = "gpt_oss"
    marks: tuple[str, ...] = ("<|channel|>", "<|start|>", " to=functions.")
    control_tokens: tuple[str, ...] = tuple(
        f"<|{name}|>" for name in ("channel", "start", "message", "constrain", "end", "call", "return")
    )
    is_bare: bool = False
    is_framed: bool = True
    is_in_template: bool = True
    result_text: str = "<tool_response>\n{result}\n</tool_response>"

    def write(self, calls: Sequence[ParsedCall]) -> str:
        return "<|start|>assistant".join(
            f" to=functions.{call.name}<|channel|>commentary json<|message|>{json.dumps(call.arguments, ensure_ascii=False)}<|call|>"
            for call in calls
        )

    def parse(self, raw_text: str, tools: Sequence[Schema] = ()) -> ParsedAnswer:
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[Call] = []
        calls_at: int | None = None
        num_before = position = 0
        for part in raw_text.split("<|start|>"):
            start, position = position, position + len(part) + len("<|start|>")
            header, mark, body = part.partition("<|message|>")
            ending = _MESSAGE_END.search(body)
            behind = body[ending.end() :] if ending else ""
            body = body[: ending.start()] if ending else body
            recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
            if not mark:
                content.append(part.removeprefix("assistant") if start else part)
                continue
            if recipient:
                if calls_at is None:
                    calls_at, num_before = start, len(content)
                if len(calls) <= MAX_CALLS:
                    calls.append(_harmony_call(recipient[1], body))
            elif channel and channel[1] == "analysis":
                reasoning.append(body)
            else:
                content.append(body)
            content.append(behind)
        if len(calls) > MAX_CALLS:
            calls[MAX_CALLS:] = [MalformedCall("", TOO_MANY)]
        after = _joined(content[num_before:]) if calls else ""
        thought = _joined(reasoning) if reasoning else None
        whole = raw_text if "<|message|>" not in raw_text else _joined(content)
        return ParsedAnswer(whole, thought, calls, calls_at, after)


def _harmony_call(recipient: str, body: str) -> Call:
    try:
        if recipient == "python":  # its body is code
            check_encodable(body)
            return ParsedCall("python", {"code": body})
        arguments, end = plain.read_arguments(body, skip_space(body, 0))
        if body[end:].strip():
            raise BadCall("there is text behind the JSON object")
        return ParsedCall(recipient.removeprefix("functions."), arguments)
    except BadCall as error:
        return malformed(body, 0, len(body), str(error))


# --- the formats by name ------------------------------------------------------------------------------------------------

_BLOCK_FORMATS = (
    BlockFormat("hermes", (plain.TOOL_CALL,), plain.read_hermes, plain.write_hermes),
    BlockFormat("qwen3_coder", (plain.TOOL_CALL,), plain.read_qwen3_coder, plain.write_qwen3_coder),
    BlockFormat("llama3", (plain.PYTHON_TAG,), plain.read_llama3, plain.write_llama3, plain.read_llama3_bare),
    BlockFormat(
        "mistral", (plain.TOOL_CALLS,), plain.read_mistral, plain.write_mistral, inner_tokens=("[ARGS]", "[CALL_ID]")
    ),
    BlockFormat(
        "gemma3",
        (plain.TOOL_CODE, plain.JSON_FENCE),
        plain.read_gemma3,
        plain.write_gemma3,
        plain.read_gemma3_bare,
        is_in_template=False,
        result_text="```tool_output\n{result}\n```",
    ),
    BlockFormat("smollm2", (plain.TOOL_CALL,), plain.read_smollm2, plain.write_smollm2, is_in_template=False),
    BlockFormat("glm", (plain.TOOL_CALL,), plain.read_glm, plain.write_glm),
    BlockFormat(
        "deepseek",
        (control.DEEPSEEK_SECTION,),
        control.read_deepseek,
        control.write_deepseek,
        inner_tokens=control.DEEPSEEK_TOKENS,
    ),
    BlockFormat(
        "kimi", (control.KIMI_SECTION,), control.read_kimi, control.write_kimi, inner_tokens=control.KIMI_TOKENS
    ),
    BlockFormat(
        "lfm2", (control.LFM2_CALL,), control.read_lfm2, control.write_lfm2, inner_tokens=(control.END_LFM2_CALL,)
    ),
    BlockFormat(
        "gemma4",
        (control.GEMMA4_CALL,),
        control.read_gemma4,
        control.write_gemma4,
        inner_tokens=(control.END_GEMMA4_CALL, control.GEMMA4_QUOTE),
    ),
)
FORMATS: Mapping[str, CallFormat] = {
    **{block.name: block for block in _BLOCK_FORMATS},
    "gpt_oss": HarmonyFormat(),
}

_SIGNS = (
    ("<arg_key>", "glm"),
    ("<function=", "qwen3_coder"),
    (control.DEEPSEEK_SECTION, "deepseek"),
    (control.KIMI_SECTION, "kimi"),
    (control.LFM2_CALL, "lfm2"),
    ("<|tool_list_start|>", "lfm2"),
    (control.GEMMA4_CALL, "gemma4"),
    ("<|channel|>", "gpt_oss"),
    (plain.TOOL_CALLS, "mistral"),
    ("[AVAILABLE_TOOLS]", "mistral"),
    (plain.PYTHON_TAG, "llama3"),
    ("<|start_header_id|>", "llama3"),
    (plain.TOOL_CALL, "hermes"),
    ("<start_of_turn>", "gemma3"),
    ("named SmolLM", "smollm2"),
)
"""What the chat template of a family contains, and the family's format. The first match counts."""
_FAMILY_FORMATS = {
    "qwen2": "hermes",
    "qwen3": "hermes",
    "llama": "llama3",
    "mistral": "mistral",
    "gemma3_text": "gemma3",
}
"""The format of each family that the native decoder runs, for models whose template says nothing."""


def call_format(name: str, option: str = "environment.call_format") -> CallFormat:
    """The format of a name; an unknown name is a `UserError` with the option that names it and the closest format."""
    if name not in FORMATS:
        raise unknown_name_error(option, name, list(FORMATS))
    return FORMATS[name]


def detect_format(tokenizer: Tokenizer, family: str | None = None) -> str:
    """The name of the format that a model was taught, from its chat template, or else from its family (`model_type`)."""
    source = tokenizer.chat_template_source()
    for sign, name in _SIGNS:
        if sign in source:
            return name
    if family in _FAMILY_FORMATS:
        return _FAMILY_FORMATS[family]
    what = "names no known format of tool calls" if source else "is missing"
    raise UserError(
        f"the chat template of this model {what}, so tool calls in its answers cannot be recognised: set environment.call_format to one of "
        f"{', '.join(sorted(FORMATS))}"
    )


def render_tool_prompt(name: str, schemas: Sequence[Schema]) -> str:
    """A system text that lists the tools and the format of calls, for models whose chat template has no place for tools."""
    chosen = call_format(name)
    lines = [json.dumps(function_of(schema), ensure_ascii=False) for schema in schemas]
    example = chosen.write([ParsedCall("tool_name", {"argument": "value"})])
    return "\n".join(
        [
            "You can call these tools. Each line is the JSON schema of one tool:",
            "",
            *lines,
            "",
            "To call a tool, write exactly this form, with the name of the tool and its arguments:",
            "",
            example,
            "",
            "Then stop. The next message contains the result, and you can call another tool or answer. To answer, write no call.",
        ]
    )
