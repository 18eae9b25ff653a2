"""Reads rows in the formats of verl, TRL, OpenRLHF, ShareGPT, Alpaca and plain files.

Rows for rollouts come in four formats, recognised by their columns: verl's (`prompt`, `reward_model.ground_truth`, `data_source`,
`extra_info`), TRL's (`prompt`; every other column is for the reward), plain ones (a question and an answer, under the names in the
config or in `QUESTION_COLUMNS`), and conversations (`CONVERSATION_COLUMNS`). Supervised rows have `prompt` and `completion`, `messages`,
or `text`. A row that does not fit is an error that names its file and line.

A column may change what the model should read or how its answer is scored. A column of that kind that burnish does not use must not be
dropped silently, because the run would train on something else. It is an error if it has a value. Null, false and empty values are
ignored, because parquet gives every row every column. docs/data.md has the whole table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.config.errors import UserError, did_you_mean
from burnish.config.plugins import check_options, load_plugin
from burnish.data.files import LocatedRecord, Record, find_files, read_records
from burnish.data.images import content_text, with_text
from burnish.data.media_columns import inline_media
from burnish.data.published_datasets import get_shape, read_shaped_records
from burnish.data.row import (
    VERL_MODEL_STYLE,
    Message,
    Row,
    TextOrMessages,
    _is_given,
    checked_messages,
    short_repr,
    text_or_messages,
    typed_repr,
)

if TYPE_CHECKING:
    from burnish.config.data import Source

QUESTION_COLUMNS = ("question", "problem", "query", "instruction", "input")
"""Columns that may hold the prompt of a row without `prompt`."""
CONVERSATION_COLUMNS = ("conversations", "messages", "context_messages")
"""Columns that may hold the prompt of a row as a conversation (ShareGPT, OpenAI, OpenRLHF)."""
COMPLETION_COLUMNS = ("completion", "response", "output")
"""Columns that may hold the completion of supervised rows and labelled answers."""

AUDIO_COLUMNS = ("audios", "audio")
"""Inputs that burnish does not read (verl, TRL). If they were dropped, the model would read the literal `<audio>`."""
TEMPLATE_ARGUMENTS = ("chat_template_kwargs", "enable_thinking")
"""Chat template arguments of a single row (TRL, verl)."""
AGENT_COLUMNS = ("tools", "agent_name", "tools_kwargs", "need_tools_kwargs", "interaction_kwargs")
"""Tools and agents of a single row (verl, TRL, ShareGPT), which an environment may read."""
SINGLE_ANSWER_AGENTS = {"agent_name": ("single_turn_agent",)}
"""Values of these columns that ask for one plain answer."""
NO_TOOL_ENVIRONMENT = "and environment=single_turn gives the model neither: name an environment that does (docs/environments.md), or leave such rows out"
TOOLS_IN_SUPERVISED_DATA = (
    "which supervised data does not give to the model: leave such rows out, or render the tools into a system message"
)


def source_name(source: Source) -> str:
    """The name of a source in row ids: its `name`, or its file, task or function."""
    if source.name is not None:
        return source.name
    if source.plugin is not None:
        return source.plugin.rpartition(":")[2]
    return source.task or Path(source.path or "").name


def refuse_weights(sources: list[Source], use: str) -> None:
    """Raise a UserError for weights that would be ignored: they divide training draws, but here every row is used once."""
    for source in sources:
        if source.weight != 1.0:
            raise UserError(f"{source_name(source)}: weight={source.weight} has no effect on {use}; remove it")


def read_rows(source: Source, base: Path | None = None, left_out: Counter[str] | None = None) -> list[Row]:
    """Read all rows of a file or plug-in source, for rollouts.

    A row of a published data set whose answer cannot be used is an error, unless `left_out` counts it by reason.
    """
    located = enumerate(source_records(source, base, left_out))
    return [prompt_row(record, where, source, index) for index, (where, record) in located]


def read_supervised_rows(source: Source, base: Path | None = None) -> list[tuple[str, Row]]:
    """Read all rows of a file or plug-in source, for supervised training, each with its place."""
    located = enumerate(source_records(source, base))
    return [(where, supervised_row(record, where, source, index)) for index, (where, record) in located]


def source_records(source: Source, base: Path | None, left_out: Counter[str] | None = None) -> Iterator[LocatedRecord]:
    """Read the records of a file or plug-in source, at most `limit` of them. No record at all is an error."""
    header = () if source.shape is None else get_shape(source.shape).csv_header
    located = read_records(source.path, base, header) if source.path is not None else _plugin_records(source, base)
    located = _supported_records(located)
    if source.shape is not None:
        located = read_shaped_records(located, source.shape, source.split, left_out)
    num_records = 0
    folders = {str(file): file.parent for file in find_files(source.path, base)} if source.path is not None else {}
    prompts = prompt_columns(source)
    for num_records, (where, record) in enumerate(located, start=1):
        yield where, inline_media(record, prompts, where, _folder_of(where, folders, base))
        if num_records == source.limit:
            return
    if num_records == 0:
        unusable = f" that can be used: {reasons_text(left_out)}" if left_out else ""
        raise UserError(f"{source.path or source.plugin} holds no rows{unusable}")


def reasons_text(left_out: Counter[str]) -> str:
    """The reasons why rows were left out, with their numbers, the most frequent first."""
    return ", ".join(f"{count:,} {reason}" for reason, count in left_out.most_common())


def prompt_columns(source: Source) -> tuple[str, ...]:
    """Columns that may hold the prompt of a source's rows; of those that a row has, the first does."""
    return ("prompt", source.prompt_key, *QUESTION_COLUMNS, *CONVERSATION_COLUMNS)


