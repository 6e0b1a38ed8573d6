# The Python environment of the project, for other scripts: `source scripts/env.sh` sets $ROOT, the repository, and $PY,
# its Python; then `make_env [LIST ...]` creates .venv from requirements.txt and further lists. If it exists already and
# the lists have not changed, that takes no time and writes nothing.

ROOT="$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PY="$ROOT/.venv/bin/python"
# Lets Python find the repository's own packages from any folder, and not packages in that folder.
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1
# Threads that wait leave their core to others, but not between two products: GNU's OpenMP spins this many times before.
# OpenMP reads both variables when torch is imported.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}" GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-10000}"

WHEELS=(--only-binary=:all: --no-binary=wavedrom)  # nothing is compiled; wavedrom is pure Python without a wheel
CPU_BUILDS=https://download.pytorch.org/whl/cpu

fail() {
    echo "flowspec: $*" >&2
    exit 2
}

# Prints the comment with which a script begins, if its first WORD asks for help.
show_help() {
    case "${1:-}" in help | -h | --help) sed -n '2,/^set/s/^#\( \|$\)//p' "$0" && exit ;; esac
}

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}

# Debian and Ubuntu leave ensurepip out of their Python, and venv needs it.
makes_venvs() {
    new_enough "$1" && "$1" -c 'import ensurepip, venv' 2>/dev/null
}

# Prints $PYTHON if it is set, else the first python3, else the newest one that has its version in its name.
find_python() {
    local name names=(python3 python3.13 python3.12 python3.11 python3.10)
    if [ -n "${PYTHON:-}" ]; then names=("$PYTHON"); fi
    for name in "${names[@]}"; do
        if makes_venvs "$name"; then
            echo "$name"
            return
        fi
    done
    [ -z "${PYTHON:-}" ] ||
        fail "PYTHON=$PYTHON is not Python 3.10 or newer with its venv module: name another, or unset PYTHON."
    fail "no Python 3.10 or newer with its venv module was found: install one (on Debian and Ubuntu: sudo apt install" \
        "python3-venv), or name it as in PYTHON=FILE bash run_pipe.sh"
}

# python_of VERSION: prints a Python of exactly that version, as 3.11, from the PATH or from pyenv; fails without one
python_of() {
    local name
    for name in "python$1" "$(pyenv prefix "$1" 2>/dev/null)/bin/python"; do
        if is_version "$name" "$1"; then
            echo "$name"
            return
        fi
    done
    return 1
}

is_version() {
    "$1" -c 'import sys; sys.exit(".".join(map(str, sys.version_info[:2])) != sys.argv[1])' "$2" 2>/dev/null
}

has_cuda() {
    [ -e /dev/nvidia0 ] || nvidia-smi -L >/dev/null 2>&1
}

# Also false for an incomplete pip, left by a start that was killed: reinstalling pip uses nearly all of its code.
has_pip() {
    "$PY" -I -m pip install -q --no-index pip >/dev/null 2>&1
}

# Copies pip's output, without most warnings, to standard error; prints pip's reason, if any, on standard output.
read_pip() {
    local line said reason="" broken="" trace=""
    while IFS= read -r line; do
        said="${line#"${line%%[![:space:]]*}"}"  # the output of a pip that pip started is indented
        case "$said" in
            *"connection broken by "*) broken="${said%: /*}" ;;  # without the page that was requested
            "WARNING: "* | "DEPRECATION: "*) continue ;;
            "ERROR: Exception:") ;;  # a traceback follows, which ends in the reason
            "Traceback ("*) trace="${reason:-begun}" ;;
            "ERROR: "*) reason="${said#ERROR: }" ;;
            "× "*) reason="${reason:-${said#× }}" ;;
            ?*) if [ "$trace" = begun ] && [ "$said" = "$line" ]; then reason="$line"; fi ;;
        esac
        echo "$line" >&2
    done
    broken="${broken##*: }"  # the innermost of nested errors
    echo "$reason${broken:+ (connection broken: ${broken%%[\"\'()]*})}"
}

