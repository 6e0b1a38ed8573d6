"""Speculative decoding by formulas, events and measurements: --help lists the commands."""
from __future__ import annotations

import sys

from eval.dsi.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
