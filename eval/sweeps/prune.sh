#!/usr/bin/env bash
# Ablation, draft management: rows that died on their way are dropped, or computed to the end.
#   bash eval/sweeps/prune.sh [PRESET] [key=value ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/env.sh"
make_env
exec "$PY" -m scripts.sweep prune "$@"
