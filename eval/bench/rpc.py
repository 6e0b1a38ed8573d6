"""Plain decoding over several processes: llama.cpp's RPC beside ours, on loopback or over emulated wires.

llama.cpp's servers and our stages compute with one thread each. Both have one process more, which samples. Times are
those of the clock, behind the first token.
"""
from __future__ import annotations

import json
import shutil
import subprocess
import sys
from argparse import Namespace
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Iterator, Sequence

from tqdm import tqdm

from config.presets import ROOT
from eval.bench.places import free_port
from eval.tables import in_columns
from launch.console import say

CLUSTER = ("bash", str(ROOT / "scripts" / "netns_cluster.sh"))
SERVERS = ("ggml-rpc-server", "rpc-server")  # the names of new and older builds
PORT = 50052
WRITTEN = 64  # tokens of an answer
PROMPT = "Write a short story about a cat who learns to fish."
METHODS = ("ar", "streaming")
HEAD = ("", "tokens/s", "over llama.cpp")
Board = Sequence[str]  # what stands in front of a command that runs there


def over(args: Namespace, file: Path, folder: Path) -> None:
    """Print the table for a GGUF file, and for its split in `folder`, over as many processes as `args.over` says."""
    table: dict[str, float] = {}
    for _ in tqdm(range(args.repeats), desc="turns", leave=False):
        if tools := binaries(args.binaries):
            _keep(table, "llama.cpp, RPC", llama_cpp(args, file, *tools))
        for method in METHODS:
            _keep(table, f"ours, {method}", ours(args, folder, method))
    place = "wires of {:g} Mbit/s, {:g} ms (emulated)".format(*args.wires) if args.wires else "loopback"
    print(f"{args.file.name}, {args.over} processes and one that samples, one thread each, {place}; best of "
          f"{args.repeats}, {WRITTEN} tokens, ours in bfloat16 with quant=int4 and draft=suffix")
    first = table.get("llama.cpp, RPC")
    print(in_columns(HEAD, [(name, f"{speed:.1f}", f"{speed / first:.2f}" if first else "")
                            for name, speed in table.items()], names=1))


def _keep(table: dict[str, float], name: str, speed: float) -> None:
    table[name] = max(speed, table.get(name, 0.0))


def binaries(folder: str | None) -> tuple[str, str] | None:
    """llama-bench and the RPC server in this folder or PATH; None, and a line that says so, if one is missing."""
    bench = shutil.which("llama-bench", path=folder)
    server = next(filter(None, (shutil.which(name, path=folder) for name in SERVERS)), None)
    if bench and server:
        return bench, server
    say("llama-bench or ggml-rpc-server is not there, and llama.cpp is left out: build it with -DGGML_RPC=ON, and give "
        "--binaries DIR")
    return None


def llama_cpp(args: Namespace, file: Path, bench: str, server: str) -> float:
    """Tokens per second of llama.cpp, with its layers on servers."""
    with ExitStack() as under_way:
        boards = under_way.enter_context(cluster(args))
        places = []
        for board, address in boards[1:]:
            port = PORT if args.wires else free_port()
            command = [*board, server, "-H", address, "-p", str(port), "-t", "1"]
            under_way.enter_context(_running(command))
            places.append(f"{address}:{port}")
        model = "-m", str(file), "-rpc", ",".join(places), "-ngl", "99", "-t", "1"
        asked = "-p", "0", "-n", str(WRITTEN), "-r", "1", "-o", "json", "--delay", "1"
        command = [*boards[0][0], bench, *model, *asked]
        made = subprocess.run(command, check=False, capture_output=True, text=True)
    if made.returncode:
        raise ValueError(f"llama-bench ended with {made.returncode}: {made.stderr.strip()[-300:]}")
    return float(json.loads(made.stdout)[-1]["avg_ts"])


def ours(args: Namespace, folder: Path, method: str) -> float:
    """Tokens per second behind the first, with this method."""
    written = folder.parent / "answer.json"
    written.unlink(missing_ok=True)
    words = [f"model_dir={folder}", f"pipeline_type={method}", "draft=suffix", "dtype=bfloat16", "quant=int4",
             f"max_new_tokens={WRITTEN}", "ignore_eos=true", "threads_per_rank=1", "max_length=512",
             f"prompt={PROMPT}", f"output={written}"]
    command = [sys.executable, "-m", "scripts.generate", *words]
    if args.wires:
        command = [*CLUSTER, *_network(args), "--", *words]
    made = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    if made.returncode:
        raise ValueError(f"{method} ended with {made.returncode}: {made.stderr.strip()[-300:]}")
    answer = json.loads(written.read_text())
    return float((answer["new_tokens"] - 1) / answer["decode_seconds"])


# --- where they run ---------------------------------------------------------------------------------------------------

def _network(args: Namespace) -> list[str]:
    rate, delay = args.wires
    return [f"boards={args.over + 1}", f"rate_mbps={rate:g}", f"delay_ms={delay:g}"]


@contextmanager
def cluster(args: Namespace) -> Iterator[list[tuple[Board, str]]]:
    """What stands in front of a command on each board, and its address; without wires it is this machine."""
    if not args.wires:
        yield [((), "127.0.0.1")] * (args.over + 1)
        return
    with _running([*CLUSTER, *_network(args)]) as network:
        boards: list[tuple[Board, str]] = []
        for line in network.stdout or ():
            if not line.startswith("rank "):
                break
            _, _, name, address, _ = line.split()
            boards.append((("ip", "netns", "exec", name), address))
        if len(boards) <= args.over:
            raise ValueError((network.stderr.read() if network.stderr else "").strip().removeprefix("flowspec: "))
        yield boards


@contextmanager
def _running(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that is ended in the end."""
    log = subprocess.PIPE if CLUSTER[1] in command else subprocess.DEVNULL
    with subprocess.Popen(command, stdout=log, stderr=log, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()
