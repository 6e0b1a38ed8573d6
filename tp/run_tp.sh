#!/usr/bin/env bash
# Answers a question with a model whose layers all ranks share, without a pipeline:
#   bash tp/run_tp.sh [PRESET] [tp_type=tp|galaxy] [tp=RANKS] [key=value ...], or --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/env.sh"
make_env
export FLOWSPEC_COMMAND="bash tp/run_tp.sh"
method=tp words=()
for word in "$@"; do
    case "$word" in
        tp_type=tp | tp_type=galaxy | pipeline_type=tp | pipeline_type=galaxy) method="${word#*=}" ;;
        pipeline_type=*)
            echo "flowspec: $word has a pipeline: type bash run_pipe.sh in place of bash tp/run_tp.sh" >&2
            exit 2
            ;;
        *) words+=("$word") ;;
    esac
done
exec "$PY" -m scripts.generate ${words[@]+"${words[@]}"} "pipeline_type=$method"
