"""Compares the methods; run_eval.sh calls it."""
import sys

from eval.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
