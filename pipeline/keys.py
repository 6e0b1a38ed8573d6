"""The keys of a board, by which it proves to others that it is of their cluster; `scripts/make_keys.sh` makes them.

Each board has a certificate that the cluster's own authority has signed. It knows nothing about ranks.
"""
from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import NamedTuple

AUTHORITY, CERTIFICATE, KEY = "cluster.crt", "board.crt", "board.key"
REMEDY = "make them again with bash scripts/make_keys.sh hosts=FILE"
# A board without a battery begins in 1970 until it finds a clock; certificates of a cluster have no end anyhow.
NO_CHECK_TIME = 0x200000


class Keys(NamedTuple):
    """What a board needs to be let in, and to let in: both sides show a certificate of their cluster."""

    server: ssl.SSLContext
    client: ssl.SSLContext


def encrypted(connection: socket.socket, context: ssl.SSLContext, server: bool) -> socket.socket:
    """A connection whose bytes are encrypted; both sides agree how when the first of them are sent or awaited."""
    return context.wrap_socket(connection, server_side=server, do_handshake_on_connect=False)


def read_keys(place: Path) -> Keys:
    """The keys in a folder; raises ValueError if they are not whole, or others of that machine may read them."""
    missing = [name for name in (AUTHORITY, CERTIFICATE, KEY) if not (place / name).is_file()]
    if missing:
        raise ValueError(f"{place} has no {missing[0]}, which a board's keys need: {REMEDY}, or name another keys=")
    if (place / KEY).stat().st_mode & 0o077:
        raise ValueError(f"others may read {place / KEY}: chmod 600 {place / KEY}")
    try:
        return Keys(_context(ssl.PROTOCOL_TLS_SERVER, place), _context(ssl.PROTOCOL_TLS_CLIENT, place))
    except (ssl.SSLError, OSError) as error:
        raise ValueError(f"the keys in {place} cannot be used ({error.strerror or error}): {REMEDY}") from None


def _context(protocol: int, place: Path) -> ssl.SSLContext:
    """Both sides show a certificate. A certificate has no name that could be checked: each board may be any rank."""
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= NO_CHECK_TIME  # type: ignore[operator]
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(place / AUTHORITY)
    context.load_cert_chain(place / CERTIFICATE, place / KEY)
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # the side that connects only sends, and would never read them
    return context
