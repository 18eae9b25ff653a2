"""One row of data, whatever shape it came in.

Three shapes are recognised by their columns: verl's (`prompt`, `reward_model.ground_truth`, `data_source`,
`extra_info`), TRL's (`prompt`, every other column for the reward) and plain ones (a question and an answer under
names from the config). Supervised rows have `prompt` and `completion`, or `messages`. A row that does not fit is an
error that names its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.config.errors import UserError, nearest
from burnish.config.plugins import check_options, load_plugin
from burnish.data.files import Located, Record, read_records

if TYPE_CHECKING:  # reward workers import this module for Row alone, and should not pay for the schema
    from burnish.config.data import Source

Message = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A prompt with what is needed to score its answer.

    `id` is `<source name>/<index in the source>`: the same for every run over the same data, because sampling
    randomness is keyed by it. `extra` holds every other column.
    """

    id: str
    prompt: str | list[Message]
    data_source: str
    answer: Any
    extra: dict[str, Any] = field(default_factory=dict)
    completion: str | list[Message] | None = None
    messages: list[Message] | None = None
    nested: tuple[str, ...] = ()
    """Keys of `extra` that stood inside verl's `extra_info`: they are no columns of the row."""


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
    located = enumerate(records_of(source, base))
    return [prompt_row(record, where, source, index) for index, (where, record) in located]


def read_supervised_rows(source: Source, base: Path | None = None) -> list[tuple[str, Row]]:
    """All rows of a file or plug-in source, for supervised training, each with its place."""
    located = enumerate(records_of(source, base))
    return [(where, supervised_row(record, where, source, index)) for index, (where, record) in located]


def records_of(source: Source, base: Path | None) -> Iterator[Located]:
    """The records of a file or plug-in source, at most `limit` of them; none at all is an error."""
    located = read_records(source.path, base) if source.path is not None else _plugin_records(source, base)
    if source.shape is not None:
        from burnish.data.shapes import shaped_records  # the shapes of puzzles know the tasks, which know rows

        located = shaped_records(located, source.shape, source.split)
    num_records = 0
    for num_records, item in enumerate(located, start=1):
        yield item
        if num_records == source.limit:
            return
    if num_records == 0:
        raise UserError(f"{source.path or source.plugin} holds no rows")


def _plugin_records(source: Source, base: Path | None) -> Iterator[Located]:
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
    rest = {k: v for k, v in record.items() if k not in ("prompt", "data_source")}
    if "prompt" in record and "reward_model" in record:
        answer = _ground_truth(record, where)
        info = record.get("extra_info") or {}
        if not isinstance(info, dict):
            raise UserError(f"{where}: extra_info should be an object, got {type(info).__name__}")
        others = {k: v for k, v in rest.items() if k not in ("reward_model", "extra_info")}
        return Row(
            identity,
            text_or_messages(record["prompt"], "prompt", where),
            data_source,
            answer,
            {**others, **info},
            nested=tuple(info),
        )
    if "prompt" in record:
        # The answer's column stays in extra too: a TRL reward function takes its columns by their own names.
        return Row(
            identity,
            text_or_messages(record["prompt"], "prompt", where),
            data_source,
            rest.get(source.answer_key),
            rest,
        )
    question, answer_key = source.prompt_key, source.answer_key
    for key in (question, answer_key):
        if key not in record:
            raise _missing(key, record, where, "prompt_key" if key == question else "answer_key")
    if record[answer_key] is None:
        raise UserError(f"{where}: {answer_key} is null; expected the answer")
    extra = {k: v for k, v in rest.items() if k not in (question, answer_key)}
    return Row(identity, text_or_messages(record[question], question, where), data_source, record[answer_key], extra)


def supervised_row(record: Record, where: str, source: Source, index: int) -> Row:
    """A row to imitate: `prompt` with `completion`, or `messages` with at least one assistant turn."""
    name = source_name(source)
    identity = f"{name}/{index}"
    if "messages" in record:
        messages = checked_messages(record["messages"], "messages", where)
        if not any(m["role"] == "assistant" for m in messages):
            raise UserError(f"{where}: messages has no assistant turn, so there is nothing to learn from it")
        return Row(identity, [], name, None, {}, messages=messages)
    for key in ("prompt", "completion"):
        if key not in record:
            raise UserError(
                f"{where}: no column {key!r}; supervised rows need prompt and completion, or messages "
                f"(has: {', '.join(map(str, record))})"
            )
    prompt = text_or_messages(record["prompt"], "prompt", where)
    return Row(identity, prompt, name, None, {}, completion=text_or_messages(record["completion"], "completion", where))


def _ground_truth(record: Record, where: str) -> Any:
    reward_model = record["reward_model"]
    if not isinstance(reward_model, dict) or reward_model.get("ground_truth") is None:
        raise UserError(f"{where}: reward_model should be an object with ground_truth, got {_short(reward_model)}")
    return reward_model["ground_truth"]


def text_or_messages(value: Any, key: str, where: str) -> str | list[Message]:
    """A column that holds text or messages, as either; anything else is an error that names its place."""
    if isinstance(value, str):
        if not value.strip():
            raise UserError(f"{where}: {key} is empty")
        return value
    if isinstance(value, list):
        return checked_messages(value, key, where)
    raise UserError(f"{where}: {key} should be text or a list of messages, got {_short(value)}")


def checked_messages(value: Any, key: str, where: str) -> list[Message]:
    """A column that holds messages: role and content each, and something said."""
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: {key} should be a list of messages, got {_short(value)}")
    messages = [_message(m, f"{where}: {key}[{i}]") for i, m in enumerate(value)]
    if not any(str(m["content"]).strip() or "tool_calls" in m for m in messages):
        raise UserError(f"{where}: {key} is empty: no message has any content")
    return messages


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise UserError(f"{where} should be an object with role and content, got {_short(value)}")
    # Parquet gives every struct every field; a null one was never there.
    message = {k: v for k, v in value.items() if v is not None}
    if "tool_calls" in message:
        message.setdefault("content", "")
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            raise UserError(f"{where}.{key} should be text, got {_short(value.get(key))}")
    return message


def _missing(key: str, record: Record, where: str, option: str) -> UserError:
    return UserError(
        f"{where}: no column {key!r}{nearest(key, map(str, record))} (has: {', '.join(map(str, record))}). "
        f"A row needs `prompt`, or a question and an answer whose columns are named by prompt_key and answer_key; "
        f"set {option} of this source"
    )


def _short(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
