"""Measure a server under load from HTTP clients: their latencies, and the resources that its processes hold meanwhile.

The server is a process of its own, as `bash run_server.sh` starts it. Every text is compared with the answer to the
same question alone.
"""
from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from itertools import cycle
from typing import Any, Hashable, Iterator, NamedTuple, Sequence
from urllib.parse import urlsplit

from tqdm import tqdm

from config.cli import parse
from config.keys import with_defaults
from config.presets import TOY_PRESET
from config.questions import by_turns
from eval.bench import of_one, process_tree
from eval.load.arrivals import Served, figures, unequal
from eval.load.keys import ServeLoadConfig, of_the_server
from eval.tables import in_columns, number
from launch.console import EXIT_LOST, say

COMMAND = "python3 -m scripts.bench server"
DEFAULTS = {"max_new_tokens": "64"}
HEADING = ("clients", "answers", "errors", "unequal", "tokens/s", "ttft", "ttft_p95", "answer", "answer_p95",
           "server_mib", "ranks_mib", "files", "threads")
PATIENCE = 600.0  # seconds until the server must be up, and for an answer in addition to its wait in the queue
LOOK = 0.25  # seconds between two checks of a starting server
SAMPLE = 2.0  # seconds between two samples of the resources of its processes
SETTLED = 0.1  # share of a measurement after which the first of the two reported samples is taken
OK = 200


class Held(NamedTuple):
    """The resources of a server's processes: MiB of memory, open files and threads."""

    server: float  # memory of the process that answers HTTP and is rank 0
    ranks: float  # memory of all other processes together
    files: int
    threads: int


@dataclass(frozen=True)
class Asker:
    """A client of the server at `url`, with the seed of its requests."""

    url: str
    seed: int
    key: str
    patience: float  # seconds

    def ask(self, question: int, prompt: str) -> Served:
        """Send a request and read the answer as it streams; times are those of this machine's clock."""
        since = time.monotonic()
        text, first, tokens, error = "", 0.0, 0, "the stream ended too early"
        try:
            for event in self._events(prompt):
                if event == "[DONE]":
                    error = ""
                    break
                chunk = json.loads(event)
                if "error" in chunk:
                    error = chunk["error"]["message"]
                    break
                text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
                if text and not first:
                    first = time.monotonic()
        except (OSError, HTTPException) as failed:
            error = str(failed) or type(failed).__name__
        ended = time.monotonic()
        return Served(question, since, first or ended, ended, tokens, text, error)

    def _events(self, prompt: str) -> Iterator[str]:
        """Yield the data of the server-sent events of an answer, or of an error in its place."""
        body = {"seed": self.seed, "messages": [{"role": "user", "content": prompt}],
                "stream": True, "stream_options": {"include_usage": True}}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        with self.response("POST", "/v1/chat/completions", json.dumps(body), headers) as response:
            if response.status != OK:
                yield response.read().decode(errors="replace")
            for line in response:
                if line.startswith(b"data: "):
                    yield line[len(b"data: "):].decode().strip()

    @contextmanager
    def response(self, *request: Any) -> Iterator[HTTPResponse]:
        """Send a request, given by method, path, body and headers, and yield the response."""
        address = urlsplit(self.url).netloc
        with closing(HTTPConnection(address, timeout=self.patience)) as connection:
            connection.request(*request)
            yield connection.getresponse()


