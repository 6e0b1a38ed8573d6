#!/usr/bin/env bash
# Lets this board take part in every run, server and evaluation of rank 0, until it is stopped:
#
#   bash run_worker.sh hosts=hosts.txt [model_dir=splits/NAME] [key=value ...]
#
# It takes all keys of a run from rank 0 but those of this machine: model_dir, device, threads_per_rank, keys, hosts,
# master, wait and debug. Rank 0 is started as usual, by run_jetson.sh, run_server.sh or an evaluation. Without
# model_dir= this board receives its part of the model from rank 0, which needs the keys of scripts/make_keys.sh. The
# code must be that of rank 0 (scripts/push.sh). Ctrl-C ends it; docs/two_pcs.md has a unit of systemd.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/scripts/env.sh"
show_help "$@"
export FLOWSPEC_WORKER=1 FLOWSPEC_COMMAND="bash run_worker.sh"
PAUSE=2 # seconds between the end of a run and the wait for the next one
case " $* " in *" wait="*) ;; *) set -- "$@" wait=86400 ;; esac # a day; then it begins to wait again

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
