#!/usr/bin/env bash
# Compares the methods, and prints the paper's table at the end: bash run_eval.sh [PRESET] [key=value ...], or --help.
# Without a preset SmolLM2, and with toy the bundled model, on a cluster in virtual time, five questions of each data
# set; time=real emulates the cluster in real time. Another model runs on this machine as it is, on all questions.
# bash run_eval.sh paper [table|bandwidth|depths] prints the paper's figures beside ours (paper --help).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/scripts/env.sh"
make_env
if [ "${1:-}" = paper ]; then
    exec "$PY" -m scripts.paper "${@:2}"
fi
FLOWSPEC_COMMAND="bash run_eval.sh" exec "$PY" -m flowspec eval "$@"
