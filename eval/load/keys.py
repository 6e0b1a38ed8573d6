"""What a measurement of load is: requests to methods at given moments or so many at once, and clients of a server.

It knows nothing about how that is measured.
"""
from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Iterator, Sequence

from config.keys import NUMBER, WHOLE, Range, listed, number
from config.methods import METHODS
from config.run_config import RANGES as OF_RUNS
from config.schema.untrusted import read_bytes
from config.serve_config import ServeConfig
from eval.keys import AsksSets, ComparesMethods, wrong_numbers

RATES = Range(0.000001, 1_000_000)  # requests per second
LATEST = 1e9  # seconds
CLIENTS = Range(1, 1000)
ANOTHER = "name another with arrivals="
FORM = "write seconds from the start, one number a line, none less than the one before"


@dataclass(frozen=True)
class LoadConfig(ComparesMethods):
    """A measurement of load. The comments are what `python -m scripts.bench load --help` prints."""

    USUAL = {"max_requests": 16}
    REFUSED = ("temperature", "prompt_ids", "question_file")
    RANGES = {"requests": Range(1, 100_000)}
    EXAMPLES: ClassVar[str] = """\
  python -m scripts.bench load
  python -m scripts.bench load profile=server rates=1,4,16 temperatures=0,1 results=server
  python -m scripts.bench load arrivals=moments.txt methods=ar,streaming
  python -m scripts.bench load rates= at_once=1,2,4,8,16
  python -m scripts.bench load rates= at_once=4 time=real requests=8 methods=ar,streaming"""

    # What is compared (commas between)
    methods: str = "ar,serial,continuous,streaming"  # those that serve, each as many at once as max_requests says
    alone: str = "continuous"  # those of them that serve one request at a time; the others wait in a queue
    temperatures: str = "0"  # each of them is measured apart

    # What they serve
    requests: int = 48  # how many; the questions of the sets by turns
    rates: str = "0.1,0.2,0.4,0.8,1.6"  # requests per second, which arrive at random (Poisson); empty: none
    arrivals: str = ""  # file of moments in seconds, a line each, at which they arrive, in place of rates
    at_once: str = ""  # requests under way at once, the next one begins when one ends, as 1,2,4,8,16; empty: none

    # What is written
    results: str = ""  # folder for load.csv, at_once.csv and plots; empty: none

    @property
    def counts(self) -> tuple[int, ...]:
        """How many requests are under way at once, for the table of these."""
        return tuple(map(int, listed(self.at_once)))

    def places(self, method: str) -> int:
        """How many requests a method serves at once."""
        return 1 if method in listed(self.alone) else self.run.max_requests

    def problems(self) -> Iterator[str]:
        target = METHODS["streaming"].target
        one_target = [name for name, method in METHODS.items() if method.target == target]
        for name in (*self.chosen_methods, *listed(self.alone)):
            if name not in one_target:
                yield (f"{name} is unknown, or has a pipeline of its own: choose in methods= and alone= among "
                       f"{', '.join(one_target)}")
        yield from super().problems()
        yield from wrong_numbers("rates", self.rates, RATES)
        yield from wrong_numbers("at_once", self.at_once, OF_RUNS["max_requests"], WHOLE)
        if not (listed(self.rates) or self.arrivals or listed(self.at_once)):
            yield "nothing is to be measured: give rates=, arrivals= or at_once="
        if self.run.profile == "none":
            yield "profile=none has no devices to be timed here: name a cluster, as profile=jetson-7b"
        yield from self.method_problems()


def moments(path: str) -> list[float]:
    """The moments that a file lists, in seconds. Raises ValueError, with the line, for a file that is no such list."""
    found: list[float] = []
    text = read_bytes(path, ANOTHER).decode("utf-8", "replace")
    for place, line in enumerate(text.splitlines(), 1):
        word = line.strip()
        if not word:
            continue
        before = found[-1] if found else 0.0
        if not NUMBER.fullmatch(word) or not before <= number(word) <= LATEST:
            raise ValueError(f"line {place} of {path} is no moment behind the one before: {FORM}")
        found.append(number(word))
    if not found:
        raise ValueError(f"{path} has no moments: {FORM}")
    return found


@dataclass(frozen=True)
class ServeLoadConfig(ServeConfig, AsksSets):
    """A server, and clients that ask it. The comments are what `python -m scripts.bench server --help` prints."""

    # Who asks (commas between)
    clients: str = "1,2,4,8"  # clients that ask at once, each again when its answer has ended; each number apart
    minutes: float = 1.0  # for so long each number of them begins to ask
    port: int = 0  # at which the server listens; 0: any that is free

    RANGES = {**ServeConfig.RANGES, "minutes": Range(0.01, 100_000)}
    USUAL = {**ServeConfig.USUAL, "questions": "2"}
    REFUSED: ClassVar[Sequence[str]] = tuple(key for key in ServeConfig.REFUSED if key != "questions")
    EXAMPLES = """\
  python -m scripts.bench server
  python -m scripts.bench server clients=16 minutes=10
  python -m scripts.bench server profile=jetson-7b max_requests=8 reuse=false"""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from wrong_numbers("clients", self.clients, CLIENTS, WHOLE)
        if not self.counts:
            yield "clients is empty: name at least one"

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of clients."""
        return tuple(map(int, listed(self.clients)))


def of_the_server(words: Sequence[str]) -> list[str]:
    """Those of the words of a measurement that its server reads."""
    own = {"questions", *(option.name for option in fields(ServeLoadConfig))}
    of_server = {option.name for option in fields(ServeConfig)} - {"port"}
    return [word for word in words if word.partition("=")[0] not in own - of_server]
