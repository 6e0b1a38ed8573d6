"""Print the tables of the FlowSpec paper beside those of this project."""
import sys

from eval.flowspec.paper import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
