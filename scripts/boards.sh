# What the commands for a hosts file share: `source scripts/boards.sh` sets $ROOT, the repository, and $SSH.

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

# check_ranks WORD: end here if ranks=WORD is no list of ranks
check_ranks() {
    [ -z "$1" ] || [[ "$1" =~ ^[0-9]+(,[0-9]+)*$ ]] || fail "ranks=$1 is not possible: write numbers with commas between, as ranks=0,3"
}
