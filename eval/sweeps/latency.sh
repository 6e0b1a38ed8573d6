#!/usr/bin/env bash
# The latency at which tensor parallelism wins: tokens/s with messages of 1 to 0.01 ms between emulated fast devices.
#   bash eval/sweeps/latency.sh [PRESET] [key=value ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/env.sh"
make_env
exec "$PY" -m scripts.sweep latency "$@"
