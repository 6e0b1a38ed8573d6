#!/usr/bin/env bash
# Answers a prompt with a model that is split over a pipeline: bash run_pipe.sh [PRESET] [key=value ...], or --help.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/scripts/env.sh"
make_env
FLOWSPEC_COMMAND="bash run_pipe.sh" exec "$PY" -m flowspec run "$@"
