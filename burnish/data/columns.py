"""Columns that other systems' rows have: which are read, under which names, and which are refused because nothing reads them.

A row of verl, TRL, OpenRLHF, ShareGPT or Alpaca may carry a column that changes what the model should see or how its answer
is scored. A column that burnish does not use must not be dropped in silence: the run would train on something else. Such a
column is refused where it has a value; null, false and empty values are harmless, because parquet gives every row every column.
docs/data.md has the whole table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from burnish.config.errors import UserError

Message = dict[str, Any]
Said = str | list[Message]

QUESTIONS = ("question", "problem", "query", "instruction", "input")
"""Columns that hold what is asked, where a row has no `prompt`."""
COMPLETIONS = ("completion", "response", "output")
"""Columns that hold what is imitated, in supervised rows and labelled answers."""
ANSWERS = (
    "answer",
    "solution",
    "ground_truth",
    "final_answer",
    "expected_answer",
    "label",
    "target",
    "response",
    "output",
)
"""Columns that probably hold the expected answer of a row whose `answer_key` gives none, the likeliest first."""

MEDIA = ("images", "image", "videos", "video", "audios", "audio")
"""Inputs that are not text (verl, TRL, ShareGPT). Without them the model would read the literal `<image>`."""
TEMPLATE_ARGUMENTS = ("chat_template_kwargs", "enable_thinking")
"""Arguments of the chat template for one row (TRL, verl)."""
AGENT_COLUMNS = ("tools", "agent_name", "tools_kwargs", "need_tools_kwargs", "interaction_kwargs")
"""Tools and agents of one row (verl, TRL, ShareGPT), which an environment may read."""
NO_TOOLS = {"agent_name": ("single_turn_agent",)}
"""Values of those that ask for nothing but one answer."""
NO_ENVIRONMENT = "and environment=single_turn gives the model neither: name an environment that does (docs/environments.md), or leave such rows out"
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
"""ShareGPT's `from`, as the roles of chat templates."""


def refuse_unread(record: Mapping[str, Any], where: str) -> None:
    """Refuse a row with a column that changes what the model should read, and that no part of burnish reads."""
    for key in MEDIA:
        if _is_given(record.get(key)):
            raise UserError(
                f"{where}: column {key!r} has a value, and burnish trains on text alone: the model would read the placeholder "
                f"(such as <image>) as text. Leave such rows out of the file, or remove the column where the text says all"
            )
    for key in TEMPLATE_ARGUMENTS:
        if record.get(key) is not None and record[key] != {}:
            raise UserError(
                f"{where}: column {key!r} has arguments of the chat template for this row, and burnish has one set for all rows: "
                "give them as template.kwargs (of `burnish train`: data.template.kwargs) and remove the column"
            )


def refuse_tools(columns: Mapping[str, Any], where: str, use: str) -> None:
    """Refuse a row that brings tools or names an agent, where nothing gives them to the model; `use` says what to do."""
    for key in AGENT_COLUMNS:
        value = columns.get(key)
        if _is_given(value) and value not in NO_TOOLS.get(key, ()):
            raise UserError(f"{where}: column {key!r} asks for tools or an agent ({_short(value)}), {use}")


def _is_given(value: Any) -> bool:
    """Whether a column says anything: parquet fills what a row does not have with nulls."""
    if isinstance(value, Mapping):
        return any(_is_given(inner) for inner in value.values())
    if isinstance(value, list | tuple):
        return any(_is_given(inner) for inner in value)
    return value is not None and value is not False and value != ""


# --- what is asked ---------------------------------------------------------------------------------------------------


def question_column(record: Mapping[str, Any], where: str, wanted: str) -> str | None:
    """The column of the prompt: the one the config names, else the one of the known names that is there; two are an error."""
    if wanted in record or wanted != QUESTIONS[0]:
        return wanted if wanted in record else None
    found = [key for key in QUESTIONS if record.get(key) is not None]
    if found == ["instruction", "input"]:  # Alpaca: `input` is what the instruction is about
        return "instruction"
    if len(found) > 1:
        raise UserError(
            f"{where}: {' and '.join(map(repr, found))} could each be the prompt; name one with prompt_key, or rename it to 'prompt'"
        )
    return found[0] if found else None


def asked(record: Mapping[str, Any], key: str, value: Said, where: str) -> Said:
    """The prompt with what other columns add to it: Alpaca's `input` behind an `instruction`, a `system` message before it."""
    about = record.get("input")
    if key == "instruction" and isinstance(value, str) and isinstance(about, str) and about.strip():
        value = f"{value}\n{about}"
    system = record.get("system")
    if not _is_given(system):
        return value
    if not isinstance(system, str):
        raise UserError(f"{where}: column 'system' should be text, got {_short(system)}")
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if messages[0]["role"] == "system":
        raise UserError(
            f"{where}: column 'system' and the first message of {key!r} are both system messages; keep one of them"
        )
    return [{"role": "system", "content": system}, *messages]


def completion_column(record: Mapping[str, Any], where: str) -> str | None:
    """The column of what is imitated: `completion`, or the one of the other names that is there; two are an error.

    A row without `prompt` may have it in `answer`, as plain rows have.
    """
    if "completion" in record:
        return "completion"
    found = [key for key in COMPLETIONS if record.get(key) is not None]
    if len(found) > 1:
        raise UserError(
            f"{where}: {' and '.join(map(repr, found))} could each be the completion; rename the right one to 'completion'"
        )
    if not found and "prompt" not in record and isinstance(record.get("answer"), str):
        return "answer"
    return found[0] if found else None


# --- messages --------------------------------------------------------------------------------------------------------


def content_text(content: Any, where: str) -> Any:
    """The content of a message, with blocks of text joined; blocks of another type are refused."""
    if not isinstance(content, list):
        return content
    texts = []
    for index, block in enumerate(content):
        kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
        if kind != "text" or not isinstance(block.get("text"), str):
            raise UserError(
                f"{where}[{index}] is a block of type {kind!r}; burnish reads text alone, as text or as blocks "
                '{"type": "text", "text": ...}: leave such rows out of the file'
            )
        texts.append(block["text"])
    return "".join(texts)


def plain_message(value: Mapping[str, Any], where: str) -> Message:
    """A message with `role` and `content`, also from ShareGPT's `from` and `value`; null fields were never there."""
    message = {key: field for key, field in value.items() if field is not None}
    if "from" in message and "role" not in message:
        role = message.pop("from")
        if role not in ROLES:
            raise UserError(
                f"{where}.from is {role!r}; expected one of {', '.join(ROLES)} (a call of a tool is an assistant message with tool_calls)"
            )
        message = {"role": ROLES[role], "content": message.pop("value", None), **message}
    if "content" in message:
        message["content"] = content_text(message["content"], f"{where}.content")
    for key in ("weight", "train"):
        if key in message and not message[key]:
            raise UserError(
                f"{where}.{key} says that this turn is not to be learnt, and every assistant turn of a conversation is: give "
                "`prompt` (the turns before) and `completion` (the turn to learn) as a row"
            )
    return message


def likely_answer(columns: Mapping[str, Any]) -> str | None:
    """The column of a row that probably holds its expected answer, or None."""
    return next((key for key in ANSWERS if _is_given(columns.get(key))), None)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
