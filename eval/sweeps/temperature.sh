#!/usr/bin/env bash
# The paper's tables at T = 0 and 1, and temperatures between: tokens/s by temperature.
#   bash eval/sweeps/temperature.sh [PRESET] [key=value ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/env.sh"
make_env
exec "$PY" -m scripts.sweep temperature "$@"
