"""Write a page with the timeline of a run: --help shows the options."""
import sys

from eval.observe.timeline_page import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
