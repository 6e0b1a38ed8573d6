"""HTTP connections, limited in number and in the time that they may wait for their clients.

This module knows nothing about what is served. uvicorn has no such limits, but accepts a custom protocol class.
"""
from __future__ import annotations

import asyncio
import resource
import sys
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from config.console import say
from config.failure import FILES, explain
from config.serve_config import ServeConfig

HEAD_SECONDS = 10.0  # seconds for the head of a request, and for the rest of a body that was answered already
SPARE_CONNECTIONS = 512  # connections in addition to two for each answer that may be under way or waiting
MAX_ACCEPTED = 2048  # connections that are accepted at once
LOG_INTERVAL = 60.0  # seconds between two equal lines of output


def connection_limits(config: ServeConfig) -> tuple[int, int]:
    """Return how many connections may be open at once, and how many are accepted before the first of them is counted.

    First raise the soft limit of open files to the hard one. A third of the files is for open connections. Another
    third is for newly accepted ones, since the event loop accepts up to four times a backlog before it closes one.
    """
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    max_files = sys.maxsize if hard_limit == resource.RLIM_INFINITY else hard_limit
    wanted_connections = SPARE_CONNECTIONS + 2 * (config.run.max_requests + config.queue)
    return min(wanted_connections, max_files // 3), min(MAX_ACCEPTED, max_files // 12)


class Connection(H11Protocol):
    """A connection that is closed if its client is silent for too long, or if there are too many connections.

    There may be `max_connections`, and half as many from one address. Above that, the connection that has waited
    longest for its client is closed. So a client that sends its request at once is answered, however many others are
    silent.
    """

    def __init__(self, max_connections: int, **options: Any) -> None:
        super().__init__(**options)
        self._max_connections = max_connections
        self.waiting_since = 0.0  # when it last began to wait for its client
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def is_between_requests(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def waits_for_client(self) -> bool:
        """Whether it is the client's turn to send something."""
        return self.is_between_requests or self.cycle.more_body

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._limit_head_time()
        self._make_room()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._limit_head_time()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._limit_head_time()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that is not HTTP; if an answer has begun already, only close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel_deadline()

    def _limit_head_time(self) -> None:
        """Start the time limit for the head of a request, unless a request is being answered."""
        if not self.is_between_requests:
            self._cancel_deadline()
        elif self._deadline is None:
            self.waiting_since = self.loop.time()
            self._deadline = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _make_room(self) -> None:
        """Close the connection that has waited longest for its client, if there are too many."""
        connections = [other for other in self.connections if isinstance(other, Connection)]
        all_open = [connection for connection in connections if not connection.transport.is_closing()]
        from_address = [connection for connection in all_open if connection.address == self.address]

        for crowd, max_crowd in ((from_address, self._max_connections // 2), (all_open, self._max_connections)):
            if len(crowd) > max_crowd:
                waiting = [connection for connection in crowd if connection.waits_for_client]  # including this one
                longest_waiting = min(waiting, key=lambda connection: connection.waiting_since)
                longest_waiting.transport.abort()
                return

    @property
    def address(self) -> str:
        """The client's address."""
        return self.client[0] if self.client else ""


class LoopErrorHandler:
    """The event loop's error handler, which reports a shortage of files in one line, and not too often."""

    def __init__(self) -> None:
        self._next_report_at = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in FILES.error_numbers:
            loop.default_exception_handler(context)
        elif time.monotonic() >= self._next_report_at:
            self._next_report_at = time.monotonic() + LOG_INTERVAL
            say(f"a connection has to wait: {explain(error)}")
