"""Boards of one network that find each other by mDNS.

Anybody in the network can announce anything. So an announcement only says where to knock, or for which code to ask:
codes and keys decide.
"""
from __future__ import annotations

import os
import re
import socket
from typing import Any, NamedTuple

from cluster.agreement import code_version
from cluster.board import addresses, listed, way_to
from config.schema.untrusted import one_line

SERVICE = "_flowspec._tcp.local."
MULTICAST_ADDRESS = "224.0.0.251"  # of mDNS
NOT_IN_NAMES = re.compile("[^A-Za-z0-9]+")
MAX_NAME_LENGTH = 30
MAX_ANNOUNCED = 64  # beyond it, announcements are ignored
REPLY_MILLISECONDS = 500  # for the details of an announcement
ROOT, BOARD = "root", "board"  # roles: rank 0 that looks for boards, and a board without keys


class Announced(NamedTuple):
    """What somebody announces, which may be false; printable."""

    name: str
    address: str
    port: int
    texts: dict[str, str]

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"

    @property
    def other_code(self) -> str:
        """Its version and ours as a message names them, if they differ; else empty."""
        version = self.texts.get("code", "")
        if version == code_version():
            return ""
        return (f"{self} has other code than this machine ({version}, not {code_version()}): bring one version to all "
                "boards")


def plain_name(text: str) -> str:
    """Return a name for a board, of letters, digits and hyphens, that is safe as a file's name and in a hosts file."""
    return NOT_IN_NAMES.sub("-", text)[:MAX_NAME_LENGTH].strip("-") or BOARD


def own_address(interface: str) -> str:
    """Return the address of this interface, or of the one that leads to the other boards; raises ValueError."""
    others = {name: address for name, address in addresses().items() if not address.startswith("127.")}
    usual_address = way_to(MULTICAST_ADDRESS)
    if interface in addresses():
        return addresses()[interface]
    if not interface and usual_address in others.values():
        return usual_address
    if not interface and len(others) == 1:
        return next(iter(others.values()))
    raise ValueError(f"in which network are the other boards? This machine has {listed(addresses())}: name the "
                     "interface, as in GLOO_SOCKET_IFNAME=eth0")


class Neighbours:
    """What is announced in the network of an address: a context."""

    def __init__(self, address: str) -> None:
        from zeroconf import ServiceBrowser, Zeroconf

        self._address = address
        self._announced_names: dict[str, None] = {}
        try:
            self._zeroconf = Zeroconf(interfaces=[address])
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise ValueError(f"boards cannot be looked for at {address} ({reason}): name another interface, as in "
                             "GLOO_SOCKET_IFNAME=eth0, or write a hosts file") from None
        ServiceBrowser(self._zeroconf, SERVICE, handlers=[self._on_change])

    def __enter__(self) -> Neighbours:
        return self

    def __exit__(self, *error: object) -> None:
        self._zeroconf.close()

    def announce(self, name: str, port: int, role: str, **texts: str) -> None:
        """Announce this machine until the end; of two with one name, the later one gets a suffix."""
        from zeroconf import ServiceInfo

        texts.update(role=role, name=name, code=code_version())
        self._zeroconf.register_service(ServiceInfo(
            SERVICE, f"{role}-{name}.{SERVICE}", port, addresses=[socket.inet_aton(self._address)],
            properties=texts, server=f"flowspec-{self._address.replace('.', '-')}.local."), allow_name_change=True)

    def withdraw(self) -> None:
        """End what this machine announces."""
        self._zeroconf.unregister_all_services()

    def with_role(self, role: str) -> list[Announced]:
        """Return all that announce this role, by name."""
        all_announced = map(self._details, list(self._announced_names))
        return sorted(announced for announced in all_announced if announced and announced.texts.get("role") == role)

    def _details(self, service_name: str) -> Announced | None:
        info = self._zeroconf.get_service_info(SERVICE, service_name, REPLY_MILLISECONDS)
        ip_addresses = [packed for packed in info.addresses if len(packed) == 4] if info else []
        if info is None or not ip_addresses or not info.port:
            return None
        texts = {_printable(key): _printable(value) for key, value in info.properties.items()}
        return Announced(plain_name(texts.get("name", "")), socket.inet_ntoa(ip_addresses[0]), info.port, texts)

    def _on_change(self, zeroconf: Any, service_type: str, name: str, state_change: Any) -> None:
        if state_change.name == "Removed":
            self._announced_names.pop(name, None)
        elif len(self._announced_names) < MAX_ANNOUNCED:
            self._announced_names[name] = None


def _printable(raw: bytes | None) -> str:
    return one_line((raw or b"").decode(errors="replace"))
