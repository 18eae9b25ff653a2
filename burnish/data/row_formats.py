"""One row of data, whatever shape it came in.

Three shapes are recognised by their columns: verl's (`prompt`, `reward_model.ground_truth`, `data_source`,
`extra_info`), TRL's (`prompt`, every other column for the reward) and plain ones (a question and an answer under
names from the config, or under one of the names in `data/row_formats.py`). Supervised rows have `prompt` and `completion`,
`messages`, or `text`. A row that does not fit is an error that names its place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.config.errors import UserError, did_you_mean
from burnish.config.plugins import check_options, load_plugin
from burnish.data.files import LocatedRecord, Record, read_records
from burnish.data.row import Message, Row

if TYPE_CHECKING:
    from burnish.config.data import Source


# --- Columns that other systems' rows have: which are read, under which names, and which are refused because nothing reads them.
#
# A row of verl, TRL, OpenRLHF, ShareGPT or Alpaca may carry a column that changes what the model should see or how its answer
# is scored. A column that burnish does not use must not be dropped in silence: the run would train on something else. Such a
# column is refused where it has a value; null, false and empty values are harmless, because parquet gives every row every column.
# docs/data.md has the whole table.

TextOrMessages = str | list[Message]

QUESTION_COLUMNS = ("question", "problem", "query", "instruction", "input")
"""Columns that hold what is asked, where a row has no `prompt`."""
COMPLETION_COLUMNS = ("completion", "response", "output")
"""Columns that hold what is imitated, in supervised rows and labelled answers."""
LIKELY_ANSWER_COLUMNS = (
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

MEDIA_COLUMNS = ("images", "image", "videos", "video", "audios", "audio")
"""Inputs that are not text (verl, TRL, ShareGPT). Without them the model would read the literal `<image>`."""
TEMPLATE_ARGUMENTS = ("chat_template_kwargs", "enable_thinking")
"""Arguments of the chat template for one row (TRL, verl)."""
AGENT_COLUMNS = ("tools", "agent_name", "tools_kwargs", "need_tools_kwargs", "interaction_kwargs")
"""Tools and agents of one row (verl, TRL, ShareGPT), which an environment may read."""
SINGLE_ANSWER_AGENTS = {"agent_name": ("single_turn_agent",)}
"""Values of those that ask for nothing but one answer."""
NO_TOOL_ENVIRONMENT = "and environment=single_turn gives the model neither: name an environment that does (docs/environments.md), or leave such rows out"
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


def refuse_unsupported_columns(record: Mapping[str, Any], where: str) -> None:
    """Refuse a row with a column that changes what the model should read, and that no part of burnish reads."""
    for key in MEDIA_COLUMNS:
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
        if _is_given(value) and value not in SINGLE_ANSWER_AGENTS.get(key, ()):
            raise UserError(f"{where}: column {key!r} asks for tools or an agent ({_short_repr(value)}), {use}")


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
    if wanted in record or wanted != QUESTION_COLUMNS[0]:
        return wanted if wanted in record else None
    found = [key for key in QUESTION_COLUMNS if record.get(key) is not None]
    if found == ["instruction", "input"]:  # Alpaca: `input` is what the instruction is about
        return "instruction"
    if len(found) > 1:
        raise UserError(
            f"{where}: {' and '.join(map(repr, found))} could each be the prompt; name one with prompt_key, or rename it to 'prompt'"
        )
    return found[0] if found else None


def full_prompt(record: Mapping[str, Any], key: str, value: TextOrMessages, where: str) -> TextOrMessages:
    """The prompt with what other columns add to it: Alpaca's `input` behind an `instruction`, a `system` message before it."""
    about = record.get("input")
    if key == "instruction" and isinstance(value, str) and isinstance(about, str) and about.strip():
        value = f"{value}\n{about}"
    system = record.get("system")
    if not _is_given(system):
        return value
    if not isinstance(system, str):
        raise UserError(f"{where}: column 'system' should be text, got {_short_repr(system)}")
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
    found = [key for key in COMPLETION_COLUMNS if record.get(key) is not None]
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


def normalize_message(value: Mapping[str, Any], where: str) -> Message:
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
    return next((key for key in LIKELY_ANSWER_COLUMNS if _is_given(columns.get(key))), None)


def _short_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


VERL_MODEL_STYLE = "model"
"""verl's `reward_model.style` of rows that a reward model scores."""
TOOLS_IN_SUPERVISED_DATA = (
    "which supervised data does not give to the model: leave such rows out, or render the tools into a system message"
)
ROLE = re.compile(r"[\w-]+")


