#!/usr/bin/env bash
# scripts/run_pipe_eval_13B.sh, where the original's README looks for it.
exec bash "$(dirname "${BASH_SOURCE[0]}")/scripts/run_pipe_eval_13B.sh" "$@"
