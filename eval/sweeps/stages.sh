#!/usr/bin/env bash
# Number of stages: tokens/s with the same model over 1, 2, 4 and 8 stages.
#   bash eval/sweeps/stages.sh [PRESET] [key=value ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/env.sh"
make_env
exec "$PY" -m scripts.sweep stages "$@"
