"""Train an EAGLE draft head for a model: --help shows the options."""
import sys

from train.eagle.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
