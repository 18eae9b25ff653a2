"""The counts of the server, in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from burnish.serve.async_engine import AsyncEngine

COUNTED_PATHS = (
    "/v1/models",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
    "/health",
    "/metrics",
)
OTHER_PATH = "other"
"""Label of all unknown paths. Clients choose paths, so their number has no bound."""


@dataclass
class ServerMetrics:
    """Counts since the start of the server. Used on the event loop."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By path and status."""
    prompt_tokens: int = 0
    """Tokens of submitted prompts; n samples of a prompt count it once."""
    left: int = 0
    """Requests whose client disconnected before the end of the answer."""

    def count_request(self, path: str, status: int, has_left: bool) -> None:
        """Count an ended request."""
        known = "/v1/models" if path.startswith("/v1/models/") else path
        self.requests[known if known in COUNTED_PATHS else OTHER_PATH, status] += 1
        self.left += has_left

    def text(self, engine: AsyncEngine, num_bytes: int) -> str:
        """All metrics in Prometheus' text format."""
        by_status = {f'{{path="{path}",status="{status}"}}': n for (path, status), n in sorted(self.requests.items())}
        refused = {f'{{type="{kind}"}}': n for kind, n in self._errors().items()}
        finished = {f'{{finish="{finish}"}}': n for finish, n in sorted(engine.finishes.items())}
        lines = [
            *_metric_lines("requests_total", "counter", "Requests answered, by path and HTTP status.", by_status),
            *_metric_lines(
                "request_errors_total", "counter", "Requests that were refused (4xx) or failed (5xx).", refused
            ),
            *_metric_lines(
                "requests_left_total", "counter", "Requests whose client left before the end.", {"": self.left}
            ),
            *_metric_lines("prompt_tokens_total", "counter", "Tokens of prompts.", {"": self.prompt_tokens}),
            *_metric_lines("completion_tokens_total", "counter", "Tokens sampled.", {"": engine.num_tokens}),
            *_metric_lines("completions_total", "counter", "Completions that ended, by how.", finished),
            *_metric_lines("completions_running", "gauge", "Completions being sampled.", {"": engine.num_running}),
            *_metric_lines("completions_waiting", "gauge", "Completions in the queue.", {"": engine.num_waiting}),
            *_metric_lines("request_bytes", "gauge", "Bytes of requests that are being read.", {"": num_bytes}),
        ]
        return "".join(f"{line}\n" for line in lines)

    def _errors(self) -> dict[str, int]:
        found = {"client": 0, "server": 0}
        for (_, status), num in self.requests.items():
            if status >= 400:
                found["server" if status >= 500 else "client"] += num
        return found


def _metric_lines(name: str, kind: str, help_text: str, values: Mapping[str, int]) -> Iterator[str]:
    yield f"# HELP burnish_{name} {help_text}"
    yield f"# TYPE burnish_{name} {kind}"
    for labels, value in values.items():
        yield f"burnish_{name}{labels} {value}"
