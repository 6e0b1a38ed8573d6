"""Speculative decoding by formulas, events and measurements: --help lists the commands."""
from __future__ import annotations

import sys

from eval.dsi.command import in_a_shell

if __name__ == "__main__":
    sys.exit(in_a_shell(sys.argv[1:]))
