#!/usr/bin/env bash
# Tree size: tokens/s by the number of guesses after a miss.
#   bash eval/sweeps/init_total_token.sh [PRESET] [key=value ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/env.sh"
make_env
exec "$PY" -m scripts.sweep init_total_token "$@"
