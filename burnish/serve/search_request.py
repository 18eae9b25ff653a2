"""The field `strategy` of requests: a test-time scaling strategy with its options, checked, and the search that it describes.

A client may choose a strategy of burnish and a verifier that the server was started with. It cannot name code or files: plug-ins,
options of verifiers and the oracle are refused.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from burnish.config.data import Template
from burnish.config.errors import UserError, did_you_mean
from burnish.config.records import Plugin, Record
from burnish.core.engine import Request
from burnish.core.pictures import distinct_tokens
from burnish.core.random_keys import fold
from burnish.environments.dialogue import ChatRenderer
from burnish.evaluation.strategies.registry import load_strategy, strategy_needs, strategy_verifier
from burnish.evaluation.strategies.search import Question, Search
from burnish.evaluation.strategies.search_program import SearchProgram
from burnish.evaluation.strategies.solve_settings import DEFAULT_READER, READERS, check_strategy
from burnish.evaluation.strategies.spec import (
    LIKELIHOOD,
    SELF_CERTAINTY,
    STRATEGY_RECORDS,
    StrategyRecord,
    VerifierPart,
)
from burnish.evaluation.strategies.verifiers import check_steps
from burnish.gateway.openai_schema import ApiError, ChatRequest, CompletionRequest, bad_value
from burnish.serve.request_to_engine import MAX_SCORED_TOKENS, ServedModel, chat_messages
from burnish.serve.search_run import SearchVerifier

OF_THE_SEARCH = ("name", "budget", "answer")
"""Keys of `strategy` that are not options of one strategy."""
MAX_SEARCH_TOKENS = 2**20
"""Default of the most tokens that one search may sample."""
MAX_NODES = 8192
"""Most nodes of a search, which bounds its memory."""
MAX_NUMBER = 65_536
"""Largest integer among the options of a strategy: some are sizes of lists."""
MAX_TEXT = 4096
"""Most characters of a text among the options."""


@dataclass(frozen=True)
class SearchRequest:
    """What a request asks of a search."""

    strategy: StrategyRecord
    verifier: str | None
    """Name of the verifier; None if the strategy compares no scores."""
    budget: int
    """Most tokens that may be sampled."""
    kind: str
    """Name of the verifier that says where an answer is in a completion."""


def search_request(
    asked: CompletionRequest | ChatRequest, verifiers: Mapping[str, SearchVerifier], max_tokens: int
) -> SearchRequest | None:
    """Return the checked strategy of a request; None if it has none. `verifiers` are those that the server was started with."""
    if asked.strategy is None:
        return None
    _check_fields(asked)
    fields = {name: value for name, value in asked.strategy.items() if value is not None}
    strategy = _strategy(fields)
    _check_parts(strategy, verifiers)
    part = strategy_verifier(strategy)
    try:
        check_strategy(strategy, asked.temperature)
        if part is not None and part.name in verifiers:
            check_steps(strategy, verifiers[part.name].delimiter)
    except UserError as error:
        raise bad_value("strategy", str(error)) from error
    budget, kind = fields.get("budget", max_tokens), fields.get("answer", DEFAULT_READER)
    if type(budget) is not int or not 1 <= budget <= max_tokens:
        raise bad_value(
            "strategy.budget", f"expected a number of tokens from 1 to {max_tokens}, the limit of this server"
        )
    if kind not in READERS:
        raise bad_value("strategy.answer", f"expected how answers are read: one of {', '.join(READERS)}")
    return SearchRequest(strategy, None if part is None else part.name, budget, kind)


def _check_fields(asked: CompletionRequest | ChatRequest) -> None:
    """Raise for fields that have no meaning where a strategy chooses among samples."""
    reasons = {
        "n": asked.n > 1 and "a strategy returns the one answer it chose",
        "logprobs": (asked.logprobs is not None and asked.logprobs is not False)
        and "an answer may have tokens that the strategy wrote",
        "return_token_ids": asked.return_token_ids
        and "an answer may stand behind another prompt than that of the request",
    }
    if isinstance(asked, ChatRequest):
        reasons["tools"] = bool(asked.tools) and "a strategy answers in one turn, without tools"
    else:
        reasons["echo"] = asked.echo and "the prompt is not scored"
        reasons["prompt"] = len(asked.prompt) > 1 and "one prompt a request has a strategy; send several requests"
    for name, reason in reasons.items():
        if reason:
            raise bad_value(name, f"not with strategy: {reason}", "unsupported_parameter")


def _strategy(fields: Mapping[str, Any]) -> StrategyRecord:
    """Return the record of a strategy."""
    known = {record.model_fields["name"].default: record for record in STRATEGY_RECORDS}
    name = fields.get("name")
    if name is None:
        raise ApiError(
            400, "missing required parameter: strategy.name", param="strategy.name", code="missing_required_parameter"
        )
    if not isinstance(name, str) or name not in known:
        near = did_you_mean(name[:MAX_TEXT], known) if isinstance(name, str) else ""
        raise bad_value("strategy.name", f"there is no such strategy{near} (known: {', '.join(known)})")
    record = known[name]
    options = {key: value for key, value in fields.items() if key not in OF_THE_SEARCH}
    takes = [key for key in (*record.model_fields, *OF_THE_SEARCH[1:]) if key != "name"]
    if unknown := next((key for key in options if key not in record.model_fields), None):
        near = did_you_mean(unknown[:MAX_TEXT], takes)
        message = f"unknown parameter: strategy.{unknown}{near} ({name} takes {', '.join(takes)})"
        raise ApiError(400, message, param=f"strategy.{unknown}", code="unknown_parameter")
    _check_size(options, "strategy")
    try:
        return record.model_validate({"name": name, **options})
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(["strategy", *map(str, first["loc"])])
        raise bad_value(where, first["msg"].removeprefix("Value error, ")) from None


def _check_size(value: Any, where: str) -> None:
    """Raise for numbers and texts with which a strategy would need unbounded memory or time."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            _check_size(one, f"{where}.{name}")
    elif isinstance(value, list):
        for index, one in enumerate(value):
            _check_size(one, f"{where}[{index}]")
    elif isinstance(value, int | float) and abs(value) > MAX_NUMBER:
        raise bad_value(where, f"expected {MAX_NUMBER} at most")
    elif isinstance(value, str) and len(value) > MAX_TEXT:
        raise bad_value(where, f"expected {MAX_TEXT} characters at most")


