#!/usr/bin/env bash
# The ablation of FlowSpec: score-ordered segments, pruning and expansion, each left out alone, and all together.
#   bash eval/sweeps/ablation.sh [PRESET] [key=value ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/env.sh"
make_env
exec "$PY" -m scripts.sweep ablation "$@"
