"""Answer prompts with a model that is split over a pipeline; called by run_pipe.sh and run_jetson.sh.

Mistakes in the words, and `--help`, end the command before torch is imported or a model is fetched.
"""
from __future__ import annotations

import gc
import os
import sys

from cluster.board import COMMAND_VARIABLE
from config.cli import RUN_PIPE, parse, with_bare_question
from config.console import die, ended_by

if __name__ == "__main__":
    try:
        parse(with_bare_question(sys.argv[1:]), os.environ.get(COMMAND_VARIABLE, RUN_PIPE))
    except (ValueError, OSError) as error:
        sys.exit(ended_by(error, "debug=true" in sys.argv))
    gc.disable()  # else a seventh of the imports' time is a search for garbage among what stays

from launch.ask import GENERATE  # noqa: E402
from launch.run import TOKENIZERS_ONLY, run  # noqa: E402

if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    os.environ.update(TOKENIZERS_ONLY)
    die(run(GENERATE, sys.argv[1:]))  # a stage's thread may still load, and Python takes long to release torch
