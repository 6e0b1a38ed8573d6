#!/usr/bin/env bash
# Ablation, draft management: what died on its way is dropped, or computed to its end.
#   bash eval/sweeps/prune.sh [PRESET] [key=value ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/env.sh"
make_env
exec "$PY" -m scripts.sweep prune "$@"
