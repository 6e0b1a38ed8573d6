"""Simulate speculative decoding by formulas, events and measurements: --help lists the commands."""
import sys

from eval.dsi.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
