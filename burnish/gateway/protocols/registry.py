"""All protocols, and the one that a path belongs to."""

from __future__ import annotations

from burnish.gateway.openai_schema import ApiError
from burnish.gateway.protocols.base import CallProtocol
from burnish.gateway.protocols.chat_completions import ChatCompletions
from burnish.gateway.protocols.completions import Completions
from burnish.gateway.protocols.fields import Json
from burnish.gateway.protocols.generate import Generate
from burnish.gateway.protocols.messages import Messages
from burnish.gateway.protocols.responses import Responses

PROTOCOLS: tuple[CallProtocol, ...] = (ChatCompletions(), Completions(), Responses(), Messages(), Generate())
RESPONSES, MESSAGES = PROTOCOLS[2], PROTOCOLS[3]


def error_at(path: str, error: ApiError) -> tuple[int, Json]:
    """Status and body of an error in the form that clients of a path expect; OpenAI's form at any other path."""
    for protocol in PROTOCOLS:
        if path.endswith(protocol.path) or (protocol.count_path is not None and path.endswith(protocol.count_path)):
            return protocol.error(error)
    return error.status, error.body()
