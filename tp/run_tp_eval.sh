#!/usr/bin/env bash
# Compares tensor parallelism with the pipeline, as run_eval.sh does: bash tp/run_tp_eval.sh [PRESET] [key=value ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/env.sh"
make_env
export FLOWSPEC_COMMAND="bash tp/run_tp_eval.sh"
exec "$PY" -m scripts.evaluate tensor-parallel "$@"
