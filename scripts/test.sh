#!/usr/bin/env bash
# Every check of the project: ruff, mypy, then pytest, which gets the arguments: bash scripts/test.sh [pytest's options]
# As many tests run at once as there are cores, but no more than 4, each with torch in memory; those of a file follow one
# another, since they share fixtures. With -n 0 all run in one process, as a debugger needs it.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
make_env tests/requirements.txt
cd "$ROOT"
"$PY" -m ruff check .
"$PY" -m mypy
exec "$PY" -m pytest -q -n auto --maxprocesses 4 --dist loadfile "$@"
