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

LOCALHOST = "127.0.0.1"
MAX_READ_BYTES = 1 << 16  # of a relay, at once
RPC_NAME = "llama.cpp, RPC"
SERVER_NAMES = ("ggml-rpc-server", "rpc-server")  # in new and older builds
NO_TIME_MS = 1e-6  # of a profile's model: only the wires are emulated
NUM_TOKENS = 64  # of an answer
PROMPT = "Write a short story about a cat who learns to fish."
METHODS = ("ar", "streaming")
TABLE_HEADING = ("", "tokens/s", "over llama.cpp")
Parcel = Tuple[float, bytes]  # time of arrival, and content


def compare(args: Namespace, gguf_path: Path, model_dir: Path) -> None:
    """Print the table of a GGUF file over `args.over` processes; `model_dir` holds its model as `whole` and `split`."""
    words, wires = [f"model_dir={model_dir / 'split'}"], "loopback"
    if args.wires:
        profile = PROFILES[args.wires]
        wires = f"emulated wires of {profile.latency} ms and {profile.mbps} Mbit/s"
        words.append(f"profile={write_wires(profile, model_dir)}")

    # measurements
    jobs: dict[str, Callable[[], float]] = {}
    programs = binaries(args.binaries)
    if programs:
        jobs[RPC_NAME] = partial(llama_cpp, args, gguf_path, *programs)
    for method in METHODS:
        jobs[f"ours, {method}"] = partial(ours, [*words, f"pipeline_type={method}"], model_dir / "answer.json")
    best_speeds = {name: max(speeds)
                   for name, speeds in by_turns(jobs, args.repeats).items()}

    # table
    print(f"{args.file.name}, {args.over} processes and one that samples, one thread each, {wires}; best of "
          f"{args.repeats}, {NUM_TOKENS} tokens, ours in bfloat16 with quant=int4 and draft=suffix")
    rows = []
    for name, speed in best_speeds.items():
        ratio = f"{speed / best_speeds[RPC_NAME]:.2f}" if RPC_NAME in best_speeds else ""
        rows.append((name, f"{speed:.1f}", ratio))
    print(in_columns(TABLE_HEADING, rows))


def write_wires(profile: Profile, model_dir: Path) -> Path:
    """Write a profile with the wires of another one, but with devices as fast as they are."""
    model_sizes = json.loads((model_dir / "whole" / "config.json").read_text())
    profile_path = model_dir / "wires.json"
    profiles.write(str(profile_path), replace(
        profile, about="this machine, with wires of another cluster", row_bytes=2 * model_sizes["hidden_size"],
        model=NO_TIME_MS, row=0.0, token=0.0, level=0.0, verdict=0.0))
    return profile_path


def binaries(folder: str | None) -> tuple[str, str] | None:
    """Return llama-bench and the RPC server in this folder or PATH; if one is missing, print that and return None."""
    bench = shutil.which("llama-bench", path=folder)
    server = shutil.which(SERVER_NAMES[0], path=folder) or shutil.which(SERVER_NAMES[1], path=folder)
    if bench and server:
        return bench, server
    say("llama-bench or ggml-rpc-server is missing, and llama.cpp is left out: build it with -DGGML_RPC=ON, and give "
        "--binaries DIR")
    return None


def llama_cpp(args: Namespace, gguf_path: Path, bench: str, server: str) -> float:
    """Return the tokens per second of llama.cpp, with its layers on servers."""
    with ExitStack() as running:
        addresses = []
        for _ in range(args.over):
            port = free_port()
            command = [server, "-H", LOCALHOST, "-p", str(port), "-t", "1"]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            running.enter_context(process)
            running.callback(process.terminate)
            if args.wires:
                port = running.enter_context(wire(port, PROFILES[args.wires]))
            addresses.append(f"{LOCALHOST}:{port}")

        model_options = "-m", str(gguf_path), "-rpc", ",".join(addresses), "-ngl", "99", "-t", "1"
        bench_options = "-p", "0", "-n", str(NUM_TOKENS), "-r", "1", "-o", "json", "--delay", "1"
        output = _output_of("llama-bench", [bench, *model_options, *bench_options])
    return float(json.loads(output)[-1]["avg_ts"])


def ours(words: Sequence[str], answer_path: Path) -> float:
    """Return the tokens per second after the first, with these keys; the answer is kept in the file `answer_path`."""
    answer_path.unlink(missing_ok=True)
    default_words = ["draft=suffix", "dtype=bfloat16", "quant=int4", f"max_new_tokens={NUM_TOKENS}", "ignore_eos=true",
                     "threads_per_rank=1", "max_length=512", f"prompt={PROMPT}", f"output={answer_path}"]
    _output_of("ours", [sys.executable, "-m", GENERATE.module, *words, *default_words])

    answer = json.loads(answer_path.read_text())
    return float((answer["new_tokens"] - 1) / answer["decode_seconds"])


def _output_of(name: str, command: Sequence[str]) -> str:
    """Return the output of a command. Raise ValueError, with the end of its stderr, if it fails."""
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if finished.returncode:
        raise ValueError(f"{name} ended with {finished.returncode}: {finished.stderr.strip()[-300:]}")
    return finished.stdout


# --- a wire in front of a server on loopback, for programs without emulated wires -------------------------------------

@contextmanager
def wire(server_port: int, profile: Profile) -> Iterator[int]:
    """Yield a port that leads to this one over a wire of the profile: with its rate each way, and its latency."""
    with socket.create_server((LOCALHOST, 0)) as listening_socket:
        Thread(target=_accept, args=(listening_socket, server_port, profile), daemon=True).start()
        try:
            yield int(listening_socket.getsockname()[1])
        finally:
            listening_socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts


def _accept(listening_socket: socket.socket, server_port: int, profile: Profile) -> None:
    """Accept callers, and relay data between each of them and the server, until the socket is shut down."""
    with suppress(OSError):
        while True:
            caller, _ = listening_socket.accept()
            Thread(target=_relay, args=(caller, server_port, profile), daemon=True).start()


def _relay(caller: socket.socket, server_port: int, profile: Profile) -> None:
    """Relay data between a caller and the server until both have ended."""
    with caller, socket.create_connection((LOCALHOST, server_port)) as server:
        threads = []
        for source, target in ((caller, server), (server, caller)):
            target.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            parcels: SimpleQueue[Parcel] = SimpleQueue()
            threads.append(Thread(target=_receive, args=(source, parcels, ModelledWire(profile)), daemon=True))
            threads.append(Thread(target=_deliver, args=(parcels, target), daemon=True))

        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _receive(source: socket.socket, parcels: SimpleQueue[Parcel], modelled_wire: ModelledWire) -> None:
    """Read data from one end, with the time of its arrival at the other; the last parcel is empty."""
    data = b"?"
    while data:
        data = b""
        with suppress(OSError):
            data = source.recv(MAX_READ_BYTES)
        parcels.put((modelled_wire.carried(len(data), time.monotonic()), data))


def _deliver(parcels: SimpleQueue[Parcel], target: socket.socket) -> None:
    """Send each parcel at its time of arrival."""
    data = b"?"
    while data:
        arrives_at, data = parcels.get()
        time.sleep(max(0.0, arrives_at - time.monotonic()))
        with suppress(OSError):
            if data:
                target.sendall(data)
            else:
                target.shutdown(socket.SHUT_WR)
