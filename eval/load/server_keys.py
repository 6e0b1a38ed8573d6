"""What a measurement of a server is: how many clients ask at once, what, and for how long.

It knows nothing about HTTP; all other keys are those of the server.
"""
from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Iterator, Sequence

from config.drafts import listed
from config.ranges import Range, outside
from config.serve_config import ServeConfig

CLIENTS = Range(1, 1000)
MEASURED = {"minutes": Range(0.01, 100_000), "questions": Range(1, 100_000)}


@dataclass(frozen=True)
class ServeLoadConfig(ServeConfig):
    """A server, and clients that ask it. The comments are what `python -m scripts.bench server --help` prints."""

    # Who asks (commas between)
    clients: str = "1,2,4,8"  # clients that ask at once, each again when its answer has ended; each number apart
    minutes: float = 1.0  # for so long each number of them begins to ask
    questions: int = 12  # different questions, those of the sets by turns; each is asked once alone before
    sets: str = "mt_bench,humaneval,gsm8k,alpaca,sum,qa"  # the data sets
    data: str = ""  # folder of data sets; empty: the bundled ones
    port: int = 0  # at which the server listens; 0: any that is free

    EXAMPLES = """\
  python -m scripts.bench server
  python -m scripts.bench server clients=16 minutes=10
  python -m scripts.bench server profile=jetson-7b max_requests=8 reuse=false"""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from outside(vars(self), MEASURED)
        for word in listed(self.clients):
            if not word.isdecimal() or not CLIENTS.holds(int(word)):
                yield f"clients={self.clients}: {word} is not possible: give {CLIENTS.advice}, with commas between"
        for key in ("clients", "sets"):
            if not listed(getattr(self, key)):
                yield f"{key} is empty: name at least one"

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of clients."""
        return tuple(map(int, listed(self.clients)))


def of_the_server(words: Sequence[str]) -> list[str]:
    """Those of the words of a measurement that its server reads."""
    own = {option.name for option in fields(ServeLoadConfig)} - {option.name for option in fields(ServeConfig)}
    return [word for word in words if word.partition("=")[0] not in {*own, "port"}]
