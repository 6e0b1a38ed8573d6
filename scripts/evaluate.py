"""Compare the methods; called by run_eval.sh."""
import sys

from eval.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
