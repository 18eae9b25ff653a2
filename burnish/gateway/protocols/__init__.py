"""The APIs that agents speak, each as functions between HTTP bodies and the records of `gateway.calls`."""

from burnish.gateway.protocols.base import KEEP_ALIVE, CallProtocol, api_key
from burnish.gateway.protocols.chat_completions import ChatCompletions
from burnish.gateway.protocols.completions import Completions
from burnish.gateway.protocols.generate import Generate
from burnish.gateway.protocols.messages import Messages
from burnish.gateway.protocols.responses import Responses

PROTOCOLS: tuple[CallProtocol, ...] = (ChatCompletions(), Completions(), Responses(), Messages(), Generate())

__all__ = ["KEEP_ALIVE", "PROTOCOLS", "CallProtocol", "api_key"]
