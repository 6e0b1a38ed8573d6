#!/usr/bin/env bash
# Segment size: tokens/s by the largest number of rows in a segment.
#   bash eval/sweeps/segment.sh [PRESET] [key=value ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/env.sh"
make_env
exec "$PY" -m scripts.sweep segment "$@"
