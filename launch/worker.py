"""A rank of a pipeline whose rank 0 is a person's program: `python -m launch.worker [PRESET] [key=value ...]`.

It is started by `Pipeline.open`, and learns its number from the environment.
"""
from __future__ import annotations

import sys

from launch.run import Command, run
from pipeline.failure import PeerLost


def lead_nothing(pipeline: object) -> None:
    """What rank 0 would do, if a worker could be rank 0."""
    raise PeerLost("a worker cannot be rank 0, which is the program that opens the pipeline")


if __name__ == "__main__":
    sys.exit(run(Command("launch.worker", lead_nothing), sys.argv[1:]))
