"""Answer prompts with a model that is split over a pipeline; called by run_pipe.sh and run_jetson.sh."""
from __future__ import annotations

import sys

from eval.plan.auto import allow_plans
from launch.ask import GENERATE
from launch.run import run

if __name__ == "__main__":
    allow_plans()
    sys.exit(run(GENERATE, sys.argv[1:]))
