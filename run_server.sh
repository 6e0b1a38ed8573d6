#!/usr/bin/env bash
# Serves a model that is split over a pipeline, by OpenAI's protocol: bash run_server.sh [PRESET] [key=value ...], or --help.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/scripts/env.sh"
make_env
exec "$PY" -m scripts.serve "$@"
