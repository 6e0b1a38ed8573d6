"""The command of DSI's published simulator, as its README prints it: python -m dsi type=heatmap heatmap.ndim=20"""
import sys

from config.console import enter

if __name__ == "__main__":
    enter("numpy", "matplotlib")

from eval.dsi.original import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
