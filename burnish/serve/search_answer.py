"""The answer that a strategy has chosen, in the form of each API: a choice, with the object `strategy` beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pydantic_core import to_json

from burnish.core.engine import Request
from burnish.evaluation.strategies.search_program import SearchProgram
from burnish.evaluation.strategies.search_runner import search_record
from burnish.gateway.calls import CallAnswer, ModelCall
from burnish.gateway.completion_text import completion_text
from burnish.gateway.openai_responses import ApiResponse, ChoiceDelta
from burnish.gateway.openai_schema import ApiError
from burnish.gateway.protocols import CallProtocol
from burnish.models.tokenizer import Tokenizer
from burnish.serve.other_protocols import call_answer
from burnish.serve.search_request import SearchRequest
from burnish.serve.search_run import ServedSearch

Json = dict[str, Any]


class SearchAnswer(Protocol):
    """How a request with a strategy is answered when the search has chosen."""

    @property
    def is_stream(self) -> bool:
        """Whether the client asked for server-sent events."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""

    def whole(self, search: ServedSearch, found: SearchRequest) -> Json:
        """Return the response. Its usage counts all sampled tokens."""

    def events(self, search: ServedSearch, found: SearchRequest) -> str:
        """Return the response as server-sent events."""

    def error_event(self, error: ApiError) -> str:
        """Return an error after the start of a stream."""


@dataclass(frozen=True)
class ChoiceSearchAnswer:
    """A completion or a chat with one choice. A stream has it as one chunk."""

    answer: ApiResponse

    @property
    def is_stream(self) -> bool:
        """Whether the client asked for server-sent events."""
        return self.answer.asked.stream

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.answer.num_prompt_tokens

    def whole(self, search: ServedSearch, found: SearchRequest) -> Json:
        """Return the response. Its usage counts all sampled tokens."""
        facts = search_facts(search, found)
        return self.answer.whole([chosen_delta(search.program)], facts["tokens"]) | {"strategy": facts}

    def events(self, search: ServedSearch, found: SearchRequest) -> str:
        """Return the answer in one chunk, and the usage if it was asked for."""
        facts = search_facts(search, found)
        chunk = self.answer.chunk(chosen_delta(search.program))
        assert chunk is not None
        last = self.answer.last_chunk(facts["tokens"])
        chunks = [chunk | {"strategy": facts}, *([] if last is None else [last])]
        return "".join(map(_event, chunks)) + "data: [DONE]\n\n"

    def error_event(self, error: ApiError) -> str:
        """Return an error after the start of a stream."""
        return _event(error.body())


@dataclass(frozen=True)
class CallSearchAnswer:
    """A response of OpenAI or a message of Anthropic."""

    protocol: CallProtocol
    call: ModelCall
    name: str
    request: Request
    """The request of a single answer."""
    tokenizer: Tokenizer

    @property
    def is_stream(self) -> bool:
        """Whether the client asked for server-sent events."""
        return self.call.is_stream

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.tokens)

    def whole(self, search: ServedSearch, found: SearchRequest) -> Json:
        """Return the response. Its usage counts all sampled tokens."""
        return self.protocol.whole(self.call, self._answer(search, found))

    def events(self, search: ServedSearch, found: SearchRequest) -> str:
        """Return the events of the protocol."""
        return "".join(self.protocol.events(self.call, self._answer(search, found)))

    def error_event(self, error: ApiError) -> str:
        """Return an error after the start of a stream."""
        return self.protocol.error_event(error)

    def _answer(self, search: ServedSearch, found: SearchRequest) -> CallAnswer:
        delta = chosen_delta(search.program)
        plain = call_answer(self.name, self.request, delta, self.tokenizer, wants_pieces=False)
        return replace(plain, strategy=search_facts(search, found))


def chosen_delta(program: SearchProgram) -> ChoiceDelta:
    """Return the chosen answer as the only choice of a response."""
    assert program.choice is not None
    search, chosen = program.search, program.choice.node
    tokens = [token for node in chosen.path()[1:] for token in node.tokens]
    text = completion_text(tokens, search.tokenizer, search.sampling.stop_tokens, search.sampling.stop)
    finish = "stop" if chosen.end == "stop" else "length"
    return ChoiceDelta(0, text=text, tokens=tokens, logp=[], top=[], finish=finish)


def search_facts(search: ServedSearch, found: SearchRequest) -> Json:
    """Return the object `strategy` of a response: how the answer was chosen, and what it cost."""
    program = search.program
    assert program.choice is not None
    record = search_record(program) | {"wall_s": search.wall_s}
    answer = program.search.answer(program.choice.node)
    facts = {"name": found.strategy.name, "verifier": found.verifier, "answer": answer, **record}
    return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in facts.items()}


def failed_search(program: SearchProgram) -> ApiError:
    """Return the error of a search that has chosen nothing."""
    return ApiError(400, f"the strategy has chosen no answer: {program.error}", param="strategy", code="search_failed")


def _event(value: Mapping[str, Any]) -> str:
    return f"data: {to_json(value).decode()}\n\n"
