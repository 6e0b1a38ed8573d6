#!/usr/bin/env bash
# The paper's grid of draft depths, its diagonal: tokens/s with both trees 3 to 8 levels deep.
#   bash eval/sweeps/depth.sh [PRESET] [key=value ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/env.sh"
make_env
exec "$PY" -m scripts.sweep depth "$@"
