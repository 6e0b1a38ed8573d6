#!/usr/bin/env bash
# Checks that tests/data holds what a newer transformers computes, of families that the project's own does not have.
#
#   bash scripts/check_newest.sh [write=true]
#
# Makes .venv-newest with Python 3.11 or newer (from the PATH, from pyenv, or from PYTHON=FILE), torch's CPU build and
# transformers 5.24 (once; some minutes), and computes there the greedy texts and log-probabilities of tiny random models
# again, whose weights are drawn by the names of tensors. write=true writes the files instead, as after a new family.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
show_help "$@"
NEWEST="$ROOT/.venv-newest"

find_newest_python() {
    local version
    if [ -n "${PYTHON:-}" ]; then
        "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
            fail "PYTHON=$PYTHON is not Python 3.11 or newer: name another, or unset PYTHON."
        echo "$PYTHON" && return
    fi
    for version in 3.11 3.12 3.13; do python_of $version && return; done
    fail "no Python 3.11 or newer was found: install one (pyenv install 3.11), or name it as in PYTHON=FILE bash $0"
}

make_other_env "$NEWEST" find_newest_python tests/requirements_newest.txt 2.13.0
cd "$ROOT"
"$NEWEST/bin/python" -m tests.newest "$@"
