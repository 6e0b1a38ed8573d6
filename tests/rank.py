"""A rank that only ends, without torch: `python3 -m tests.rank WHAT ...`, one WHAT for each rank.

WHAT is `wait` (for an interrupt, which ends it with 130), `deaf` (to all that is polite), a number (to end with this
code), or `kill:NUMBER` (by this signal). All wait until each of them is there.
"""
from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


def main(words: list[str]) -> int:
    word = words[int(os.environ["RANK"])]
    folder = Path(os.environ["FLOWSPEC_FOLDER"])
    interrupted = []
    for number in (signal.SIGTERM, signal.SIGHUP) if word == "deaf" else ():
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, lambda number, frame: interrupted.append(number) if word == "wait" else None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    (folder / f"here{os.environ['RANK']}").touch()
    while len(list(folder.glob("here*"))) < len(words):
        time.sleep(0.01)
    if word.startswith("kill:"):
        os.kill(os.getpid(), int(word[5:]))
    while word in ("wait", "deaf") and not interrupted:
        time.sleep(0.01)
    return 130 if interrupted else int(word)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
