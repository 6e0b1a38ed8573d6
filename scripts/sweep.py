"""Run the evaluation at each point of a sweep."""
import sys

from eval.sweep import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
