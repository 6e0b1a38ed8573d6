#!/usr/bin/env bash
# The ablation of FlowSpec: score-ordered segments, pruning and expansion, each left out, and all of them.
#   bash eval/sweeps/ablation.sh [PRESET] [key=value ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/env.sh"
make_env
exec "$PY" -m scripts.sweep ablation "$@"
