# Common functions of the commands for boards: `source scripts/boards.sh` sets $ROOT, the repository, and $SSH.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
SSH="${SSH:-ssh}"

fail() {
    echo "flowspec: $*" >&2
    exit 2
}

find_python() {
    local name
    for name in ${PYTHON:-} "$ROOT/.venv/bin/python" python3; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 8))' 2>/dev/null; then echo "$name" && return; fi
    done
    fail "no Python 3.8 or newer was found: name one, as in PYTHON=FILE bash scripts/${0##*/}"
}

# Prints the comment with which a script begins.
show_help() {
    sed -n '2,/^set -e/s/^# \{0,1\}//p' "$0" && exit 0
}

# project_python ARGUMENT ...: a Python that finds the repository's packages, from any folder
project_python() {
    local python
    python="$(find_python)" || exit 2
    PYTHONPATH="$ROOT" PYTHONSAFEPATH=1 "$python" "$@"
}

# quoted TEXT: quotes it as one word for the shell of a board
quoted() {
    printf "'%s'" "${1//\'/\'\\\'\'}"
}

# at BOARD FOLDER: prints where this is, as rsync and people read it; the board . is this machine
at() {
    if [ "$1" = . ]; then echo "$2"; else echo "$1:$2"; fi
}

# over BOARD COMMAND: runs it there, in the home of its user, with our standard input
over() {
    if [ "$1" = . ]; then (cd && sh -c "$2"); else $SSH -- "$1" "$2"; fi
}

# read_boards HOSTS FILE: writes a line for each board of the hosts file; exits if it is invalid or not given
read_boards() {
    [ -n "$1" ] || fail "which boards? Give hosts=FILE, with a line for each rank, as 192.168.1.11 user=nvidia"
    project_python -m cluster.board "$1" >"$2" || exit 2
}

# check_ranks WORD: exits if ranks=WORD is no list of ranks
check_ranks() {
    [ -z "$1" ] || [[ "$1" =~ ^[0-9]+(,[0-9]+)*$ ]] || fail "ranks=$1 is not possible: write numbers with commas between, as ranks=0,3"
}
