# The Python environment of the project, for other scripts: `source scripts/env.sh` sets $ROOT, the repository, and $PY,
# its Python; then `make_env [LIST ...]` makes .venv from requirements.txt and further lists. If it is there already and
# the lists have not changed, that takes no time.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PY="$ROOT/.venv/bin/python"
# The repository's own packages are found from any folder, and none of that folder's instead.
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1

fail() {
    echo "flowspec: $*" >&2
    exit 1
}

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}

# $PYTHON if it is set, else the first python3, else the newest that is named by its version.
find_python() {
    if [ -n "${PYTHON:-}" ]; then
        new_enough "$PYTHON" || fail "PYTHON=$PYTHON is not Python 3.10 or newer: name another, or unset PYTHON."
        echo "$PYTHON"
        return
    fi
    local name
    for name in python3 python3.13 python3.12 python3.11 python3.10; do
        if new_enough "$name"; then
            echo "$name"
            return
        fi
    done
    fail "no Python 3.10 or newer was found: install one, or name it as in PYTHON=FILE bash run_pipe.sh"
}

has_cuda() {
    [ -e /dev/nvidia0 ] || nvidia-smi -L >/dev/null 2>&1
}

make_venv() {
    local python
    python="$(find_python)" || exit 1
    echo "flowspec: making the environment .venv with $("$python" --version 2>&1) (once; some minutes) ..." >&2
    # --clear: what is there cannot be used, or is half made
    "$python" -m venv --clear "$ROOT/.venv" >&2 ||
        fail "$python could not make .venv: install its venv module (on Debian and Ubuntu: sudo apt install python3-venv)."
}

pip_install() {
    "$PY" -m pip install --disable-pip-version-check -qq "$@" >&2
}

# Without a CUDA device: the CPU build, which needs no gigabytes of CUDA libraries. One look, no retries: offline it may
# still be found among pip's own links, and else the general build follows from requirements.txt.
install_cpu_torch() {
    local torch
    torch="$(sed -n 's/^\(torch==[0-9.]*\).*/\1/p' "$ROOT/requirements.txt")"
    if [ "$(uname -sm)" != "Linux x86_64" ] || has_cuda; then return; fi
    "$PY" -c "from importlib.metadata import version as v; assert 'torch==' + v('torch').split('+')[0] == '$torch'" \
        2>/dev/null && return
    echo "flowspec: installing the CPU build of $torch ..." >&2
    pip_install --no-deps --retries 0 --timeout 15 --extra-index-url https://download.pytorch.org/whl/cpu "$torch+cpu" ||
        echo "flowspec: the CPU build was not found; the general build follows (larger)." >&2
}

# Installs one list of requirements, unless its stamp says that this very list is installed.
install_list() {
    local list="$1" stamp sum
    stamp="$ROOT/.venv/.installed-$(echo "$list" | tr / -)"
    sum="$(cksum <"$ROOT/$list")"
    if [ "$sum" = "$(cat "$stamp" 2>/dev/null)" ]; then return; fi
    if [ "$list" = requirements.txt ]; then install_cpu_torch; fi
    echo "flowspec: installing $list ..." >&2
    pip_install -r "$ROOT/$list" ||
        fail "pip could not install $list (its reason stands above): check the network, then start again."
    echo "$sum" >"$stamp"
}

make_env() {
    local list
    if ! [ -x "$PY" ] || ! [ -e "$ROOT/.venv/.installed-requirements.txt" ]; then
        if ! new_enough "$PY" || ! "$PY" -m pip --version >/dev/null 2>&1; then make_venv; fi
    fi
    for list in requirements.txt "$@"; do install_list "$list"; done
}
