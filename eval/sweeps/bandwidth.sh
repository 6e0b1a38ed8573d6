#!/usr/bin/env bash
# The paper's bandwidth figure: tokens/s at 125, 250, 500 and 1000 Mbit/s.
#   bash eval/sweeps/bandwidth.sh [PRESET] [key=value ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/env.sh"
make_env
exec "$PY" -m scripts.sweep bandwidth "$@"
