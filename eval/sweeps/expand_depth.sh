#!/usr/bin/env bash
# The paper's grid of draft depths, a row: tokens/s with the tree after a hit 3 to 8 levels deep.
#   bash eval/sweeps/expand_depth.sh [PRESET] [key=value ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/env.sh"
make_env
exec "$PY" -m scripts.sweep expand_depth "$@"
