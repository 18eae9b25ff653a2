"""One call of a model and its answer, whatever protocol the agent speaks.

A protocol turns the body of an HTTP request into a `ModelCall`, and a `CallAnswer` into its own JSON or server-sent events. Everything
between them, the token tree and the engine, knows only these records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Json = dict[str, Any]
Finish = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class ModelCall:
    """What an agent asked for. Exactly one of `messages`, `text` and `token_ids` is given."""

    messages: tuple[Json, ...] | None = None
    """The conversation as chat templates expect it: roles system, user, assistant and tool, contents as texts (as blocks if they have
    images, with the URLs that the client sent), `tool_calls` with arguments as objects, `reasoning_content` where the client sent it."""
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
    stop_tokens: tuple[int, ...] = ()
    """Tokens that end a sample besides the run's own end tokens."""
    seed: int | None = None
    logprobs: bool = False
    wants_token_ids: bool = False
    is_stream: bool = False
    includes_usage: bool = False
    """Whether a stream ends with the number of tokens."""
    model: str = "default"
    """The name that the client gave. Answers repeat it."""
    previous_id: str | None = None
    """The `CallAnswer.id` that the conversation continues, whose messages the server has (`previous_response_id` of OpenAI's responses).
    `continued` puts them together."""
    is_stored: bool = False
    """Whether a later call may have `previous_id` of its answer, so that the session must keep its messages."""
    num_instructions: int = 0
    """Leading messages that belong to this call alone, so that a call that continues it does not inherit them (`instructions`)."""
    agent: str | None = None
    """The name of the sub-agent that called, if the client gives one (`metadata.agent`)."""
    overridden: Mapping[str, Any] = field(default_factory=dict)
    """What the client asked for and does not get, because the run's own settings replace it (`temperature`) or because tokens are sampled
    freely (`tool_choice: required`). `burnish serve`, which has no settings of a run, reads from here what it can do (`strategy`)."""


def continued(call: ModelCall, previous: ModelCall, answer: Json) -> ModelCall:
    """A call with the history that it left out: the messages of the `previous` call and its answer, in the form of templates.

    `previous` must have its own whole history. Instructions of the previous call are dropped, as OpenAI's API says.
    """
    own, past = call.messages or (), previous.messages or ()
    head, new = own[: call.num_instructions], own[call.num_instructions :]
    return replace(call, messages=(*head, *past[previous.num_instructions :], answer, *new), previous_id=None)


@dataclass(frozen=True)
class CallChoice:
    """One sample of a call."""

    message: Json
    """The assistant's message in OpenAI's form: `content` (None beside calls without text), `reasoning_content` if there is any,
    `tool_calls` with ids and arguments as JSON texts. For a prompt without a chat template `content` is the whole text."""
    finish: Finish
    stop_string: str | None = None
    """The string of `ModelCall.stop` that ended the text; None if something else did."""
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
    strategy: Mapping[str, Any] | None = None
    """How a strategy of test-time scaling chose the answer, and what that cost; None: the answer was sampled without one."""

    @property
    def num_sampled(self) -> int:
        """Sampled tokens, also those of answers that a strategy did not choose."""
        if self.strategy is not None:
            return int(self.strategy["tokens"])
        return sum(len(choice.tokens) for choice in self.choices)
