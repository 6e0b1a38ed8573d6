#!/usr/bin/env bash
# Starts this board's rank of a pipeline over several hosts: bash run_jetson.sh [PRESET] [key=value ...], or --help.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1 TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}" GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-10000}"  # as in scripts/env.sh
export FLOWSPEC_BOARD=1 FLOWSPEC_COMMAND="${FLOWSPEC_COMMAND:-bash run_jetson.sh}"

show_usage() {
    cat <<END
Type the same command on each board, in any order. Each starts its own rank and waits for the others.

  $FLOWSPEC_COMMAND hosts=hosts.txt "prompt=What does a baker do?"
  NODE_RANK=3 MASTER_ADDR=192.168.1.11 $FLOWSPEC_COMMAND model_dir=splits/vicuna

A hosts file has one line for the board of each rank, rank 0 first; a board finds its own line by its addresses:

  192.168.1.11  user=nvidia  folder=flowspec  interface=eth0

user and folder, the repository on the board, are for scripts/push.sh. A line with "spare" (or "spare=2,3", for these
ranks) is a board that waits for another one to be lost, and then takes its place. Instead of a hosts file, or with it:

  NODE_RANK            this board's rank, from 0 (default: the line of the hosts file that has an address of this board)
  MASTER_ADDR          address of rank 0's board, also master=HOST (default: the first line of the hosts file)
  MASTER_PORT          its port, also master=:PORT (default: 29500)
  GLOO_SOCKET_IFNAME   the network interface to the other boards (default: the one that leads to rank 0's board)
  PYTHON               a Python with torch (default: board/bin/python, else python3, else .venv/bin/python)

A board needs only its own folder of the split model: model_dir=FOLDER holds stage_RANK. Step by step: docs/jetson.md.

END
}

has_torch() {
    "$1" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' 2>/dev/null
}

# Finds the board's own Python with NVIDIA's torch. Nothing is installed, since pip would replace that by PyPI's torch.
find_python() {
    local name
    if [ -n "${PYTHON:-}" ]; then
        if has_torch "$PYTHON"; then echo "$PYTHON" && return; fi
        echo "flowspec: PYTHON=$PYTHON has no torch: name another, or unset PYTHON." >&2
        return 1
    fi
    for name in "$ROOT/board/bin/python" python3 "$ROOT/.venv/bin/python"; do
        if has_torch "$name"; then echo "$name" && return; fi
    done
    echo "flowspec: no Python with torch was found: install NVIDIA's torch as docs/jetson.md says (on a PC, start run_pipe.sh" \
        "once), or name one as in PYTHON=FILE $FLOWSPEC_COMMAND" >&2
    return 1
}

case " $* " in *" --help "* | *" -h "* | *" help "*) show_usage ;; esac
PY="$(find_python)"
exec "$PY" -m "${FLOWSPEC_MODULE:-scripts.generate}" "$@"
