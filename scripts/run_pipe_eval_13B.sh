#!/usr/bin/env bash
# The comparison of the paper with LLaMA-2-Chat 13B in 4 bits, or a PRESET, with all ranks on this machine:
#   bash scripts/run_pipe_eval_13B.sh [PRESET] [data=DIR] [key=value ...]
# data=DIR has the six real data sets: the paper's questions, the 30th to 49th, are asked; without it, the bundled ones.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
make_env
exec "$PY" -m scripts.evaluate paper-13b "$@"
