#!/usr/bin/env bash
# Runs every check of the project: ruff, pytest, which gets the arguments, and mypy at the same time, reported last:
# bash scripts/test.sh [pytest's options]
# bash scripts/test.sh core [pytest's options] runs only the twelve files that test the core, in about two minutes.
# Several processes share the files of tests (tests/conftest.py); `-n 0` runs all in one, as a debugger needs it.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
show_help "$@"
# Modules are compiled when they are first needed: else all of the packages would be compiled while they are installed,
# and the project again in each of the many processes that tests start.
export PYTHONDONTWRITEBYTECODE=
make_env serve/requirements.txt tests/requirements.txt
cd "$ROOT"

parallel=(-n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder)
core=(exact tree cache prunes target rules wire stage sample decode mixture golden)
core=("${core[@]/#/tests/test_}")
if [ "${1:-}" = core ]; then
    exec "$PY" -m pytest -q "${parallel[@]}" "${core[@]/%/.py}" "${@:2}"
fi

"$PY" -m ruff check .
exec 3< <("$PY" -m mypy 2>&1)
types=$! code=0
# pytest keeps the tests as it has rewritten their assertions; without that, each of its processes would do so.
[ -d tests/__pycache__ ] || "$PY" -m pytest -q -n 0 --collect-only >/dev/null 3<&- || true
"$PY" -m pytest -q "${parallel[@]}" "$@" 3<&- || code=$?
cat <&3
wait "$types" || code=$?
exit "$code"
