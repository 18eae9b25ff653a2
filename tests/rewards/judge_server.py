"""An OpenAI-compatible endpoint on loopback that answers, fails, stalls or returns nonsense, as a test scripts it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """What the endpoint does with one call."""

    text: str = '{"correct": true}'
    status: int = 200
    after_s: float = 0.0
    raw: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)


@dataclass
class Endpoint:
    """A running server and the requests it received."""

    url: str
    asked: list[Body] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    most_at_once: int = 0
    now: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def questions(self) -> list[str]:
        return [body["messages"][0]["content"] for body in self.asked]


@contextmanager
def serving(answer: Callable[[Body, int], Reply]) -> Iterator[Endpoint]:
    """A server whose replies are `answer(body, number of the call)`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with endpoint.lock:
                number = len(endpoint.asked)
                endpoint.asked.append({**body, "path": self.path, "key": self.headers.get("Authorization")})
                endpoint.at.append(time.monotonic())
                endpoint.now += 1
                endpoint.most_at_once = max(endpoint.most_at_once, endpoint.now)
            reply = answer(body, number)
            time.sleep(reply.after_s)
            said: Body = {"choices": [{"message": {"role": "assistant", "content": reply.text}}], "usage": reply.usage}
            content = json.dumps(said).encode() if reply.raw is None else reply.raw
            with endpoint.lock:
                endpoint.now -= 1
            try:
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
            except BrokenPipeError:
                return  # the client has given up

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    endpoint = Endpoint(f"http://127.0.0.1:{server.server_address[1]}/v1")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
