#!/usr/bin/env bash
# Checks that other projects' clients understand the server: tests/test_clients.py with all of them installed.
#
#   bash scripts/check_clients.sh [pytest's options]
#
# Makes .venv-clients from tests/clients.txt (once; some minutes). It is not .venv, since a client may need another
# version of a package than the project has. The server and pytest run in .venv.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
show_help "$@"
CLIENTS="$ROOT/.venv-clients"

make_env serve/requirements.txt tests/requirements.txt
make_other_env "$CLIENTS" find_python tests/clients.txt
cd "$ROOT"
exec env FLOWSPEC_CLIENTS="$CLIENTS" "$PY" -m pytest -q tests/test_clients.py "$@"
