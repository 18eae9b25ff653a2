"""The APIs that agents speak, each as functions between HTTP bodies and the records of `gateway.calls`."""

from burnish.gateway.protocols.base import KEEP_ALIVE, CallProtocol, api_key
from burnish.gateway.protocols.registry import MESSAGES, PROTOCOLS, RESPONSES, error_at

__all__ = ["KEEP_ALIVE", "MESSAGES", "PROTOCOLS", "RESPONSES", "CallProtocol", "api_key", "error_at"]
