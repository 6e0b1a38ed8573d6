"""Split a model, given by its name, folder or GGUF file, for the boards of a hosts file; for scripts/push.sh.

It prints the folder of the split, which is created if it is missing.
"""
from __future__ import annotations

import sys
from pathlib import Path

from config.console import NEEDED_PACKAGES, Words, enter, run
from config.keys import raw_values

if __name__ == "__main__":
    enter(*NEEDED_PACKAGES)

from cluster.board import read_hosts, stages_for
from launch.prepare import split_of
from launch.words import resolve

PUSHED = ("model", "models", "eagle_dir", "quant", "stages")


def main(argv: Words) -> int:
    """Print the folder in which each rank of the file `hosts=` has its part of `model=`."""
    raw = raw_values(argv)
    path = str(Path(raw["hosts"]).expanduser())
    words = [f"{key}={raw[key]}" for key in PUSHED if key in raw]
    if "stages" not in raw:
        words.append(f"stages={stages_for(read_hosts(path), path)}")
    resolved = resolve(words)
    resolved.report()
    print(split_of(resolved.keys, may_write=True))
    return 0


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