def server(argv: list[str]) -> int:
    """Run `python3 -m scripts.bench server`; return its exit code, 1 if a request failed or a text is incorrect."""
    words = with_defaults(argv, DEFAULTS, TOY_PRESET)
    config = parse(words, COMMAND, kind=ServeLoadConfig)
    run = config.run
    prompts = by_turns(config.folder, config.chosen_sets, *run.question_range)
    with _serving(of_the_server(words)) as (process, url):
        asker = Asker(url, run.seed, config.api_key, config.queue_seconds + PATIENCE)
        _await(asker, process)
        bar = tqdm(prompts, unit="question", desc="each alone")
        alone = [asker.ask(number, question) for number, question in enumerate(bar)]
        if failed := next((served.error for served in alone if served.error), ""):
            raise ValueError(f"the server failed to answer a single request: {failed}")
        texts = {served.number: served.text for served in alone}
        measured = [LoadResult(clients, *_measure(config, clients, asker, prompts, process.pid), texts)
                    for clients in config.counts]
    print(f"\nclients of a server ({run.kind}, profile {run.profile}, {run.pipeline_type}, "
          f"max_requests={run.max_requests}); seconds, and tokens/s of all clients together\n")
    print(in_columns(HEADING, [each.row(run.slowdown) for each in measured], 1))
    for error in {served.error for each in measured for served in each.served if served.error}:
        print(f"error: {error}")
    return int(any(any(each.wrong) for each in measured))


@contextmanager
def _serving(words: Sequence[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a server with these words inside a `with`, and yield its process and address. It prints its own errors."""
    command = [sys.executable, "-m", "scripts.serve", *words, "port=0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = next((line for line in process.stdout if line.startswith("flowspec: http://")), "")
        if not line:
            raise ValueError("the server did not start")
        yield process, line.split()[-1]
    finally:
        process.send_signal(signal.SIGINT)
        if process.wait() == EXIT_LOST:
            say("the server has lost its pipeline")


def _await(asker: Asker, process: subprocess.Popen[str]) -> None:
    """Wait until the server is ready."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and process.poll() is None:
        with asker.response("GET", "/health") as response:
            if response.status == OK:
                return
        time.sleep(LOOK)
    raise ValueError("the server did not become ready")


def _measure(config: ServeLoadConfig, clients: int, asker: Asker, prompts: Sequence[str], process: int
             ) -> tuple[list[Served], list[Held]]:
    """Run this many clients for `minutes`; return their answers, and samples of the resources of the server."""
    served: list[Served] = []
    samples: list[Held] = []
    questions = cycle(enumerate(prompts))
    end = time.monotonic() + config.minutes * 60

    def ask() -> None:
        while time.monotonic() < end:
            served.append(asker.ask(*next(questions)))

    bar = tqdm(total=round(config.minutes * 60), unit="s", desc=f"{clients} clients")
    with ThreadPoolExecutor(clients) as pool, bar:
        asking = [pool.submit(ask) for _ in range(clients)]
        while not all(client.done() for client in asking):
            time.sleep(SAMPLE)
            samples.append(holds(process))
            bar.update(min(SAMPLE, bar.total - bar.n))
    for client in asking:
        client.result()  # raises the exception of a failed client
    return served, samples


def holds(process: int) -> Held:
    """Return the current resources of a process and all its descendants."""
    memory, files, threads = zip(*map(of_one, process_tree(process)))
    return Held(memory[0], sum(memory[1:]), sum(files), sum(threads))


@dataclass(frozen=True)
class LoadResult:
    """The answers for a number of clients, samples of the server's resources, and the texts of requests alone."""

    clients: int
    served: Sequence[Served]
    samples: Sequence[Held]
    alone: dict[int, Hashable]

    @property
    def fine(self) -> list[Served]:
        """The answers without an error."""
        return [served for served in self.served if not served.error]

    @property
    def wrong(self) -> tuple[int, int]:
        """The number of answers with an error, and of others that differ from the answer to the same request alone."""
        return len(self.served) - len(self.fine), unequal(self.fine, self.alone)

    def row(self, scale: float) -> list[str]:
        """Return the cells of a line of the table; `scale` seconds are one modelled second.

        Resources are those after the share SETTLED of the measurement, and at its end.
        """
        found = figures(self.fine, scale)
        counts = map(str, (self.clients, len(self.served), *self.wrong))
        waits = map(number, (found.ttft, found.ttft_p95, found.latency, found.latency_p95))
        settled = int(len(self.samples) * SETTLED)
        held = zip(self.samples[settled], self.samples[-1])
        return [*counts, number(found.tokens_per_second, 1), *waits,
                *(f"{before:.0f} to {after:.0f}" for before, after in held)]
