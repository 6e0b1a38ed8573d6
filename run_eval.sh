#!/usr/bin/env bash
# Compares the methods, and ends with the paper's table: bash run_eval.sh [PRESET] [key=value ...], or --help.
# Without a preset SmolLM2, and with toy the bundled model, on a cluster that is simulated in virtual time, five
# questions of each data set; time=real emulates the cluster in real time. Another model runs as it is, on all questions.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/scripts/env.sh"
make_env
exec "$PY" -m scripts.evaluate emulated "$@"
