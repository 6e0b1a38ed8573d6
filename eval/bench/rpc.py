"""Plain decoding over several processes: llama.cpp's RPC beside ours, on loopback.

llama.cpp's servers and our stages compute with one thread each. Both have one process more, which samples. Times are
those of the clock, behind the first token.
"""
from __future__ import annotations

import json
import shutil
import subprocess
import sys
from argparse import Namespace
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Callable, Sequence

from config.presets import ROOT
from eval.bench import by_turns
from eval.bench.places import free_port
from eval.tables import in_columns
from launch.console import say

RPC = "llama.cpp, RPC"
SERVERS = ("ggml-rpc-server", "rpc-server")  # the names of new and older builds
HERE = "127.0.0.1"
WRITTEN = 64  # tokens of an answer
PROMPT = "Write a short story about a cat who learns to fish."
METHODS = ("ar", "streaming")
HEAD = ("", "tokens/s", "over llama.cpp")


def over(args: Namespace, file: Path, folder: Path) -> None:
    """Print the table for a GGUF file, and for its split in `folder`, over as many processes as `args.over` says."""
    jobs: dict[str, Callable[[], float]] = {}
    if tools := binaries(args.binaries):
        jobs[RPC] = partial(llama_cpp, args, file, *tools)
    for method in METHODS:
        jobs[f"ours, {method}"] = partial(ours, folder, method)
    best = {name: max(speeds)
            for name, speeds in by_turns(jobs, args.repeats).items()}
    print(f"{args.file.name}, {args.over} processes and one that samples, one thread each, loopback; best of "
          f"{args.repeats}, {WRITTEN} tokens, ours in bfloat16 with quant=int4 and draft=suffix")
    rows = [(name, f"{speed:.1f}", f"{speed / best[RPC]:.2f}" if RPC in best else "")
            for name, speed in best.items()]
    print(in_columns(HEAD, rows))


def binaries(folder: str | None) -> tuple[str, str] | None:
    """llama-bench and the RPC server in this folder or PATH; None, and a line that says so, if one is missing."""
    bench = shutil.which("llama-bench", path=folder)
    server = shutil.which(SERVERS[0], path=folder) or shutil.which(SERVERS[1], path=folder)
    if bench and server:
        return bench, server
    say("llama-bench or ggml-rpc-server is not there, and llama.cpp is left out: build it with -DGGML_RPC=ON, and give "
        "--binaries DIR")
    return None


def llama_cpp(args: Namespace, file: Path, bench: str, server: str) -> float:
    """Tokens per second of llama.cpp, with its layers on servers."""
    with ExitStack() as under_way:
        servers = []
        for _ in range(args.over):
            port = str(free_port())
            command = [server, "-H", HERE, "-p", port, "-t", "1"]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            under_way.enter_context(process)
            under_way.callback(process.terminate)
            servers.append(f"{HERE}:{port}")
        model = "-m", str(file), "-rpc", ",".join(servers), "-ngl", "99", "-t", "1"
        asked = "-p", "0", "-n", str(WRITTEN), "-r", "1", "-o", "json", "--delay", "1"
        said = _said("llama-bench", [bench, *model, *asked])
    return float(json.loads(said)[-1]["avg_ts"])


def ours(folder: Path, method: str) -> float:
    """Tokens per second behind the first, with this method."""
    written = folder.parent / "answer.json"
    written.unlink(missing_ok=True)
    words = [f"model_dir={folder}", f"pipeline_type={method}", "draft=suffix", "dtype=bfloat16", "quant=int4",
             f"max_new_tokens={WRITTEN}", "ignore_eos=true", "threads_per_rank=1", "max_length=512",
             f"prompt={PROMPT}", f"output={written}"]
    _said(method, [sys.executable, "-m", "scripts.generate", *words])
    answer = json.loads(written.read_text())
    return float((answer["new_tokens"] - 1) / answer["decode_seconds"])


def _said(name: str, command: Sequence[str]) -> str:
    """What a command prints. Raises ValueError, with its last words, if it fails."""
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if made.returncode:
        raise ValueError(f"{name} ended with {made.returncode}: {made.stderr.strip()[-300:]}")
    return made.stdout
