#!/usr/bin/env bash
# Lets this board take part in every run, server and evaluation of rank 0, until it is stopped:
#
#   bash run_worker.sh [hosts=hosts.txt] [model_dir=splits/NAME] [key=value ...]
#   bash run_worker.sh status [port=8000]   on rank 0's machine: the boards of its server (status --help)
#
# Rank 0 finds it by run_pipe.sh, run_server.sh or an evaluation with hosts=auto, and asks once for the code that is
# shown here. With hosts=FILE it looks for no others: then scripts/make_keys.sh makes the keys, and rank 0 has this file.
# It takes all keys of a run from rank 0 but those of this machine: model_dir, device, threads_per_rank, keys, hosts,
# master, wait and debug. Without model_dir= this board receives its part of the model from rank 0. The code must be that
# of rank 0. Ctrl-C ends it; docs/two_pcs.md has a unit of systemd.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/scripts/env.sh"
case " $* " in *" --help "* | *" -h "* | *" help "*) if [ "${1:-}" != status ]; then show_help --help; fi ;; esac
if [ -z "${PYTHON:-}" ] && ! [ -x "$ROOT/board/bin/python" ]; then make_env && export PYTHON="$PY"; fi
export FLOWSPEC_COMMAND="bash run_worker.sh"
if [ "${1:-}" = status ]; then FLOWSPEC_MODULE=launch.status exec bash "$ROOT/run_jetson.sh" "${@:2}"; fi
export FLOWSPEC_WORKER=1
PAUSE=2 # seconds between the end of a run and the wait for the next one
case " $* " in *" hosts="*) ;; *) if [ -z "${NODE_RANK:-}" ]; then set -- "$@" hosts=auto; fi ;; esac
case " $* " in *" wait="*) ;; *) set -- "$@" wait=86400 ;; esac # a day; then it begins to wait again

FLOWSPEC_MODULE=config.cli bash "$ROOT/run_jetson.sh" "$@" # a mistyped word would fail again and again

stop() {
    trap - INT TERM
    if [ -n "${run:-}" ]; then kill "$run" 2>/dev/null || true; wait "$run" 2>/dev/null || true; fi
    echo "flowspec: this worker is stopped" >&2
    exit 130
}
trap stop INT TERM

while true; do
    bash "$ROOT/run_jetson.sh" "$@" &
    run=$!
    wait "$run" || true
    run=""
    echo "flowspec: this worker waits for the next run of rank 0" >&2
    sleep "$PAUSE"
done
