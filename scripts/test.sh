#!/usr/bin/env bash
# Every check of the project: ruff, mypy, then pytest, which gets the arguments: bash scripts/test.sh [pytest's options]
# Several processes take the files of tests by turns (tests/conftest.py); `-n 0` runs all in one, as a debugger needs it.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
make_env serve/requirements.txt tests/requirements.txt
cd "$ROOT"
"$PY" -m ruff check .
"$PY" -m mypy
exec "$PY" -m pytest -q -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder "$@"
