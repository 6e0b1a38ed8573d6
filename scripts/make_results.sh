#!/usr/bin/env bash
# Makes the tables and plots of README.md and docs/ again, by one command and from one commit: make_results.sh --help.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
make_env
exec "$PY" -m scripts.results "$@"
