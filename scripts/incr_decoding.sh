#!/usr/bin/env bash
# Answers prompts as SpecInfer's program incr_decoding does, token by token:
#   bash scripts/incr_decoding.sh [-FLAG VALUE ...] [key=value ...], or --help.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
make_env
exec "$PY" -m scripts.spec_infer incr_decoding "$@"
