#!/usr/bin/env bash
# The paper's grid of draft depths, a column: tokens/s with the tree after a miss 3 to 8 levels deep.
#   bash eval/sweeps/init_depth.sh [PRESET] [key=value ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/env.sh"
make_env
exec "$PY" -m scripts.sweep init_depth "$@"
