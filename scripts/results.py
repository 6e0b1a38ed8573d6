"""Make the tables and plots of the pages again: python3 -m scripts.results [--help]"""
import sys

from eval.page_tables import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