def source_name(source: Source) -> str:
    """What a source is called in row ids: its `name`, or its file, task or function."""
    if source.name is not None:
        return source.name
    if source.plugin is not None:
        return source.plugin.rpartition(":")[2]
    return source.task or Path(source.path or "").name


def refuse_weights(sources: list[Source], use: str) -> None:
    """Weights divide training draws; where every row is used once they would be ignored, so they are errors."""
    for source in sources:
        if source.weight != 1.0:
            raise UserError(f"{source_name(source)}: weight={source.weight} has no effect on {use}; leave it out")


def read_rows(source: Source, base: Path | None = None) -> list[Row]:
    """All rows of a file or plug-in source, for rollouts."""
    located = enumerate(source_records(source, base))
    return [prompt_row(record, where, source, index) for index, (where, record) in located]


def read_supervised_rows(source: Source, base: Path | None = None) -> list[tuple[str, Row]]:
    """All rows of a file or plug-in source, for supervised training, each with its place."""
    located = enumerate(source_records(source, base))
    return [(where, supervised_row(record, where, source, index)) for index, (where, record) in located]


def source_records(source: Source, base: Path | None) -> Iterator[LocatedRecord]:
    """The records of a file or plug-in source, at most `limit` of them; none at all is an error."""
    located = read_records(source.path, base) if source.path is not None else _plugin_records(source, base)
    located = _supported_records(located)
    if source.shape is not None:
        from burnish.data.published_datasets import (
            read_shaped_records,  # the shapes of puzzles know the tasks, which know rows
        )

        located = read_shaped_records(located, source.shape, source.split)
    num_records = 0
    for num_records, item in enumerate(located, start=1):
        yield item
        if num_records == source.limit:
            return
    if num_records == 0:
        raise UserError(f"{source.path or source.plugin} holds no rows")


def _supported_records(located: Iterator[LocatedRecord]) -> Iterator[LocatedRecord]:
    """The records, none of which has a column that changes its meaning and would be ignored."""
    for where, record in located:
        refuse_unsupported_columns(record, where)
        yield where, record


def _plugin_records(source: Source, base: Path | None) -> Iterator[LocatedRecord]:
    spec = source.plugin or ""
    function = load_plugin(spec, base)
    if not callable(function):
        raise UserError(f"data source {spec!r} is not a function")
    check_options(function, source.options, f"data source {spec!r}")
    records = function(**source.options)
    if not isinstance(records, Iterable):
        raise UserError(f"data source {spec!r} returned {type(records).__name__}; expected an iterable of dictionaries")
    for number, record in enumerate(records, start=1):
        where = f"{spec}, row {number}"
        if not isinstance(record, dict):
            raise UserError(f"{where}: expected a dictionary of columns, got {type(record).__name__}")
        yield where, record


def prompt_row(record: Record, where: str, source: Source, index: int) -> Row:
    """A row for rollouts, from any of the three shapes."""
    identity = f"{source_name(source)}/{index}"
    data_source = record.get("data_source") or source_name(source)
    if not isinstance(data_source, str):
        raise UserError(f"{where}: data_source should be text, got {type(data_source).__name__}")
    key = "prompt" if "prompt" in record else question_column(record, where, source.prompt_key)
    if key is None:
        raise _missing(source.prompt_key, record, where, "prompt_key")
    prompt = full_prompt(record, key, text_or_messages(record[key], key, where), where)
    rest = {k: v for k, v in record.items() if k not in (key, "data_source")}
    if "prompt" in record and "reward_model" in record:
        info = record.get("extra_info") or {}
        if not isinstance(info, dict):
            raise UserError(f"{where}: extra_info should be an object, got {type(info).__name__}")
        others = {k: v for k, v in rest.items() if k not in ("reward_model", "extra_info")}
        style, answer = _verl_reward(record, where)
        return Row(
            identity, prompt, data_source, answer, {**others, **info}, nested=tuple(info), style=style, where=where
        )
    if source.answer_key != "answer" and source.answer_key not in record:
        raise _missing(source.answer_key, record, where, "answer_key")
    # The answer's column stays in extra of a TRL row too: a reward function of TRL takes its columns by their own names.
    extra = rest if key == "prompt" else {k: v for k, v in rest.items() if k != source.answer_key}
    return Row(identity, prompt, data_source, rest.get(source.answer_key), extra, where=where)


