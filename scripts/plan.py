"""Choose method, split and draft for given devices: --help shows all keys."""
import sys

from eval.plan.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
