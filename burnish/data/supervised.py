"""Examples for supervised training: tokens, and a mask of the tokens to train on.

Only the assistant's text is trained on: a completion with its end token, or each assistant turn of a conversation with its end-of-turn
token. A context is tokenised separately from the text after it, exactly as at rollout time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from burnish.config.data import Source, Template
from burnish.config.errors import UserError
from burnish.core.pictures import PictureSpan, shifted
from burnish.core.random_keys import permutation
from burnish.data.row import Message, Row
from burnish.data.row_formats import read_supervised_rows, refuse_weights, source_name, supervised_row
from burnish.data.tasks.registry import make_demonstrations
from burnish.data.template import (
    PROMPT_PLACEHOLDER,
    as_messages,
    check_all_placed,
    literal_content,
    media_for,
    place_pictures,
    plain_text,
    prerendered_text,
    template_kind,
    with_system,
)
from burnish.models.tokenizer import Tokenizer

SUPERVISED_COLUMNS = "supervised rows, whose columns have fixed names (docs/data.md)"


class Encoded(NamedTuple):
    """The tokens of a supervised row, which of them to train on, and the images among them."""

    tokens: list[int]
    mask: list[bool]
    pictures: tuple[PictureSpan, ...] = ()


@dataclass(frozen=True)
class Example:
    """One sequence; `mask` marks the tokens to train on, and `pictures` are the images among them."""

    id: str
    tokens: list[int]
    mask: list[bool]
    pictures: tuple[PictureSpan, ...] = ()


def load_examples(
    sources: list[Source],
    tokenizer: Tokenizer,
    template: Template,
    max_tokens: int,
    overlong: Literal["filter", "error"],
    base: Path | None = None,
    seed: int = 0,
) -> tuple[list[Example], int]:
    """Load all examples of the sources, in order; also return how many were left out as over-long."""
    refuse_weights(sources, "supervised data, which is used whole")
    refuse_column_keys(sources, SUPERVISED_COLUMNS)
    examples: list[Example] = []
    num_filtered = 0
    for where, row in itertools.chain.from_iterable(_rows(source, base, seed) for source in sources):
        try:
            encoded = encode_example(row, tokenizer, template)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        if len(encoded.tokens) <= max_tokens:
            examples.append(Example(row.id, *encoded))
        elif overlong == "filter":
            num_filtered += 1
        else:
            raise UserError(
                f"{where}: {len(encoded.tokens)} tokens, more than max_tokens={max_tokens}; raise it, or set overlong=filter"
            )
    if not examples:
        names = ", ".join(source_name(source) for source in sources)
        raise UserError(
            f"no examples left in {names or 'no source at all'}: {num_filtered} are longer than {max_tokens} tokens"
        )
    return examples, num_filtered


def count_examples(sources: list[Source], base: Path | None, seed: int) -> int:
    """Count the rows of the sources, and check each as far as that is possible without a tokenizer."""
    refuse_weights(sources, "supervised data, which is used whole")
    refuse_column_keys(sources, SUPERVISED_COLUMNS)
    return sum(1 for source in sources for _ in _rows(source, base, seed))


def refuse_column_keys(sources: list[Source], rows: str) -> None:
    """Raise a UserError for prompt_key or answer_key where columns have fixed names, so that the keys would be ignored."""
    for source in sources:
        if (source.prompt_key, source.answer_key) != ("question", "answer"):
            raise UserError(
                f"{source_name(source)}: prompt_key and answer_key have no effect on {rows}; rename the columns of the file"
            )


def example_order(size: int, seed: int, num_draws: int, stream: str = "sft") -> list[int]:
    """Indices of the examples in training order: shuffled epochs that depend on the seed and `stream`, the kind of training."""
    epochs = (permutation(size, seed, stream, epoch) for epoch in range(-(-num_draws // size)))
    return list(itertools.chain.from_iterable(epochs))[:num_draws]


def encode_example(row: Row, tokenizer: Tokenizer, template: Template) -> Encoded:
    """The tokens of a supervised row, and the mask of those to train on."""
    if row.text is not None:
        return _encode_text(row, row.text, tokenizer, template)
    kind = template_kind(tokenizer, template)
    if template.prerendered:
        return _encode_prerendered(row, tokenizer)
    if row.messages is not None:
        if kind == "plain":
            raise UserError("a row of messages needs a chat template; with a plain template give prompt and completion")
        return _encode_turns(row, row.messages, 0, tokenizer, template)
    if row.completion is None:
        raise UserError(f"row {row.id} has neither a completion nor messages")
    if kind == "chat":
        prompt, completion = as_messages(row.prompt, "user"), as_messages(row.completion, "assistant")
        return _encode_turns(row, prompt + completion, len(prompt), tokenizer, template)
    return _encode_plain(row, as_messages(row.completion, "assistant"), tokenizer, template)


def _encode_text(row: Row, text: str, tokenizer: Tokenizer, template: Template) -> Encoded:
    """Encode a text without a template. All of it is trained on, or only the completion if the row has one."""
    unused = [key for key in ("system", "kwargs") if getattr(template, key)] + ["text"] * (
        template.text != PROMPT_PLACEHOLDER
    )
    if unused:
        raise UserError(
            f"template.{unused[0]} has no effect on whole texts, which no template changes; give prompts and answers in separate columns"
        )
    completion = prerendered_text(row.completion or "", "completion")
    if not template.prerendered and tokenizer.literal(text + completion) != text + completion:
        raise UserError(
            "the text contains the name of a control token, such as the end of a turn: set template.kind=prerendered if a chat template "
            "rendered it, or give prompt and answer in separate columns, where such a name is plain text"
        )
    tokens = tokenizer.encode_prerendered(text) if template.prerendered else tokenizer.encode(text, special=True)
    if row.completion is None:
        tokens = _with_end_token(tokens, tokenizer)
        return Encoded(
            tokens, [False] + [True] * (len(tokens) - 1)
        )  # the first token has no context to be predicted from
    answer_tokens = _with_end_token(tokenizer.encode(completion), tokenizer)
    return Encoded(tokens + answer_tokens, [False] * len(tokens) + [True] * len(answer_tokens))


def _encode_prerendered(row: Row, tokenizer: Tokenizer) -> Encoded:
    """Encode prerendered texts: control tokens are parsed, and the end token is added if it is missing."""
    if row.messages is not None or row.completion is None:
        raise UserError("template.kind=prerendered needs rows of prompt and completion, both texts")
    context = tokenizer.encode_prerendered(prerendered_text(row.prompt, "prompt"))
    answer_tokens = _with_end_token(tokenizer.encode(prerendered_text(row.completion, "completion")), tokenizer)
    return Encoded(context + answer_tokens, [False] * len(context) + [True] * len(answer_tokens))


def _encode_plain(row: Row, turns: list[Message], tokenizer: Tokenizer, template: Template) -> Encoded:
    """Encode turns without a chat template: each assistant turn ends with the end token; other turns are plain text.

    Each text is tokenised by itself, as environments do. Text after the last assistant turn is left out.
    """
    media = media_for(as_messages(row.prompt, "user"), tokenizer)
    tokens = tokenizer.encode(plain_text(row.prompt, template, tokenizer), special=True)
    waiting = iter(media)
    tokens, pictures = place_pictures(tokens, waiting, tokenizer)
    check_all_placed(waiting, len(media))
    mask = [False] * len(tokens)
    last = max((i for i, message in enumerate(turns) if message["role"] == "assistant"), default=None)
    if last is None:
        raise UserError(f"row {row.id}: no assistant turn to learn from")
    for message in turns[: last + 1]:
        is_assistant = message["role"] == "assistant"
        waiting = iter(media_for([message], tokenizer))
        part, more = place_pictures(
            tokenizer.encode(literal_content(message["content"], tokenizer)), waiting, tokenizer
        )
        part = part + ([_end_token(tokenizer)] if is_assistant else [])
        pictures += shifted(more, len(tokens))
        tokens += part
        mask += [is_assistant] * len(part)
    return Encoded(tokens, mask, pictures)


def _encode_turns(row: Row, turns: list[Message], start: int, tokenizer: Tokenizer, template: Template) -> Encoded:
    """Encode a conversation; assistant turns from index `start` on are trained on.

    The template renders every prefix of the conversation. Each must be a prefix of the next one; otherwise the tokens of a turn could not
    be determined. Text after the last trained turn is left out.
    """
    messages = with_system(turns, template)
    first = start + len(messages) - len(turns)
    tokens: list[int] = []
    mask: list[bool] = []
    pictures: list[PictureSpan] = []
    rendered = ""
    trained_turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first]
    if not trained_turns:
        raise UserError(f"row {row.id}: no assistant turn to learn from")
    media = media_for(messages[: trained_turns[-1] + 1], tokenizer)
    waiting = iter(media)
    for i in trained_turns:
        with_prompt = tokenizer.chat_text(messages[:i], **template.kwargs)
        with_answer = tokenizer.chat_text(messages[: i + 1], add_generation_prompt=False, **template.kwargs)
        if not (with_prompt.startswith(rendered) and with_answer.startswith(with_prompt)):
            raise UserError(
                f"row {row.id}: the chat template rewrites earlier text when turn {i + 1} is added, so the assistant's "
                "text cannot be told from the rest; give each turn as a row of its own with prompt and completion"
            )
        context, more = place_pictures(tokenizer.encode(with_prompt[len(rendered) :]), waiting, tokenizer)
        pictures += shifted(more, len(tokens))
        answer_tokens = tokenizer.encode(with_answer[len(with_prompt) :])
        num_trained = _up_to_end_of_turn(answer_tokens, tokenizer)
        if num_trained == 0:
            if i == trained_turns[-1]:
                answer_tokens.append(_end_token(tokenizer))
            num_trained = len(answer_tokens)
        tokens += context + answer_tokens
        mask += [False] * len(context) + [True] * num_trained + [False] * (len(answer_tokens) - num_trained)
        rendered = with_answer
    check_all_placed(waiting, len(media))
    return Encoded(tokens, mask, tuple(pictures))


def _up_to_end_of_turn(answer_tokens: list[int], tokenizer: Tokenizer) -> int:
    """Number of tokens up to the end-of-turn token, which is the turn's last special token; 0 if there is none.

    Text that a template writes after it (a line break in ChatML) is never sampled, so it is not trained on.
    """
    return max((i + 1 for i, token in enumerate(answer_tokens) if tokenizer.is_special(token)), default=0)


def _with_end_token(tokens: list[int], tokenizer: Tokenizer) -> list[int]:
    """The tokens of a whole rendered text, with the end token added if it is missing."""
    return tokens if tokens and tokens[-1] in tokenizer.eos_ids else [*tokens, _end_token(tokenizer)]


def _end_token(tokenizer: Tokenizer) -> int:
    if not tokenizer.eos_ids:
        raise UserError("this tokenizer has no end-of-text token, so a model could never learn to stop")
    return tokenizer.eos_ids[0]


def _rows(source: Source, base: Path | None, seed: int) -> Iterator[tuple[str, Row]]:
    """The supervised rows of a source, each with its place. A task gives its demonstrations."""
    if source.task is None:
        yield from read_supervised_rows(source, base)
        return
    for index, (where, record) in enumerate(task_demonstrations(source, seed)):
        yield where, supervised_row(record, where, source, index)


def task_demonstrations(source: Source, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The demonstrations of a task, each with its place."""
    assert source.task is not None
    if source.split == "test":
        raise UserError(f"task {source.task!r}: demonstrations come from the train split only; remove split")
    for index, record in enumerate(make_demonstrations(source.task, source.options, seed)[: source.limit]):
        yield f"{source.task}, demonstration {index + 1}", record
