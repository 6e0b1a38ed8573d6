"""The keys of a board, which prove that it belongs to a cluster; `scripts/make_keys.sh` creates them.

Each board has a certificate signed by the cluster's own authority. This module knows nothing about ranks.
"""
from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import Any, NamedTuple

KEY_FILES = AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE = "cluster.crt", "board.crt", "board.key"
NAME_PREFIX = "FlowSpec board "  # before a board's name in its certificate
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


def name_of(connection: socket.socket) -> str:
    """Return the name in the certificate at the other end of an encrypted connection; empty without one."""
    certificate: Any = connection.getpeercert() if isinstance(connection, ssl.SSLSocket) else None
    subject = dict(pair for pairs in (certificate or {}).get("subject", ()) for pair in pairs)
    return str(subject.get("commonName", "")).replace(NAME_PREFIX, "", 1)


def read_keys(key_folder: Path) -> Keys:
    """Read the keys in a folder; raises ValueError if files are missing, or if other users may read them."""
    missing = [name for name in KEY_FILES if not (key_folder / name).is_file()]
    if missing:
        raise ValueError(f"{key_folder} has no {missing[0]}, which a board's keys need: {REMEDY}, or name another "
                         "keys=")

    key_file = key_folder / KEY_FILE
    if key_file.stat().st_mode & 0o077:
        raise ValueError(f"others may read {key_file}: chmod 600 {key_file}")

    try:
        return Keys(_context(ssl.PROTOCOL_TLS_SERVER, key_folder), _context(ssl.PROTOCOL_TLS_CLIENT, key_folder))
    except (ssl.SSLError, OSError) as error:
        raise ValueError(f"the keys in {key_folder} cannot be used ({error.strerror or error}): {REMEDY}") from None


def _context(protocol: int, key_folder: Path) -> ssl.SSLContext:
    """Return a context that requires a certificate. Names are not checked: each board may be any rank."""
    context = ssl.SSLContext(protocol)

    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= NO_CHECK_TIME  # type: ignore[operator]
    context.minimum_version = ssl.TLSVersion.TLSv1_3

    context.load_verify_locations(key_folder / AUTHORITY_FILE)
    context.load_cert_chain(key_folder / CERTIFICATE_FILE, key_folder / KEY_FILE)
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # the client only sends, so it would never read them
    return context
