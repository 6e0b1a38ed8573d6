#!/usr/bin/env bash
# The comparison of the paper with LLaMA-2-Chat 7B, or a PRESET, over several boards. On each board, as run_jetson.sh:
#   bash scripts/run_jetson_eval.sh [PRESET] hosts=FILE model_dir=DIR [data=DIR] [key=value ...]
# data=DIR on rank 0's board has the six real data sets: the paper's questions, the 30th to 49th, are asked; without it,
# the bundled ones.
set -euo pipefail
export FLOWSPEC_MODULE=scripts.evaluate FLOWSPEC_COMMAND="bash scripts/run_jetson_eval.sh"
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run_jetson.sh" boards-7b "$@"