# uv_install ARGUMENT ...: installs for $PY with uv, which takes seconds; fails where there is none, and where pip is set
# to indexes that uv does not know.
uv_install() {
    command -v uv >/dev/null || return
    ! "$PY" -I -m pip config list 2>/dev/null | grep -Eq 'index.url|no.index' || return
    UV_HTTP_TIMEOUT=15 UV_HTTP_RETRIES=0 uv --quiet pip install --python "$PY" "${WHEELS[@]}" \
        ${PYTHONDONTWRITEBYTECODE:+--compile-bytecode} "$@" 2>/dev/null
}

# Shows of pip's output the large downloads, and that they are unpacked, which take a minute together.
show_downloads() {
    local line file
    while IFS= read -r line; do
        case "$line" in
            *"Downloading "*" MB)" | *"Using cached "*" MB)")
                file="${line##*Downloading }" file="${file##*Using cached }" file="${file##*/}"
                echo "flowspec:   ${file%%-*} (${line##* (}" >&3 ;;
            "Installing collected packages: "*) echo "flowspec:   unpacking them ..." >&3 ;;
        esac
    done
}

# pip_install ARGUMENT ...: installs for $PY; prints pip's reason if that fails. Packages without a wheel are built in
# isolation, as pips from 23.1 on do anyway: older ones would build in .venv, with an unsuitable setuptools. Python
# compiles a module when it first needs it; all of them are compiled here only if $PYTHONDONTWRITEBYTECODE forbids that,
# since else each start would compile its modules again. There is one try, unless $PIP_RETRIES asks for more: without a
# network the reason comes at once.
pip_install() {
    PIP_USE_PEP517=1 PIP_RETRIES="${PIP_RETRIES:-0}" "$PY" -I -m pip --disable-pip-version-check --no-color install \
        --progress-bar off --no-compile ${PYTHONDONTWRITEBYTECODE:+--compile} "$@" 2>&1 > >(show_downloads) | read_pip
    return "${PIPESTATUS[0]}"
}

# pip_failed LIST CODE REASON: exits with pip's own reason, and with a remedy.
pip_failed() {
    local reason="${3:-it ended with exit code $2}" remedy="fix that"
    case "$reason" in
        *"connection broken"* | "No matching distribution"*) remedy="check the network and pip's settings" ;;
        *"Errno 28"*) remedy="free some space in $ROOT and ${TMPDIR:-/tmp}" ;;
    esac
    fail "pip could not install $1: $reason; $remedy, then type the command again."
}

# The CPU build needs no gigabytes of CUDA libraries, but is on torch's own index. One query there, without retries:
# offline the build may still be found among pip's own links, and otherwise the caller takes the general build.
pip_cpu_build() {
    uv_install --extra-index-url "$CPU_BUILDS" "$@" ||
        pip_install --retries 0 --timeout 15 --extra-index-url "$CPU_BUILDS" "$@" 2>/dev/null
}

# Without a CUDA device, installs torch's CPU build before requirements.txt, which it satisfies.
install_cpu_torch() {
    local torch reason
    torch="$(sed -n 's/^\(torch==[0-9.]*\).*/\1/p' "$ROOT/requirements.txt")"
    if [ -z "$torch" ] || [ "$(uname -sm)" != "Linux x86_64" ] || has_cuda; then return; fi
    "$PY" -c "from importlib.metadata import version as v; assert 'torch==' + v('torch').split('+')[0] == '$torch'" \
        2>/dev/null && return
    echo "flowspec: installing the CPU build of $torch ..." >&2
    reason="$(pip_cpu_build --no-deps "$torch+cpu")" ||
        echo "flowspec: no CPU build was installed ($reason); the general build follows (larger)." >&2
}

