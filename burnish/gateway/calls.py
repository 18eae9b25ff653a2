"""One call of a model and its answer, whatever protocol the agent speaks.

A protocol turns the body of an HTTP request into a `ModelCall`, and a `CallAnswer` into its own JSON or server-sent events. Everything
between them, the token tree and the engine, knows only these records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Json = dict[str, Any]
Finish = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class ModelCall:
    """What an agent asked for. Exactly one of `messages`, `text` and `token_ids` is given."""

    messages: tuple[Json, ...] | None = None
    """The conversation as chat templates expect it: roles system, user, assistant and tool, contents as texts, `tool_calls` with arguments
    as objects, `reasoning_content` where the client sent it."""
    text: str | None = None
    """A prompt without a chat template."""
    token_ids: tuple[int, ...] | None = None
    """A prompt as token ids."""
    tools: tuple[Json, ...] = ()
    """JSON schemas of the tools, in OpenAI's form."""
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    max_tokens: int | None = None
    """Most new tokens; None: as many as the run allows."""
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: bool = False
    wants_token_ids: bool = False
    is_stream: bool = False
    includes_usage: bool = False
    """Whether a stream ends with the number of tokens."""
    model: str = "default"
    """The name that the client gave. Answers repeat it."""
    previous_id: str | None = None
    """The answer that the conversation continues, whose messages the server has (`previous_response_id` of OpenAI's responses)."""
    agent: str | None = None
    """The name of the sub-agent that called, if the client gives one (`metadata.agent`)."""
    overridden: Mapping[str, Any] = field(default_factory=dict)
    """Sampling options that the client asked for and the run's own settings replace, such as `temperature`."""


@dataclass(frozen=True)
class CallChoice:
    """One sample of a call."""

    message: Json
    """The assistant's message in OpenAI's form: `content` (None beside calls without text), `reasoning_content` if there is any,
    `tool_calls` with ids and arguments as JSON texts."""
    finish: Finish
    tokens: tuple[int, ...] = ()
    """All sampled tokens, with the end token."""
    logp: tuple[float, ...] = ()
    pieces: tuple[str, ...] = ()
    """The text of each token, where log-probs were asked for."""


@dataclass(frozen=True)
class CallAnswer:
    """The answer to a call."""

    id: str
    """Unique in the run, without a prefix: protocols put theirs before it."""
    created: int
    """Seconds since 1970."""
    choices: tuple[CallChoice, ...]
    prompt_tokens: tuple[int, ...] = ()

    @property
    def num_sampled(self) -> int:
        return sum(len(choice.tokens) for choice in self.choices)
