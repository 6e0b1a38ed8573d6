#!/usr/bin/env bash
# Compares the methods, and ends with the paper's table: bash run_eval.sh [PRESET] [key=value ...], or --help.
# As it is: the bundled model on a cluster that is simulated in virtual time, five questions of each data set; with
# time=real on one that is emulated in real time. Another model that is named runs as it is, on all questions.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/scripts/env.sh"
make_env
exec "$PY" -m scripts.evaluate emulated "$@"
