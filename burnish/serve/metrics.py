"""The metrics of `GET /metrics`, in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from burnish.serve.engine_thread import EngineLoop

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PATHS = (
    "/v1/models",
    "/v1/completions",
    "/v1/chat/completions",
    "/tokenize",
    "/detokenize",
    "/health",
    "/metrics",
)
OTHER = "other"
"""The label of all unknown paths: clients choose them, so their number has no bound."""


@dataclass
class Metrics:
    """Counts since the server was started. Used on the event loop."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By path and status."""
    prompt_tokens: int = 0
    """Tokens of the prompts that the engine got; n samples of a prompt count it once."""
    left: int = 0
    """Requests whose client left before the answer was complete."""

    def count_request(self, path: str, status: int, has_left: bool) -> None:
        """Count an answer that has ended."""
        known = "/v1/models" if path.startswith("/v1/models/") else path
        self.requests[known if known in PATHS else OTHER, status] += 1
        self.left += has_left

    def text(self, loop: EngineLoop, num_bytes: int) -> str:
        """All metrics in Prometheus' text format."""
        by_status = {f'{{path="{path}",status="{status}"}}': n for (path, status), n in sorted(self.requests.items())}
        refused = {f'{{type="{kind}"}}': n for kind, n in self._errors().items()}
        finished = {f'{{finish="{finish}"}}': n for finish, n in sorted(loop.finishes.items())}
        lines = [
            *_metric("requests_total", "counter", "Requests answered, by path and HTTP status.", by_status),
            *_metric("request_errors_total", "counter", "Requests that were refused (4xx) or failed (5xx).", refused),
            *_metric("requests_left_total", "counter", "Requests whose client left before the end.", {"": self.left}),
            *_metric("prompt_tokens_total", "counter", "Tokens of prompts.", {"": self.prompt_tokens}),
            *_metric("completion_tokens_total", "counter", "Tokens sampled.", {"": loop.num_tokens}),
            *_metric("completions_total", "counter", "Completions that ended, by how.", finished),
            *_metric("completions_running", "gauge", "Completions being sampled.", {"": loop.num_running}),
            *_metric("completions_waiting", "gauge", "Completions in the queue.", {"": loop.num_waiting}),
            *_metric("request_bytes", "gauge", "Bytes of requests that are being read.", {"": num_bytes}),
        ]
        return "".join(f"{line}\n" for line in lines)

    def _errors(self) -> dict[str, int]:
        found = {"client": 0, "server": 0}
        for (_, status), num in self.requests.items():
            if status >= 400:
                found["server" if status >= 500 else "client"] += num
        return found


def _metric(name: str, kind: str, help_text: str, values: Mapping[str, int]) -> Iterator[str]:
    yield f"# HELP burnish_{name} {help_text}"
    yield f"# TYPE burnish_{name} {kind}"
    for labels, value in values.items():
        yield f"burnish_{name}{labels} {value}"
