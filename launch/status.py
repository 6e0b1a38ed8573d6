"""Show the boards of the server that runs on this machine, in a terminal: bash run_worker.sh status.

Without a server it shows what this machine knows: the hosts file of hosts=auto, or where this board's rank 0 is.
"""
from __future__ import annotations

import os
import sys
from http.client import HTTPConnection, HTTPException
from typing import Any, Iterator, Sequence

from cluster.board import read_hosts
from config.console import aligned, run
from config.dialect import OptionParser
from config.files import fits
from config.presets import HOME
from config.schema.untrusted import one_line, parse_json

REPLY_SECONDS = 10.0
COLUMNS = {  # of a card's figures: their headings, and their digits
    "free_gb": ("GB free", 1), "rows_per_second": ("rows/s", 1), "segment_ms": ("ms a segment", 1),
    "round_trip_ms": ("ms round trip", 1), "mbps": ("Mbit/s", 0), "sent_mbps": ("sent", 2)}


def is_figure(value: Any) -> bool:
    """Whether this is a number, or None for an unknown one."""
    return value is None or fits(value, float)


CARD_FORM = {"rank": str, "state": str, "layers": int, "busy": float, **dict.fromkeys(COLUMNS, is_figure)}
CLUSTER_FORM = {"status": str, "reason": str, "boards": [CARD_FORM]}


def main(argv: Sequence[str]) -> int:
    """Print a row for each board; raises ValueError, with what to do, if no server answers."""
    parser = OptionParser(prog="bash run_worker.sh status", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1", help="of the server (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="of the server (%(default)s)")
    parser.add_argument("--api_key", default=os.environ.get("FLOWSPEC_API_KEY", ""), help="that the server asks for")
    options = parser.parse_args(argv)

    server_name = f"{options.host}:{options.port}"
    try:
        status, text = read_cluster(options.host, options.port, options.api_key)
    except (OSError, HTTPException):
        print("\n".join(known_boards()), end="")
        raise ValueError(f"no server answers at {server_name}: {advice()}") from None

    if status == 401:
        raise ValueError(f"the server at {server_name} asks for its key: give api_key=SECRET, or set FLOWSPEC_API_KEY")

    cluster = parse_json(text, f"the answer of {server_name}", "give the port= of bash run_server.sh")
    if not fits(cluster, CLUSTER_FORM):
        raise ValueError(f"what answers at {server_name} is no server of this version: give the port= of bash "
                         "run_server.sh")
    print("\n".join(lines_of(cluster)))
    return 0


def read_cluster(host: str, port: int, api_key: str) -> tuple[int, str]:
    """Return the status and the text of the server's answer about its boards; no proxy is asked."""
    connection = HTTPConnection(host, port, timeout=REPLY_SECONDS)
    connection.request("GET", "/cluster", headers={"Authorization": f"Bearer {api_key}"})
    response = connection.getresponse()
    return response.status, response.read().decode(errors="replace")


def lines_of(cluster: dict[str, Any]) -> Iterator[str]:
    """Yield the lines about a server's boards: its state, a row for each board, and what would be faster."""
    yield one_line(": ".join(filter(None, (f"{cluster['status']}", cluster["reason"]))))
    headings = [heading for heading, _ in COLUMNS.values()]
    rows = [["board", "state", "layers", "busy", *headings]]

    slowest_board = cluster.get("slowest") or None  # 0: unknown
    for number, card in enumerate(cluster["boards"]):
        state = card["state"] + " (slowest)" * (number == slowest_board)
        first_cells = [one_line(card["rank"]), one_line(state), str(card["layers"]), f"{card['busy']:.0%}"]
        figures = [_figure(card[name], digits) for name, (_, digits) in COLUMNS.items()]
        rows.append(first_cells + figures)

    yield from aligned(rows)
    if cluster.get("advice"):
        yield one_line(str(cluster["advice"]))


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def known_boards() -> Iterator[str]:
    """Yield the boards of this machine's hosts file, if hosts=auto has written one."""
    hosts_file = HOME / "boards.txt"
    if hosts_file.exists():
        rows = [["board", "address", "layers"]]
        lines = read_hosts(str(hosts_file))
        rows += [[line.name, line.address, line.layers or "none"] for line in lines]
        yield from aligned(rows)
        yield ""


def advice() -> str:
    """Return what to type, and on which machine."""
    root_file = HOME / "keys" / "root"
    if root_file.exists():
        address = one_line(root_file.read_text()).partition(":")[0]
        return (f"this board computes for rank 0 at {address}; type it there, where bash run_server.sh runs, or give "
                f"host={address} api_key=SECRET if that server listens to others")
    return "type it on the machine where bash run_server.sh hosts=auto runs, or give its port="


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