# --clear: an existing folder is unusable or incomplete. pip comes second, since venv does not report why pip failed.
make_venv() {
    local python said
    python="$(find_python)" || exit 2
    echo "flowspec: making the environment .venv with $("$python" --version 2>&1) (once; some minutes) ..." >&2
    said="$("$python" -m venv --clear --without-pip "$ROOT/.venv" 2>&1)" ||
        fail "$python could not make $ROOT/.venv: ${said##*$'\n'}; fix that, then type the command again."
    said="$("$PY" -I -m ensurepip --default-pip 2>&1 >/dev/null | read_pip 2>/dev/null; exit "${PIPESTATUS[0]}")" ||
        pip_failed "itself into $ROOT/.venv" $? "$said"
    # An older pip takes twice the time for the lists; it serves where no newer one is found.
    pip_install --retries 0 --timeout 15 "pip>=24.1" >/dev/null 2>&1 3>/dev/null || true
}

stamp_of() {
    echo "$ROOT/.venv/.installed-${1//\//-}"
}

# is_installed LIST: whether this version of the list is installed, by its stamp
is_installed() {
    [ "$(cksum <"$ROOT/$1")" = "$(cat "$(stamp_of "$1")" 2>/dev/null)" ]
}

install_list() {
    local list="$1" sum reason
    if is_installed "$list"; then return; fi
    sum="$(cksum <"$ROOT/$list")"
    if [ "$list" = requirements.txt ]; then install_cpu_torch; fi
    echo "flowspec: installing $list ..." >&2
    if ! uv_install -r "$ROOT/$list"; then
        reason="$(pip_install "${WHEELS[@]}" -r "$ROOT/$list")" || pip_failed "$list" $? "$reason"
    fi
    echo "$sum" >"$(stamp_of "$list")" || fail "$(stamp_of "$list") could not be written; fix that, then start again."
}

# Waits while another start fills the same .venv; then it is complete. The folder itself is locked, also by pip if that
# outlives this script. If a folder cannot be locked, as on NFS, nobody waits.
wait_for_others() {
    exec 9<"$ROOT"
    if flock -n 9 2>/dev/null || [ $? != 1 ]; then return; fi
    echo "flowspec: another start is filling .venv; waiting for it ..." >&2
    flock 9
}

fill_env() (
    exec 3>&2  # for progress, also where messages are discarded
    local list place="$ROOT/.venv"
    [ -e "$place" ] || place="$ROOT"
    [ -w "$place" ] || fail "$ROOT/.venv is not ready, or you may not read it, and you may not write to $place: let its" \
        "owner type the command once, or clone the project into a folder of your own."
    trap 'echo "flowspec: stopped; type the command again to continue." >&2; exit 130' INT
    wait_for_others
    if ! new_enough "$PY" || ! has_pip; then make_venv; fi
    for list in "$@"; do install_list "$list"; done
)

make_env() {
    local list
    for list in requirements.txt "$@"; do
        if ! [ -x "$PY" ] || ! is_installed "$list"; then
            fill_env requirements.txt "$@" || exit
            return
        fi
    done
}

# make_other_env FOLDER FIND LIST [TORCH]: makes another environment than .venv, with the Python that FIND prints, a
# list of packages, and this version of PyPI's torch. $PY is local, so pip_install installs for that Python.
make_other_env() {
    local python sum reason list="$3" torch="${4:-}" PY="$1/bin/python"
    exec 3>&2
    sum="$torch $(cksum <"$ROOT/$list")"
    if [ "$sum" = "$(cat "$1/.installed" 2>/dev/null)" ]; then return; fi
    python="$("$2")" || exit 2
    echo "flowspec: making the environment ${1##*/} with $("$python" --version)${torch:+ and torch $torch} ..." >&2
    "$python" -m venv "$1" >&2 || fail "$python could not make ${1##*/}: install its venv module."
    if [ -n "$torch" ]; then pip_cpu_build --no-deps "torch==$torch+cpu" >/dev/null || true; fi
    reason="$(pip_install ${torch:+"torch==$torch"} -r "$ROOT/$list")" || pip_failed "$list" $? "$reason"
    echo "$sum" >"$1/.installed"
}
