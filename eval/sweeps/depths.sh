#!/usr/bin/env bash
# The paper's grid of draft depths, all of it: tokens/s with either tree 1 to 6 levels deep.
#   bash eval/sweeps/depths.sh [PRESET] [key=value ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/env.sh"
make_env
exec "$PY" -m scripts.sweep depths "$@"
