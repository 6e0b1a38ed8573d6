"""The keys of measurements of load: requests at given times, or a constant number at once.

This module knows nothing about how load is measured.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Iterator

from config.keys import local_key, shared_key
from config.methods import METHODS
from config.old_names import instead_of
from config.run_config import REQUESTS_AT_ONCE
from config.schema.untrusted import read_bytes
from config.values import NUMBER, WHOLE_NUMBER, Range, listed, number
from eval.keys import ComparesMethods, wrong_numbers

RATES = Range(0.000001, 1_000_000)  # requests per second
LATEST_TIME = 1e9  # seconds
OTHER_FILE = "name another with arrivals="
FILE_FORM = "write seconds from the start, one number per line, in rising order"


@dataclass(frozen=True)
class LoadConfig(ComparesMethods):
    """A measurement of load. `python3 -m scripts.bench load --help` prints the comments."""

    DEFAULTS = {"max_requests": 16}
    UNSUPPORTED = ("temperature", "prompt_ids", "question_file", "live")
    EXAMPLES: ClassVar[str] = """\
  python3 -m scripts.bench load
  python3 -m scripts.bench load profile=server rates=1,4,16 temperatures=0,1 results=server
  python3 -m scripts.bench load arrivals=moments.txt methods=ar,streaming
  python3 -m scripts.bench load rates= at_once=1,2,4,8,16
  python3 -m scripts.bench load rates= at_once=4 time=real requests=8 methods=ar,streaming"""

    methods: str = shared_key("ar,serial,continuous,streaming",
        "methods to serve with, each with max_requests requests at once", heading="Comparison (comma-separated)")
    alone: str = shared_key(
        "continuous", "those methods that serve one request at a time; other requests wait in a queue")
    temperatures: str = shared_key("0", "temperatures, each measured separately")

    requests: int = shared_key(48, "number of requests; their questions come from the sets in turn", Range(1, 100_000),
        heading="Requests")
    rates: str = shared_key(
        "0.1,0.2,0.4,0.8,1.6", "mean requests per second, with random (Poisson) arrivals; empty: none")
    arrivals: str = shared_key("", "file of arrival times in seconds, one per line, used in place of rates",
        names_file=True)
    at_once: str = shared_key(
        "", "numbers of requests at once, such as 1,2,4; the next begins when one ends; empty: none")

    results: str = local_key("", "folder for load.csv, at_once.csv and plots; empty: none", heading="Output",
        names_file=True)

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of requests under way at once."""
        return tuple(map(int, listed(self.at_once)))

    def max_running(self, method: str) -> int:
        """Return how many requests a method serves at once."""
        return 1 if method in listed(self.alone) else self.run.max_requests

    def problems(self) -> Iterator[str]:
        target = METHODS["streaming"].target
        possible_methods = [name for name, method in METHODS.items() if method.target == target]
        for name in (*self.chosen_methods, *listed(self.alone)):
            if name not in possible_methods:
                yield (f"{name} is unknown, or needs a pipeline of its own, for methods= and alone=: "
                       f"{instead_of('pipeline_type', name, possible_methods)}")

        yield from super().problems()
        yield from wrong_numbers("rates", self.rates, RATES)
        yield from wrong_numbers("at_once", self.at_once, REQUESTS_AT_ONCE, WHOLE_NUMBER)

        if not (listed(self.rates) or self.arrivals or listed(self.at_once)):
            yield "there is no load to measure: give rates=, arrivals= or at_once="
        if self.run.profile == "none":
            yield "profile=none has no devices to time here: name a cluster, such as profile=jetson-7b"
        yield from self.method_problems()


def moments(path: str) -> list[float]:
    """Return the times in a file, in seconds. Raise ValueError, with the line, if it is no list of rising times."""
    times: list[float] = []
    text = read_bytes(path, OTHER_FILE).decode("utf-8", "replace")

    for line_number, line in enumerate(text.splitlines(), 1):
        word = line.strip()
        if not word:
            continue
        previous_time = times[-1] if times else 0.0
        if not NUMBER.fullmatch(word) or not previous_time <= number(word) <= LATEST_TIME:
            raise ValueError(f"line {line_number} of {path} is no time at or after the previous one: {FILE_FORM}")
        times.append(number(word))

    if not times:
        raise ValueError(f"{path} has no times: {FILE_FORM}")
    return times
