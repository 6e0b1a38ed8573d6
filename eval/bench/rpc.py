"""Plain decoding over several processes: llama.cpp's RPC compared with ours, on loopback or over emulated wires.

llama.cpp's servers and our stages compute with one thread each. Both have one more process, which samples. Times are
elapsed times after the first token. llama.cpp's wires are relays, ours those of the emulation.
"""
from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from argparse import Namespace
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Callable, Iterator, Sequence, Tuple

from config import profiles
from config.console import say
from config.presets import ROOT
from config.profiles import PROFILES, Profile
from eval.bench import by_turns
from eval.bench.places import free_port
from eval.tables import in_columns
from launch.ask import GENERATE
from sim.wires import ModelledWire

HERE = "127.0.0.1"
PIECE = 1 << 16  # bytes that a relay reads at once
RPC = "llama.cpp, RPC"
SERVERS = ("ggml-rpc-server", "rpc-server")  # the names of new and older builds
NO_TIME = 1e-6  # ms of a profile's model: only the wires are emulated
WRITTEN = 64  # tokens of an answer
PROMPT = "Write a short story about a cat who learns to fish."
METHODS = ("ar", "streaming")
HEAD = ("", "tokens/s", "over llama.cpp")
Parcel = Tuple[float, bytes]  # time of arrival, and content


def compare(args: Namespace, file: Path, place: Path) -> None:
    """Print the table of a GGUF file over `args.over` processes; `place` holds its model as `whole` and `split`."""
    jobs: dict[str, Callable[[], float]] = {}
    words, wires = [f"model_dir={place / 'split'}"], "loopback"
    if args.wires:
        usual = PROFILES[args.wires]
        wires = f"emulated wires of {usual.latency} ms and {usual.mbps} Mbit/s"
        words.append(f"profile={write_wires(usual, place)}")
    if tools := binaries(args.binaries):
        jobs[RPC] = partial(llama_cpp, args, file, *tools)
    for method in METHODS:
        jobs[f"ours, {method}"] = partial(ours, [*words, f"pipeline_type={method}"], place / "answer.json")
    best = {name: max(speeds)
            for name, speeds in by_turns(jobs, args.repeats).items()}
    print(f"{args.file.name}, {args.over} processes and one that samples, one thread each, {wires}; best of "
          f"{args.repeats}, {WRITTEN} tokens, ours in bfloat16 with quant=int4 and draft=suffix")
    rows = [(name, f"{speed:.1f}", f"{speed / best[RPC]:.2f}" if RPC in best else "")
            for name, speed in best.items()]
    print(in_columns(HEAD, rows))


def write_wires(usual: Profile, place: Path) -> Path:
    """Write a profile with the wires of another one, but with devices as fast as they are."""
    sizes = json.loads((place / "whole" / "config.json").read_text())
    written = place / "wires.json"
    profiles.write(str(written), replace(
        usual, about="this machine, with wires of another cluster", row_bytes=2 * sizes["hidden_size"],
        model=NO_TIME, row=0.0, token=0.0, level=0.0, verdict=0.0))
    return written


def binaries(folder: str | None) -> tuple[str, str] | None:
    """Return llama-bench and the RPC server in this folder or PATH; if one is missing, print that and return None."""
    bench = shutil.which("llama-bench", path=folder)
    server = shutil.which(SERVERS[0], path=folder) or shutil.which(SERVERS[1], path=folder)
    if bench and server:
        return bench, server
    say("llama-bench or ggml-rpc-server is missing, and llama.cpp is left out: build it with -DGGML_RPC=ON, and give "
        "--binaries DIR")
    return None


def llama_cpp(args: Namespace, file: Path, bench: str, server: str) -> float:
    """Return the tokens per second of llama.cpp, with its layers on servers."""
    with ExitStack() as under_way:
        servers = []
        for _ in range(args.over):
            port = free_port()
            command = [server, "-H", HERE, "-p", str(port), "-t", "1"]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            under_way.enter_context(process)
            under_way.callback(process.terminate)
            if args.wires:
                port = under_way.enter_context(wire(port, PROFILES[args.wires]))
            servers.append(f"{HERE}:{port}")
        model = "-m", str(file), "-rpc", ",".join(servers), "-ngl", "99", "-t", "1"
        asked = "-p", "0", "-n", str(WRITTEN), "-r", "1", "-o", "json", "--delay", "1"
        said = _output("llama-bench", [bench, *model, *asked])
    return float(json.loads(said)[-1]["avg_ts"])


def ours(words: Sequence[str], written: Path) -> float:
    """Return the tokens per second after the first, with these keys; the answer is kept in the file `written`."""
    written.unlink(missing_ok=True)
    usual = ["draft=suffix", "dtype=bfloat16", "quant=int4", f"max_new_tokens={WRITTEN}", "ignore_eos=true",
             "threads_per_rank=1", "max_length=512", f"prompt={PROMPT}", f"output={written}"]
    _output("ours", [sys.executable, "-m", GENERATE.module, *words, *usual])
    answer = json.loads(written.read_text())
    return float((answer["new_tokens"] - 1) / answer["decode_seconds"])


def _output(name: str, command: Sequence[str]) -> str:
    """Return the output of a command. Raise ValueError, with the end of its stderr, if it fails."""
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if made.returncode:
        raise ValueError(f"{name} ended with {made.returncode}: {made.stderr.strip()[-300:]}")
    return made.stdout


# --- a wire in front of a server on loopback, for programs without emulated wires -------------------------------------

@contextmanager
def wire(port: int, profile: Profile) -> Iterator[int]:
    """Yield a port that leads to this one over a wire of the profile: with its rate each way, and its latency."""
    with socket.create_server((HERE, 0)) as door:
        Thread(target=_accept, args=(door, port, profile), daemon=True).start()
        try:
            yield int(door.getsockname()[1])
        finally:
            door.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts


def _accept(door: socket.socket, port: int, profile: Profile) -> None:
    """Accept callers, and relay data between each of them and the server, until the socket is shut down."""
    with suppress(OSError):
        while True:
            caller, _ = door.accept()
            Thread(target=_relay, args=(caller, port, profile), daemon=True).start()


def _relay(caller: socket.socket, port: int, profile: Profile) -> None:
    """Relay data between a caller and the server until both have ended."""
    with caller, socket.create_connection((HERE, port)) as server:
        threads = []
        for source, target in ((caller, server), (server, caller)):
            target.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            under_way: SimpleQueue[Parcel] = SimpleQueue()
            threads.append(Thread(target=_receive, args=(source, under_way, ModelledWire(profile)), daemon=True))
            threads.append(Thread(target=_deliver, args=(under_way, target), daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _receive(source: socket.socket, under_way: SimpleQueue[Parcel], way: ModelledWire) -> None:
    """Read data from one end, with the time of its arrival at the other; the last parcel is empty."""
    data = b"?"
    while data:
        data = b""
        with suppress(OSError):
            data = source.recv(PIECE)
        under_way.put((way.carried(len(data), time.monotonic()), data))


def _deliver(under_way: SimpleQueue[Parcel], target: socket.socket) -> None:
    """Send each parcel at its time of arrival."""
    data = b"?"
    while data:
        due, data = under_way.get()
        time.sleep(max(0.0, due - time.monotonic()))
        with suppress(OSError):
            if data:
                target.sendall(data)
            else:
                target.shutdown(socket.SHUT_WR)