def supervised_row(record: Record, where: str, source: Source, index: int) -> Row:
    """A row to imitate: a prompt with a completion, messages with at least one assistant turn, or a text."""
    name = source_name(source)
    identity = f"{name}/{index}"
    refuse_tools(record, where, TOOLS_IN_SUPERVISED_DATA)
    for key in ("messages", "conversations"):
        if key in record:
            messages = checked_messages(record[key], key, where)
            if not any(m["role"] == "assistant" for m in messages):
                raise UserError(f"{where}: {key} has no assistant turn, so there is nothing to learn from it")
            said = full_prompt(record, key, messages, where)
            assert isinstance(said, list)
            return Row(identity, [], name, None, {}, messages=said, where=where)
    if "prompt" in record or "text" not in record:
        prompt, completion = prompt_and_completion(record, where)
        return Row(identity, prompt, name, None, {}, completion=completion, where=where)
    text = record["text"]
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{where}: text should be a text to learn, got {_typed_repr(text)}")
    return Row(identity, [], name, None, {}, text=text, where=where)


def prompt_and_completion(record: Record, where: str) -> tuple[str | list[Message], str | list[Message]]:
    """What is asked and what is answered, under any of the names of `data/row_formats.py`."""
    key = "prompt" if "prompt" in record else question_column(record, where, "question")
    said = completion_column(record, where)
    if key is None or said is None:
        missing = "prompt" if key is None else "completion"
        raise UserError(
            f"{where}: no column {missing!r}; supervised rows need prompt and completion, question and response, messages, or text "
            f"(has: {', '.join(map(str, record))})"
        )
    prompt = full_prompt(record, key, text_or_messages(record[key], key, where), where)
    return prompt, text_or_messages(record[said], said, where)


def _verl_reward(record: Record, where: str) -> tuple[str | None, Any]:
    """Who scores a row of verl's, and its expected answer; a row that a model scores may have none."""
    reward_model = record["reward_model"]
    if isinstance(reward_model, dict) and reward_model.get("style") == VERL_MODEL_STYLE:
        return VERL_MODEL_STYLE, reward_model.get("ground_truth")
    if not isinstance(reward_model, dict) or reward_model.get("ground_truth") is None:
        raise UserError(f"{where}: reward_model should be an object with ground_truth, got {_typed_repr(reward_model)}")
    style = reward_model.get("style")
    return None if style is None else str(style), reward_model["ground_truth"]


def text_or_messages(value: Any, key: str, where: str) -> str | list[Message]:
    """A column that holds text or messages, as either; anything else is an error that names its place."""
    if isinstance(value, str):
        if not value.strip():
            raise UserError(f"{where}: {key} is empty")
        return checked_text(value, f"{where}: {key}")
    if isinstance(value, list):
        return checked_messages(value, key, where)
    raise UserError(f"{where}: {key} should be text or a list of messages, got {_typed_repr(value)}")


def checked_messages(value: Any, key: str, where: str) -> list[Message]:
    """A column that holds messages: role and content each, and something said."""
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: {key} should be a list of messages, got {_typed_repr(value)}")
    messages = [_message(m, f"{where}: {key}[{i}]") for i, m in enumerate(value)]
    if not any(str(m["content"]).strip() or "tool_calls" in m for m in messages):
        raise UserError(f"{where}: {key} is empty: no message has any content")
    return messages


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise UserError(f"{where} should be an object with role and content, got {_typed_repr(value)}")
    message = normalize_message(value, where)
    if "tool_calls" in message:
        message.setdefault("content", "")
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            raise UserError(f"{where}.{key} should be text, got {_typed_repr(value.get(key))}")
    checked_text(message["content"], f"{where}.content")
    if not ROLE.fullmatch(message["role"]):  # templates write it between their own control characters
        raise UserError(f"{where}.role should be a word such as user or assistant, got {_typed_repr(message['role'])}")
    return message


def checked_text(text: str, where: str) -> str:
    """A text of whole characters; half of a surrogate pair (`\\ud800` in JSON) is none and cannot be tokenised or saved."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise UserError(
            f"{where} has half of a surrogate pair ({half!r}) at character {error.start + 1}; remove it"
        ) from error
    return text


def _missing(key: str, record: Record, where: str, option: str) -> UserError:
    return UserError(
        f"{where}: no column {key!r}{did_you_mean(key, map(str, record))} (has: {', '.join(map(str, record))}). "
        f"A row needs `prompt`, or one of {', '.join(QUESTION_COLUMNS)}, or a column that prompt_key names; answer_key names the "
        f"column of the answer. Set {option} of this source"
    )


def _typed_repr(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