def _check_parts(strategy: StrategyRecord, verifiers: Collection[str]) -> None:
    """Raise for verifiers that the server was not started with, options of verifiers, and plug-ins."""
    allowed = (LIKELIHOOD, SELF_CERTAINTY, *verifiers)
    for part in _records(strategy):
        if isinstance(part, Plugin):
            raise bad_value("strategy", "this server runs no code that a client names", "unsupported_parameter")
        if isinstance(part, VerifierPart) and part.name not in allowed:
            message = f"this server has the verifiers {', '.join(allowed)}; start it with --verifier to add others"
            raise bad_value("strategy.verifier", message, "unsupported_parameter")
        if isinstance(part, VerifierPart) and part.options:
            message = "give its name alone; the server was started with its options"
            raise bad_value("strategy.verifier.options", message, "unsupported_parameter")


def _records(value: Any) -> Iterator[Record]:
    """Yield all records in a value, the value itself first."""
    if isinstance(value, Record):
        yield value
        for name in type(value).model_fields:
            yield from _records(getattr(value, name))
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _records(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _records(one)


def open_search(
    asked: CompletionRequest | ChatRequest, found: SearchRequest, one: Request, served: ServedModel
) -> SearchProgram:
    """Return the search of a request. `one` is the request of a single answer, whose prompt and sampling options it has.

    With a seed, a search depends on it, the prompt and the strategy alone.
    """
    if found.verifier == SELF_CERTAINTY:
        if one.pictures:
            raise bad_value(
                "strategy.verifier", "self_certainty reads no images; use likelihood", "unsupported_parameter"
            )
        if (longest := len(one.tokens) + one.sampling.max_tokens) > MAX_SCORED_TOKENS:
            message = (
                f"self_certainty reads {MAX_SCORED_TOKENS} tokens at most; prompt and max_tokens come to {longest}"
            )
            raise bad_value("strategy.verifier", message)
    noise = fold("serve", ",".join(map(str, distinct_tokens(one.tokens, one.pictures))))
    prompt: Any = served.tokenizer.decode(one.tokens)
    chat = None
    if "chat" in strategy_needs(found.strategy):
        chat = _renderer(asked, found, served)
    if isinstance(asked, ChatRequest):
        prompt = chat_messages(asked, served)
    question = Question(f"{noise:016x}", prompt, one.tokens, found.kind, pictures=one.pictures, chat=chat)
    seed = asked.seed if asked.seed is not None else secrets.randbits(63)
    search = Search(
        question,
        served.tokenizer,
        one.sampling,
        seed,
        budget=found.budget,
        max_positions=served.max_positions,
        log_scores=found.verifier in (None, LIKELIHOOD),
        max_nodes=MAX_NODES,
    )
    try:
        return SearchProgram(search, load_strategy(found.strategy)(search))
    except UserError as error:  # the options do not fit the model or the other fields
        raise bad_value("strategy", str(error)) from error


def _renderer(asked: CompletionRequest | ChatRequest, found: SearchRequest, served: ServedModel) -> ChatRenderer:
    """Return what writes the further turns of a strategy that asks again. It makes only sense in a chat."""
    if not isinstance(asked, ChatRequest):
        message = f"{found.strategy.name} asks the model again, which needs a chat: use /v1/chat/completions"
        raise bad_value("strategy.name", message, "unsupported_parameter")
    try:
        return ChatRenderer(served.tokenizer, Template(kind="chat", kwargs=asked.chat_template_kwargs))
    except UserError as error:
        raise bad_value("strategy.name", str(error), "unsupported_parameter") from error