def _folder_of(where: str, folders: Mapping[str, Path], base: Path | None) -> Path | None:
    """The folder that relative paths of images are tried from first: that of the record's data file, or of the recipe."""
    if len(folders) < 2:
        return next(iter(folders.values()), base)
    while where and where not in folders:  # a place begins with its file: `a.jsonl:3`, `a.parquet, row 2`
        where = max(where.rpartition(":")[0], where.rpartition(", ")[0], key=len)
    return folders.get(where, base)


def _supported_records(located: Iterator[LocatedRecord]) -> Iterator[LocatedRecord]:
    """The records; an unsupported column is an error."""
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
    """Convert a record in any of the four formats to a row for rollouts."""
    identity = f"{source_name(source)}/{index}"
    data_source = record.get("data_source") or source_name(source)
    if not isinstance(data_source, str):
        raise UserError(f"{where}: data_source should be text, got {type(data_source).__name__}")
    key = "prompt" if "prompt" in record else question_column(record, where, source.prompt_key)
    if key is None and source.prompt_key == QUESTION_COLUMNS[0]:
        key = next((name for name in CONVERSATION_COLUMNS if _is_given(record.get(name))), None)
    if key is None:
        raise _missing(source.prompt_key, record, where, "prompt_key")
    if key in CONVERSATION_COLUMNS:
        return _conversation_row(record, where, source, identity, data_source, key)
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
    # In a TRL row the answer's column also stays in `extra`: TRL reward functions take columns by their own names.
    extra = rest if key == "prompt" else {k: v for k, v in rest.items() if k != source.answer_key}
    return Row(identity, prompt, data_source, rest.get(source.answer_key), extra, where=where)


def _conversation_row(record: Record, where: str, source: Source, identity: str, data_source: str, key: str) -> Row:
    """A row whose prompt is a conversation up to its last user turn. The assistant's turn behind that is the expected answer."""
    if source.answer_key != "answer" and source.answer_key not in record:
        raise _missing(source.answer_key, record, where, "answer_key")
    messages = checked_messages(record[key], key, where)
    last = max((i for i, message in enumerate(messages) if message["role"] != "assistant"), default=-1)
    if last < 0:
        raise UserError(f"{where}: {key} has only turns of the assistant, so there is nothing to answer")
    prompt = full_prompt(record, key, messages[: last + 1], where)
    rest = {k: v for k, v in record.items() if k not in (key, "data_source")}
    said = "\n".join(content_text(message["content"]) for message in messages[last + 1 :])
    answer = rest.get(source.answer_key)
    return Row(identity, prompt, data_source, said or None if answer is None else answer, rest, where=where)


def supervised_row(record: Record, where: str, source: Source, index: int) -> Row:
    """Convert a record to a supervised row: a prompt with a completion, messages with an assistant turn, or a text."""
    name = source_name(source)
    identity = f"{name}/{index}"
    refuse_tools(record, where, TOOLS_IN_SUPERVISED_DATA)
    for key in ("messages", "conversations"):
        if key in record:
            messages = checked_messages(record[key], key, where)
            if not any(m["role"] == "assistant" for m in messages):
                raise UserError(f"{where}: {key} has no assistant turn, so there is nothing to train on")
            with_system = full_prompt(record, key, messages, where)
            assert isinstance(with_system, list)
            return Row(identity, [], name, None, {}, messages=with_system, where=where)
    if "prompt" in record or "text" not in record:
        prompt, completion = prompt_and_completion(record, where)
        return Row(identity, prompt, name, None, {}, completion=completion, where=where)
    text = record["text"]
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{where}: text should be a non-empty text, got {typed_repr(text)}")
    return Row(identity, [], name, None, {}, text=text, where=where)


