#!/usr/bin/env bash
# The comparison of the paper with LLaMA-2-Chat 13B in 4 bits, or a PRESET, over several boards; used like
# run_jetson_eval.sh.
set -euo pipefail
export FLOWSPEC_MODULE=scripts.evaluate FLOWSPEC_COMMAND="bash scripts/run_jetson_eval_13B.sh"
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run_jetson.sh" boards-13b "$@"
