#!/usr/bin/env bash
# Ablation, dynamic expansion: after a hit, in turns without news, both, neither.
#   bash eval/sweeps/expand.sh [PRESET] [key=value ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/env.sh"
make_env
exec "$PY" -m scripts.sweep expand "$@"
