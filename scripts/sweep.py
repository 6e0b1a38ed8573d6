"""The evaluation at each point of what is varied; eval/sweeps/NAME.sh call it."""
import sys

from eval.sweep import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
