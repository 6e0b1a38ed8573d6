"""The keys of a board, which prove that it belongs to a cluster; `scripts/make_keys.sh` creates them.

Each board has a certificate signed by the cluster's own authority. This module knows nothing about ranks.
"""
from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import NamedTuple

AUTHORITY, CERTIFICATE, KEY = "cluster.crt", "board.crt", "board.key"
REMEDY = "make them again with bash scripts/make_keys.sh hosts=FILE"
# A board without a battery starts with the year 1970, until it reaches a time server; the certificates do not expire.
NO_CHECK_TIME = 0x200000


class Keys(NamedTuple):
    """The TLS contexts of both sides; each presents a certificate of the cluster."""

    server: ssl.SSLContext
    client: ssl.SSLContext


def encrypted(connection: socket.socket, context: ssl.SSLContext, server: bool) -> socket.socket:
    """Return the encrypted connection; the handshake happens at the first transfer."""
    return context.wrap_socket(connection, server_side=server, do_handshake_on_connect=False)


def read_keys(place: Path) -> Keys:
    """Read the keys in a folder; raises ValueError if files are missing, or if other users may read them."""
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
    """Return a context that requires a certificate. Names are not checked: each board may be any rank."""
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= NO_CHECK_TIME  # type: ignore[operator]
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(place / AUTHORITY)
    context.load_cert_chain(place / CERTIFICATE, place / KEY)
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # the client only sends, so it would never read them
    return context
