"""One row of data, whatever shape it came in.

Three shapes are recognised by their columns: verl's (`prompt`, `reward_model.ground_truth`, `data_source`,
`extra_info`), TRL's (`prompt`, every other column for the reward) and plain ones (a question and an answer under
names from the config, or under one of the names in `data/columns.py`). Supervised rows have `prompt` and `completion`,
`messages`, or `text`. A row that does not fit is an error that names its place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.config.errors import UserError, nearest
from burnish.config.plugins import check_options, load_plugin
from burnish.data import columns
from burnish.data.columns import Message
from burnish.data.files import Located, Record, read_records

if TYPE_CHECKING:  # reward workers import this module for Row alone, and should not pay for the schema
    from burnish.config.data import Source

VERL_MODEL = "model"
"""verl's `reward_model.style` of rows that a reward model scores."""
NO_TOOLS = (
    "which supervised data does not give to the model: leave such rows out, or render the tools into a system message"
)
ROLE = re.compile(r"[\w-]+")


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
    text: str | None = None
    """A text that stands as it is, without a template: all of it is learnt, or what `completion` adds to it."""
    style: str | None = None
    """verl's `reward_model.style`: who scores the row."""
    where: str = field(default="", compare=False)
    """The file and line it was read from."""

    @property
    def place(self) -> str:
        """Where to look for the row."""
        return self.where or f"row {self.id!r} of {self.data_source!r}"


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
    located = _readable(located)
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


def _readable(located: Iterator[Located]) -> Iterator[Located]:
    """The records, none of which has a column that changes its meaning and would be ignored."""
    for where, record in located:
        columns.refuse_unread(record, where)
        yield where, record


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
    key = "prompt" if "prompt" in record else columns.question_column(record, where, source.prompt_key)
    if key is None:
        raise _missing(source.prompt_key, record, where, "prompt_key")
    prompt = columns.asked(record, key, text_or_messages(record[key], key, where), where)
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
    columns.refuse_tools(record, where, NO_TOOLS)
    for key in ("messages", "conversations"):
        if key in record:
            messages = checked_messages(record[key], key, where)
            if not any(m["role"] == "assistant" for m in messages):
                raise UserError(f"{where}: {key} has no assistant turn, so there is nothing to learn from it")
            said = columns.asked(record, key, messages, where)
            assert isinstance(said, list)
            return Row(identity, [], name, None, {}, messages=said, where=where)
    if "prompt" in record or "text" not in record:
        prompt, completion = prompt_and_completion(record, where)
        return Row(identity, prompt, name, None, {}, completion=completion, where=where)
    text = record["text"]
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{where}: text should be a text to learn, got {_short(text)}")
    return Row(identity, [], name, None, {}, text=text, where=where)


def prompt_and_completion(record: Record, where: str) -> tuple[str | list[Message], str | list[Message]]:
    """What is asked and what is answered, under any of the names of `data/columns.py`."""
    key = "prompt" if "prompt" in record else columns.question_column(record, where, "question")
    said = columns.completion_column(record, where)
    if key is None or said is None:
        missing = "prompt" if key is None else "completion"
        raise UserError(
            f"{where}: no column {missing!r}; supervised rows need prompt and completion, question and response, messages, or text "
            f"(has: {', '.join(map(str, record))})"
        )
    prompt = columns.asked(record, key, text_or_messages(record[key], key, where), where)
    return prompt, text_or_messages(record[said], said, where)


def _verl_reward(record: Record, where: str) -> tuple[str | None, Any]:
    """Who scores a row of verl's, and its expected answer; a row that a model scores may have none."""
    reward_model = record["reward_model"]
    if isinstance(reward_model, dict) and reward_model.get("style") == VERL_MODEL:
        return VERL_MODEL, reward_model.get("ground_truth")
    if not isinstance(reward_model, dict) or reward_model.get("ground_truth") is None:
        raise UserError(f"{where}: reward_model should be an object with ground_truth, got {_short(reward_model)}")
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
    message = columns.plain_message(value, where)
    if "tool_calls" in message:
        message.setdefault("content", "")
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            raise UserError(f"{where}.{key} should be text, got {_short(value.get(key))}")
    checked_text(message["content"], f"{where}.content")
    if not ROLE.fullmatch(message["role"]):  # templates write it between their own control characters
        raise UserError(f"{where}.role should be a word such as user or assistant, got {_short(message['role'])}")
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
        f"{where}: no column {key!r}{nearest(key, map(str, record))} (has: {', '.join(map(str, record))}). "
        f"A row needs `prompt`, or one of {', '.join(columns.QUESTIONS)}, or a column that prompt_key names; answer_key names the "
        f"column of the answer. Set {option} of this source"
    )


def _short(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
