"""A server under load: clients that ask it over HTTP, what they wait for, and what its processes hold meanwhile.

The server is a process of its own, as `bash run_server.sh` starts it. Every text is compared with what the same
question gets alone.
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
from typing import Any, Iterator, NamedTuple, Sequence
from urllib.parse import urlsplit

from tqdm import tqdm

from config.cli import parse
from config.keys import over
from config.presets import TOY_PRESET
from config.questions import by_turns
from eval.bench import of_one, process_tree
from eval.load.arrivals import middle_and_tail
from eval.load.keys import ServeLoadConfig, of_the_server
from eval.tables import in_columns
from launch.console import EXIT_LOST, say

COMMAND = "python -m scripts.bench server"
DEFAULTS = {"max_new_tokens": "64"}
HEADING = ("clients", "answers", "errors", "unequal", "tokens/s", "ttft", "ttft_p95", "answer", "answer_p95",
           "server_mib", "ranks_mib", "files", "threads")
PATIENCE = 600.0  # seconds for the server to come up, and for an answer beyond its wait in the queue
LOOK = 0.25  # seconds between two looks at a server that comes up
SAMPLE = 2.0  # seconds between two looks at what its processes hold
SETTLED = 0.1  # the share of a measurement after which what they hold is noted for the first time
OK = 200


class Heard(NamedTuple):
    """What came of one request; seconds are counted from its sending."""

    question: int
    text: str
    tokens: int
    first: float  # until its first text
    seconds: float  # until its end
    error: str = ""


class Held(NamedTuple):
    """What the processes of a server hold: MiB of memory, open files and threads."""

    server: float  # memory of the process that answers HTTP and is rank 0
    ranks: float  # of all others together
    files: int
    threads: int


@dataclass(frozen=True)
class Asker:
    """A client of the server at `url`, with the seed of its requests."""

    url: str
    seed: int
    key: str
    patience: float  # seconds

    def ask(self, question: int, said: str) -> Heard:
        """Ask, and read the answer as it streams. The answer names what goes wrong."""
        since = time.monotonic()
        text, first, tokens, error = "", 0.0, 0, "the stream ended too early"
        try:
            for event in self._events(said):
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
                    first = time.monotonic() - since
        except (OSError, HTTPException) as failed:
            error = str(failed) or type(failed).__name__
        seconds = time.monotonic() - since
        return Heard(question, text, tokens, first or seconds, seconds, error)

    def _events(self, said: str) -> Iterator[str]:
        """The data of the server-sent events of an answer, or of the error that came in its place."""
        body = {"seed": self.seed, "messages": [{"role": "user", "content": said}], "stream": True,
                "stream_options": {"include_usage": True}}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        with self.response("POST", "/v1/chat/completions", json.dumps(body), headers) as response:
            if response.status != OK:
                yield response.read().decode(errors="replace")
            for line in response:
                if line.startswith(b"data: "):
                    yield line[len(b"data: "):].decode().strip()

    @contextmanager
    def response(self, *request: Any) -> Iterator[HTTPResponse]:
        """The response to a request: its method, path, body and headers."""
        address = urlsplit(self.url).netloc
        with closing(HTTPConnection(address, timeout=self.patience)) as connection:
            connection.request(*request)
            yield connection.getresponse()


def server(argv: list[str]) -> int:
    """The command `python -m scripts.bench server`; its exit code, 1 if a request failed or a text is not its own."""
    words = over(argv, DEFAULTS, TOY_PRESET)
    config = parse(words, COMMAND, kind=ServeLoadConfig)
    run = config.run
    said = by_turns(config.folder, config.chosen_sets)[:config.questions]
    with _serving(of_the_server(words)) as (process, url):
        asker = Asker(url, run.seed, config.api_key, config.queue_seconds + PATIENCE)
        _await(asker, process)
        alone = [asker.ask(*question) for question in tqdm([*enumerate(said)], unit="question", desc="each alone")]
        if failed := next((heard.error for heard in alone if heard.error), ""):
            raise ValueError(f"the server has not answered a question that was asked alone: {failed}")
        measured = [_measure(config, clients, asker, said, process.pid) for clients in config.counts]
    texts = [heard.text for heard in alone]
    print(f"\nclients of a server ({run.kind}, profile {run.profile}, {run.pipeline_type}, "
          f"max_requests={run.max_requests}); seconds, and tokens/s of all clients together\n")
    print(in_columns(HEADING, [each.row(texts) for each in measured], 1))
    for error in {heard.error for each in measured for heard in each.heard if heard.error}:
        print(f"an error: {error}")
    return int(any(each.errors or each.unequal(texts) for each in measured))


@contextmanager
def _serving(words: Sequence[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server of these words, and its address; it ends with the `with`. It says itself why it cannot start."""
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
    """Wait until the server can answer."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and process.poll() is None:
        with asker.response("GET", "/health") as response:
            if response.status == OK:
                return
        time.sleep(LOOK)
    raise ValueError("the server did not come up")


def _measure(config: ServeLoadConfig, clients: int, asker: Asker, said: Sequence[str], process: int) -> Measured:
    """Let so many clients ask for a while, and look at what the server's processes hold every now and then."""
    heard: list[Heard] = []
    samples: list[Held] = []
    questions = cycle(enumerate(said))
    since = time.monotonic()
    end = since + config.minutes * 60

    def ask() -> float:
        """The moment at which this client ended."""
        while time.monotonic() < end:
            heard.append(asker.ask(*next(questions)))
        return time.monotonic()

    bar = tqdm(total=round(end - since), unit="s", desc=f"{clients} clients")
    with ThreadPoolExecutor(clients) as pool, bar:
        asking = [pool.submit(ask) for _ in range(clients)]
        while not all(client.done() for client in asking):
            time.sleep(SAMPLE)
            samples.append(holds(process))
            bar.update(min(SAMPLE, bar.total - bar.n))
    ended = max(client.result() for client in asking)  # raises what one has died of
    return Measured(config, clients, heard, ended - since, samples)


def holds(process: int) -> Held:
    """What a process holds at this moment, and all that it and they have started."""
    memory, files, threads = zip(*map(of_one, process_tree(process)))
    return Held(memory[0], sum(memory[1:]), sum(files), sum(threads))


@dataclass(frozen=True)
class Measured:
    """What so many clients heard in `seconds`, and samples of what the server's processes held."""

    config: ServeLoadConfig
    clients: int
    heard: Sequence[Heard]
    seconds: float
    samples: Sequence[Held]

    @property
    def errors(self) -> int:
        return sum(bool(heard.error) for heard in self.heard)

    def unequal(self, texts: Sequence[str]) -> int:
        """How many texts are not those that their questions got alone."""
        return sum(heard.text != texts[heard.question] for heard in self.heard if not heard.error)

    def row(self, texts: Sequence[str]) -> list[str]:
        """The cells of its line; seconds are modelled ones where a cluster is emulated.

        Of what was held that is said when the load had settled, and at its end.
        """
        scale = self.config.run.slowdown
        fine = [heard for heard in self.heard if not heard.error]
        speed = sum(heard.tokens for heard in fine) / self.seconds * scale
        counts = self.clients, len(self.heard), self.errors, self.unequal(texts)
        times = zip(*((heard.first / scale, heard.seconds / scale) for heard in fine))
        waits = [f"{value:.2f}" for seconds in times for value in middle_and_tail(seconds)]
        held = zip(self.samples[int(len(self.samples) * SETTLED)], self.samples[-1])
        return [*map(str, counts), f"{speed:.1f}", *waits, *(f"{before:.0f} to {after:.0f}" for before, after in held)]