def prompt_and_completion(record: Record, where: str) -> tuple[str | list[Message], str | list[Message]]:
    """The prompt and the completion of a record, under any of the known column names."""
    key = "prompt" if "prompt" in record else question_column(record, where, "question")
    completion_key = completion_column(record, where)
    if key is None or completion_key is None:
        missing = "prompt" if key is None else "completion"
        raise UserError(
            f"{where}: no column {missing!r}; supervised rows need prompt and completion, question and response, messages, or text "
            f"(has: {', '.join(map(str, record))})"
        )
    prompt = full_prompt(record, key, text_or_messages(record[key], key, where), where)
    return prompt, text_or_messages(record[completion_key], completion_key, where)


def _verl_reward(record: Record, where: str) -> tuple[str | None, Any]:
    """verl's `reward_model.style` and ground truth. A row that a model scores may have no ground truth."""
    reward_model = record["reward_model"]
    if isinstance(reward_model, dict) and reward_model.get("style") == VERL_MODEL_STYLE:
        return VERL_MODEL_STYLE, reward_model.get("ground_truth")
    if not isinstance(reward_model, dict) or reward_model.get("ground_truth") is None:
        raise UserError(f"{where}: reward_model should be an object with ground_truth, got {typed_repr(reward_model)}")
    style = reward_model.get("style")
    return None if style is None else str(style), reward_model["ground_truth"]


# --- columns ---------------------------------------------------------------------------------------------------------


def refuse_unsupported_columns(record: Mapping[str, Any], where: str) -> None:
    """Raise a UserError for a column that changes what the model should read and that burnish does not use."""
    for key in AUDIO_COLUMNS:
        if _is_given(record.get(key)):
            raise UserError(
                f"{where}: column {key!r} has a value, but burnish reads text, images and videos only: the model would read the "
                f"placeholder (such as <audio>) as text. Leave such rows out of the file, or remove the column if the text is enough"
            )
    for key in TEMPLATE_ARGUMENTS:
        if record.get(key) is not None and record[key] != {}:
            raise UserError(
                f"{where}: column {key!r} has chat template arguments for this row, but burnish has one set for all rows: "
                "set template.kwargs (in `burnish train`: data.template.kwargs) and remove the column"
            )


def refuse_tools(columns: Mapping[str, Any], where: str, use: str) -> None:
    """Raise a UserError for a row with tools or an agent that the model would not get; `use` says what to do about it."""
    for key in AGENT_COLUMNS:
        value = columns.get(key)
        if _is_given(value) and value not in SINGLE_ANSWER_AGENTS.get(key, ()):
            raise UserError(f"{where}: column {key!r} asks for tools or an agent ({short_repr(value)}), {use}")


def question_column(record: Mapping[str, Any], where: str, wanted: str) -> str | None:
    """The column of the prompt: the one the config names, else the only one of `QUESTION_COLUMNS`. Two are an error."""
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
    """The prompt with what other columns add: Alpaca's `input` after an `instruction`, and a `system` message before it."""
    about = record.get("input")
    if key == "instruction" and isinstance(about, str) and about.strip():
        # An instruction with images is a message.
        text = f"\n{about}"
        value = (
            value + text
            if isinstance(value, str)
            else [{**value[0], "content": with_text(value[0]["content"], text)}, *value[1:]]
        )
    system = record.get("system")
    if not _is_given(system):
        return value
    if not isinstance(system, str):
        raise UserError(f"{where}: column 'system' should be text, got {short_repr(system)}")
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if messages[0]["role"] == "system":
        raise UserError(
            f"{where}: column 'system' and the first message of {key!r} are both system messages; remove one of them"
        )
    return [{"role": "system", "content": system}, *messages]


def completion_column(record: Mapping[str, Any], where: str) -> str | None:
    """The column of the completion: `completion`, else the only one of `COMPLETION_COLUMNS`. Two are an error.

    In a row without `prompt` it may be `answer`, as in plain rows.
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


def _missing(key: str, record: Record, where: str, option: str) -> UserError:
    return UserError(
        f"{where}: no column {key!r}{did_you_mean(key, map(str, record))} (has: {', '.join(map(str, record))}). "
        f"A row needs `prompt`, or one of {', '.join(QUESTION_COLUMNS)}, or a column that prompt_key names; answer_key names the "
        f"column of the answer. Set {option} of this source"
    )
