#!/usr/bin/env bash
# Serves a pipeline over HTTP, with OpenAI's protocol: bash run_server.sh [PRESET] [key=value ...], or --help.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/scripts/env.sh"
if [ -x "$ROOT/board/bin/python" ]; then PY="$ROOT/board/bin/python"; else make_env serve/requirements.txt; fi  # a board has a torch of its own
FLOWSPEC_COMMAND="bash run_server.sh" exec "$PY" -m flowspec serve "$@"
