"""What a client is told when a request cannot be answered, in OpenAI's shape:

{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TYPES = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable_error"}
LONGEST = 600


class ApiError(Exception):
    """A refusal with its HTTP status; `param` names the field it is about, `code` says why in one word."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers
        # What a client sent may be in them, and may be of any length.
        self.message, self.param = message[:LONGEST], param if param is None else param[:LONGEST]

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_value(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """A field whose value cannot be used."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def not_a_number() -> ApiError:
    """For a model whose arithmetic broke: an answer drawn from it would mean nothing."""
    return ApiError(
        500, "the model computed log-probs that are not numbers; serve it with a wider --dtype", code="not_a_number"
    )


def internal_error() -> ApiError:
    """The error for a fault of the server: the log has its cause, the client gets no details."""
    # uvicorn closes the connection after a failure; the header keeps clients from sending another request on it.
    close = {"Connection": "close"}
    return ApiError(500, "the server failed on this request; its log says why", code="internal_error", headers=close)
