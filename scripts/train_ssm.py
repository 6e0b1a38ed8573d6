"""Fine-tune small models that draft for a target: --help shows the options."""
import sys

from train.ssm.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
