#!/usr/bin/env bash
# Ablation, score-based step-wise verification: the best guesses first, or in the order of drafting.
#   bash eval/sweeps/score_order.sh [PRESET] [key=value ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/env.sh"
make_env
exec "$PY" -m scripts.sweep score_order "$@"
