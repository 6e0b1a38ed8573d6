"""Run the evaluation at each point of a sweep; called by eval/sweeps/NAME.sh."""
import sys

from eval.sweep import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
