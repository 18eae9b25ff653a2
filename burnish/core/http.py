"""HTTP connections with a deadline for the whole exchange.

A socket's timeout applies to each read, so a server that sends one byte now and then can block its caller forever.
These subclasses of the standard library's connections raise `TimeoutError` at their deadline, at any point of the exchange.
"""

from __future__ import annotations

import io
import socket
import time
from http.client import HTTPConnection, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit
from urllib.request import HTTPHandler, HTTPSHandler, OpenerDirector, Request, build_opener


class _DeadlineSocket:
    """The part of a socket's interface that `http.client` uses, with one deadline for all calls."""

    def __init__(self, inner: socket.socket, deadline: float) -> None:
        self._inner, self._deadline = inner, deadline
        self._num_files, self._is_closed = 0, False

    def _set_timeout(self) -> None:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the deadline has passed")
        self._inner.settimeout(left_s)

    def sendall(self, data: Any) -> None:
        self._set_timeout()
        self._inner.sendall(data)  # sendall's timeout covers all of the data

    def recv_into(self, buffer: Any) -> int:
        self._set_timeout()
        return self._inner.recv_into(buffer)

    def makefile(self, mode: str) -> io.BufferedReader:
        assert mode == "rb"
        self._num_files += 1
        return io.BufferedReader(_DeadlineReader(self))

    def drop_file(self) -> None:
        """Count a closed file. The last one closes the socket, if `close` was called before."""
        self._num_files -= 1
        if self._is_closed:
            self.close()

    def close(self) -> None:
        """Close the socket once all of its files are closed."""
        self._is_closed = True
        if self._num_files <= 0:
            self._inner.close()


class _DeadlineReader(io.RawIOBase):
    """The readable file of a `_DeadlineSocket`."""

    def __init__(self, owner: _DeadlineSocket) -> None:
        self._owner = owner

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._owner.recv_into(buffer)

    def close(self) -> None:
        if not self.closed:
            self._owner.drop_file()
        super().close()


class _DeadlineConnection(HTTPConnection):
    """A connection whose `timeout` runs from its construction to the end of the exchange."""

    def __init__(self, host: str, port: int | None = None, *, timeout: float = 60.0, **kwargs: Any) -> None:
        super().__init__(host, port, timeout=max(0.001, timeout), **kwargs)
        self._deadline = time.monotonic() + timeout

    def connect(self) -> None:
        super().connect()
        self.sock: Any = _DeadlineSocket(self.sock, self._deadline)


class DeadlineHTTPConnection(_DeadlineConnection, HTTPConnection):
    """An `HTTPConnection` with a deadline."""


class DeadlineHTTPSConnection(_DeadlineConnection, HTTPSConnection):
    """An `HTTPSConnection` with a deadline."""


def connection_to(url: str, timeout_s: float, connect_s: float) -> HTTPConnection:
    """Return a connection to the server of a URL. Its deadline is `timeout_s` from now; connecting may take `connect_s`."""
    parts = urlsplit(url)
    connection_class = DeadlineHTTPSConnection if parts.scheme == "https" else DeadlineHTTPConnection
    connection = connection_class(parts.hostname or "", parts.port, timeout=timeout_s)
    connection.timeout = max(0.001, min(timeout_s, connect_s))
    return connection


class _DeadlineHTTPHandler(HTTPHandler):
    def http_open(self, request: Request) -> Any:
        return self.do_open(DeadlineHTTPConnection, request)


class _DeadlineHTTPSHandler(HTTPSHandler):
    def https_open(self, request: Request) -> Any:
        return self.do_open(DeadlineHTTPSConnection, request)


def deadline_opener() -> OpenerDirector:
    """Return an opener that follows proxies and redirects as `urlopen` does. Its timeout is a deadline for each exchange."""
    return build_opener(_DeadlineHTTPHandler, _DeadlineHTTPSHandler)
