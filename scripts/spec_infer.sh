#!/usr/bin/env bash
# Answers prompts as SpecInfer's program spec_infer does, with a small model that guesses:
#   bash scripts/spec_infer.sh [-FLAG VALUE ...] [key=value ...], or --help.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
make_env
exec "$PY" -m scripts.spec_infer spec_infer "$@"
