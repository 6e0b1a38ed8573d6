"""Answer prompts with a model that is split over a pipeline; called by run_pipe.sh and run_jetson.sh."""
from __future__ import annotations

import os
import sys

from config.console import die
from launch.ask import GENERATE
from launch.run import TOKENIZERS_ONLY, run

if __name__ == "__main__":
    os.environ.update(TOKENIZERS_ONLY)
    if exit_code := run(GENERATE, sys.argv[1:]):
        die(exit_code)  # a stage's thread may still load
