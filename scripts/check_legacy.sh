#!/usr/bin/env bash
# Checks that a board would write the same texts as the current torch: on CPU, with the board's Python and torch.
#
#   [BOARD=jetpack6] bash scripts/check_legacy.sh [key=value ...]
#
# The board is jetpack5 (Python 3.8, torch 1.11; default) or jetpack6 (Python 3.10, torch 2.3). Makes .venv-legacy, or
# .venv-jetpack6, from requirements_jetson.txt and PyPI's torch (once; some minutes), runs the doctor, splits the
# bundled model there, and runs it in five processes, in both environments, in float32: ar, and continuous and streaming
# with draft=eagle+suffix, at temperature 0 and 1. The token ids must be the same. Python is taken from the PATH, from
# pyenv, or from PYTHON38=FILE (PYTHON310=FILE). Further keys go to every run.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
show_help "$@"
case "${BOARD:-jetpack5}" in
    jetpack5) LEGACY="$ROOT/.venv-legacy" VERSION=3.8 TORCH=1.11.0 NAMED=PYTHON38 ;;
    jetpack6) LEGACY="$ROOT/.venv-jetpack6" VERSION=3.10 TORCH=2.3.0 NAMED=PYTHON310 ;;
    *) fail "BOARD=$BOARD is unknown: give jetpack5 or jetpack6." ;;
esac

find_legacy_python() {
    if [ -n "${!NAMED:-}" ]; then
        is_version "${!NAMED}" $VERSION || fail "$NAMED=${!NAMED} is not Python $VERSION: name another, or unset $NAMED."
        echo "${!NAMED}"
    else
        python_of $VERSION || fail "no Python $VERSION was found: install one (pyenv install $VERSION), or name it as in" \
            "$NAMED=FILE bash $0"
    fi
}

# ask NAME PYTHON METHOD TEMPERATURE: one answer in five processes, saved as NAME-METHOD-TEMPERATURE.json
ask() {
    local log="$OUT/$1-$3-$4.log"
    "$2" -m scripts.generate "model_dir=$OUT/split" device=cpu dtype=float32 seed=7 max_new_tokens=96 \
        "pipeline_type=$3" draft=eagle+suffix "temperature=$4" "output=$OUT/$1-$3-$4.json" "${KEYS[@]}" >"$log" 2>&1 ||
        fail "the run of $3 at temperature $4 in the $1 environment failed: $(tail -n 3 "$log")"
}

make_env
make_other_env "$LEGACY" find_legacy_python requirements_jetson.txt "$TORCH"
KEYS=("$@")
OUT="$(mktemp -d)"
trap 'rm -rf "$OUT"' EXIT
cd "$ROOT"
"$LEGACY/bin/python" -m scripts.doctor || fail "the doctor found problems in ${LEGACY##*/}: do what it says above."
"$LEGACY/bin/python" split_and_save_models.py toy/llama "$OUT/split" --stages 0+2+2+2+2 --eagle toy/eagle \
    >"$OUT/split.log" 2>&1 || fail "the split in ${LEGACY##*/} failed: $(tail -n 3 "$OUT/split.log")"
for method in ar continuous streaming; do
    for temperature in 0 1; do
        ask current "$PY" "$method" "$temperature"
        ask legacy "$LEGACY/bin/python" "$method" "$temperature"
    done
done
CURRENT="$("$PY" -c 'import torch; print(torch.__version__)')"
OLD="$("$LEGACY/bin/python" -c 'import torch; print(torch.__version__)')"
"$PY" - "$OUT" "torch $CURRENT" "torch $OLD on Python $VERSION" <<'END'
import json
import sys
from itertools import takewhile
from pathlib import Path

folder, current, legacy = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
differing = 0
for path in sorted(folder.glob("current-*.json")):
    new, old = (json.loads((folder / f"{kind}-{path.stem[8:]}.json").read_text()) for kind in ("current", "legacy"))
    pairs = list(zip(new["token_ids"], old["token_ids"]))
    same = new["token_ids"] == old["token_ids"]
    differing += not same
    print(f"  {new['config']['pipeline_type']:<11} temperature {new['config']['temperature']:g}:",
          f"the same {len(pairs)} tokens" if same else
          f"they differ after token {sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))}")
print(f"flowspec: {legacy} and {current}:", f"FAILED, {differing} texts differ" if differing else
      "ok, the same token ids in every run")
sys.exit(bool(differing))
END
