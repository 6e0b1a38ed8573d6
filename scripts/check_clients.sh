#!/usr/bin/env bash
# Whether other people's clients get from the server what it writes: tests/test_clients.py with all of them installed.
#
#   bash scripts/check_clients.sh [pytest's options]
#
# Makes .venv-clients from tests/clients.txt (once; some minutes). It is not .venv, since a client may need another
# version of a package than the project has. The server and pytest run in .venv.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
case "${1:-}" in help | -h | --help) sed -n '2,/^set/s/^#\( \|$\)//p' "${BASH_SOURCE[0]}" && exit ;; esac
CLIENTS="$ROOT/.venv-clients"

# The functions of env.sh install for $PY, which here is that of the clients for a while.
make_clients() {
    local python sum reason stamp="$CLIENTS/.installed" PY="$CLIENTS/bin/python"
    sum="$(cksum <"$ROOT/tests/clients.txt")"
    if [ "$sum" = "$(cat "$stamp" 2>/dev/null)" ]; then return; fi
    python="$(find_python)" || exit 1
    echo "flowspec: making the environment ${CLIENTS##*/} with $("$python" --version) ..." >&2
    "$python" -m venv --clear "$CLIENTS" >&2 || fail "$python could not make ${CLIENTS##*/}: install its venv module."
    reason="$(pip_install -r "$ROOT/tests/clients.txt")" || pip_failed tests/clients.txt $? "$reason"
    echo "$sum" >"$stamp"
}

make_env serve/requirements.txt tests/requirements.txt
make_clients
cd "$ROOT"
exec env FLOWSPEC_CLIENTS="$CLIENTS" "$PY" -m pytest -q tests/test_clients.py "$@"
