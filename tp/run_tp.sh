#!/usr/bin/env bash
# Answers a question with a model whose layers all ranks share, without a pipeline:
#   bash tp/run_tp.sh [PRESET] [tp_type=tp|galaxy] [tp=RANKS] [key=value ...], or --help
set -euo pipefail

wrong() {
    echo "flowspec: $*" >&2
    exit 2
}

method="" words=()
for word in "$@"; do
    case "$word" in
        tp_type=tp | tp_type=galaxy | pipeline_type=tp | pipeline_type=galaxy)
            [ -z "$method" ] || wrong "tp_type is given twice: leave one of them out"
            method="${word#*=}" ;;
        tp_type=*) wrong "$word is unknown: choose tp_type=tp or tp_type=galaxy" ;;
        pipeline_type=*) wrong "$word has a pipeline: type bash run_pipe.sh in place of bash tp/run_tp.sh" ;;
        *) words+=("$word") ;;
    esac
done
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/env.sh"
make_env
export FLOWSPEC_COMMAND="bash tp/run_tp.sh"
exec "$PY" -m scripts.generate ${words[@]+"${words[@]}"} "pipeline_type=${method:-tp}"
