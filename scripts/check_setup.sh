#!/usr/bin/env bash
# Checks that a first start installs all it needs, with the pip of any distribution: scripts/env.sh is tried in fresh
# folders, with the server's packages. Finally the index of packages is queried for every line of all lists, also for
# Pythons that are not installed here.
#
#   bash scripts/check_setup.sh [torch=false] [PYTHON ...]
#
# Each PYTHON (default: those of 3.10 to 3.13 on the PATH or from pyenv) is tried with its own pip; 3.10 and 3.11 also
# with pip 22.0.2, that of Ubuntu 22.04, and 23.0.1, that of Debian 12. pip's cache is not used, so that packages
# without a wheel are built. torch=false leaves out torch and what needs it, most of the download, but not the
# setuptools that torch requires. Everything goes into a temporary folder, which is deleted.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
OLD_PIPS=("pip==22.0.2 setuptools==59.6.0" "pip==23.0.1 setuptools==66.1.1")
TORCH=true PYTHONS=() FAILED=0

# add_python NAME: adds it to those that are tried, unless its version is among them
add_python() {
    local version name
    version="$("$1" --version)"
    for name in "${PYTHONS[@]}"; do
        if [ "$("$name" --version)" = "$version" ]; then return; fi
    done
    PYTHONS+=("$("$1" -c 'import sys; print(sys.executable)')")
}

read_words() {
    local word
    for word in "$@"; do
        case "$word" in
            help | -h | --help) show_help "$word" ;;
            torch=true | torch=false) TORCH="${word#*=}" ;;
            *)
                makes_venvs "$word" || fail "$word is neither torch=false nor a Python from 3.10 on with its venv module."
                add_python "$word" ;;
        esac
    done
    if [ ${#PYTHONS[@]} -gt 0 ]; then return; fi
    for word in python3 "$(python_of 3.10)" "$(python_of 3.11)" "$(python_of 3.12)" "$(python_of 3.13)"; do
        if makes_venvs "$word"; then add_python "$word"; fi
    done
    [ ${#PYTHONS[@]} -gt 0 ] || fail "no Python from 3.10 on was found: name one, as in bash $0 PYTHON"
}

# Copies what a first start needs of the project into a folder that has a space in its name.
copy_project() {
    rm -rf "$CLONE"
    mkdir -p "$CLONE/scripts" "$CLONE/serve"
    cp "$ROOT/scripts/env.sh" "$CLONE/scripts/"
    cp "$ROOT/requirements.txt" "$CLONE/"
    cp "$ROOT/serve/requirements.txt" "$CLONE/serve/"
    if [ "$TORCH" = true ]; then return; fi
    sed -i -e 's/^torch==.*/setuptools>=77.0.3/' -e '/^bitsandbytes==/d' "$CLONE/requirements.txt"
}

# first_start PYTHON [PIP SETUPTOOLS]: whether it ends well, and what it installed can be imported
first_start() {
    local python="$1" own="$CLONE/.venv/bin/python" modules="fastapi, fastchat.conversation, matplotlib, tokenizers, wavedrom"
    shift
    if [ "$TORCH" = true ]; then modules+=", bitsandbytes, torch"; fi
    copy_project
    if [ $# -gt 0 ]; then
        "$python" -m venv "$CLONE/.venv" && "$own" -I -m pip install -q "$@" || return
    fi
    PYTHON="$python" bash -c 'set -euo pipefail; source "$1/scripts/env.sh"; make_env serve/requirements.txt' start "$CLONE" &&
        "$own" -I -c "import $modules"
}

# try PYTHON [PIP SETUPTOOLS]: prints a line about a first start; its whole output, if it failed
try() {
    local about
    about="$("$1" --version) with ${2:-its own pip}"
    if first_start "$@" >"$OUT/log" 2>&1; then
        echo "ok: $about"
    else
        echo "FAILED: $about"
        sed 's/^/  /' "$OUT/log"
        FAILED=$((FAILED + 1))
    fi
}

# The tests query the index for lines that are not installed on this machine; with $FLOWSPEC_INDEX for all of them.
ask_index() (
    make_env serve/requirements.txt tests/requirements.txt
    FLOWSPEC_INDEX=all exec "$PY" -m pytest -q -n 0 -rs "$ROOT/tests/test_requirements.py"
)

read_words "$@"
OUT="$(mktemp -d)" CLONE="$OUT/a clone"
trap 'rm -rf "$OUT"' EXIT
export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
for python in "${PYTHONS[@]}"; do
    try "$python"
    if is_version "$python" 3.10 || is_version "$python" 3.11; then
        for old in "${OLD_PIPS[@]}"; do try "$python" $old; done
    fi
done
ask_index || FAILED=$((FAILED + 1))
[ $FAILED = 0 ] || fail "$FAILED of these checks failed, for the reasons above."
