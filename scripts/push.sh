#!/usr/bin/env bash
# Copies each board its own folder of a split model, from the hosts file that run_jetson.sh reads:
#
#   bash scripts/push.sh hosts=FILE split=DIR [ranks=0,3] [replicas=true] [dry=true]
#   bash scripts/push.sh hosts=FILE code=true [split=DIR] [ranks=0,3] [dry=true]
#   bash scripts/push.sh hosts=FILE model=NAME [quant=int4] [code=true] [ranks=0,3] [dry=true]
#
# DIR/stage_RANK goes to FOLDER/splits/NAME/stage_RANK on the board of that rank: FOLDER is folder= of its line (flowspec,
# in the home of its user, if there is none), NAME is DIR's own. A spare gets those of all ranks but 0, or of those in
# spare=; in ranks= spares are numbered after the ranks, in the order of their lines. Afterwards the board compares
# every byte with the hashes of the manifest. With replicas=true the ranks above those of the split get copies, in the
# same order, as pipeline_type=dsi needs them. With code=true the program goes to FOLDER too, and the hosts file to
# FOLDER/hosts.txt.
#
# model= is a name at the hub, as Qwen/Qwen3-4B or NAME@REVISION, a folder or a GGUF file: it is fetched and split
# first, into parts of about equal bytes for the boards after rank 0's, or by memory= of their lines, in GB. eagle_dir=,
# quant=, stages= and models= are keys of run_pipe.sh.
#
# Needs rsync here and on the boards, and ssh, which asks for passwords itself: none is stored (ssh-copy-id avoids the
# prompts). Options of ssh go into $SSH, as in SSH="ssh -p 2222". If it is interrupted, type it again: complete files
# are not copied twice. dry=true shows what would be copied, and copies nothing.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/boards.sh"
HOSTS="" SPLIT="" RANKS="" DRY="" CODE="" REPLICAS="" MODEL=() PROGRESS=""
if [ -t 1 ]; then PROGRESS=--info=progress2; fi

read_words() {
    local word
    for word in "$@"; do
        case "$word" in
            hosts=*) HOSTS="${word#*=}" ;;
            split=*) SPLIT="${word#*=}" && SPLIT="${SPLIT%/}" ;;
            ranks=) fail "ranks= names none: leave it out for all, or write ranks=0,3" ;;
            ranks=*) RANKS="${word#*=}" ;;
            model=?* | models=?* | eagle_dir=?* | quant=?* | stages=?*) MODEL+=("$word") ;;
            dry=true) DRY=1 ;;
            code=true) CODE=1 ;;
            replicas=true) REPLICAS=1 ;;
            dry=false | code=false | replicas=false) ;;
            -h | --help | help) show_help ;;
            *) fail "unknown word $word: give hosts=FILE, split=DIR, model=NAME, ranks=0,3, replicas=true, code=true or dry=true" ;;
        esac
    done
}

# sums MANIFEST: prints the hashes of its files in the format of sha256sum --check
sums() {
    project_python -c 'import sys
from pathlib import Path
from config.schema.untrusted import read_json, stays_inside
try:
    files = read_json(Path(sys.argv[1]))["files"]
    lines = [entry["sha256"] + "  " + name for name, entry in files.items() if stays_inside(name)]
except ValueError as error:
    sys.exit(f"flowspec: {error}")
except (KeyError, TypeError, AttributeError):
    sys.exit(f"flowspec: {sys.argv[1]} is no manifest of a split: split the model again")
print(*lines, sep="\n")' "$1"
}

# copy BOARD FOLDER WORD ...: runs rsync with these words to FOLDER, which is created if it is missing
copy() {
    local board="$1" folder="$2" there
    there="$(at "$board" "$folder")/"
    shift 2
    if [ -n "$DRY" ]; then
        rsync -rlts --dry-run --itemize-changes -e "$SSH" "$@" "$there"
        return
    fi
    if [ "$board" = . ]; then mkdir -p -- "$folder"; fi
    rsync -rlts --partial $PROGRESS -e "$SSH" --rsync-path="mkdir -p $(quoted "$folder") && rsync" "$@" "$there"
}

# look BOARD: exits if the board cannot be reached or has no rsync
look() {
    local board="$1" said
    said="$(over "$board" 'command -v rsync sha256sum' </dev/null)" && return
    [ -z "$said" ] || fail "$board has no rsync: install it there (sudo apt install rsync)"
    fail "$board cannot be reached, or has no rsync: try $SSH $board, and install rsync there (sudo apt install rsync)"
}

# push_code BOARD FOLDER: copies the program, without models and files that git ignores, and the hosts file
push_code() {
    local board="$1" folder="$2"
    if ! (cd "$ROOT" && git ls-files -z --cached --others --exclude-standard) >"$LIST" 2>/dev/null; then
        (cd "$ROOT" && find . -path './.*' -prune -o \( -path ./splits -o -path ./models -o -path ./keys -o -path ./cluster_keys -o -name __pycache__ \) -prune \
            -o -type f -print0) >"$LIST"
    fi
    (cd "$ROOT" && xargs -0 sh -c 'for name; do [ -e "$name" ] && printf "%s\0" "$name"; done; true' sh <"$LIST") >"$LIST.there"
    copy "$board" "$folder" --from0 --files-from="$LIST.there" -- "$ROOT/"
    copy "$board" "$folder" --no-relative -- "$HOSTS_COPY"
}

name_of_split() {
    basename -- "$(realpath -m -- "${SPLIT:-.}")"
}

# number_of RANK: prints the number of this rank's part of the split
number_of() {
    local rank="$1" parts
    parts=("$SPLIT"/stage_*)
    if [ -n "$REPLICAS" ] && [ "$rank" -gt 0 ] && [ "${#parts[@]}" -gt 1 ]; then
        echo $((1 + (rank - 1) % (${#parts[@]} - 1)))
    else
        echo "$rank"
    fi
}

# push_program BOARD FOLDER
push_program() {
    look "$1"
    [ -n "$CODE" ] || return 0
    if [ "$1" = . ] && [ "$2" -ef "$ROOT" ]; then
        echo "the program of this machine is in $ROOT already"
        return
    fi
    echo "the program to $(at "$1" "$2")"
    push_code "$1" "$2" || fail "copying the program to $(at "$1" "$2") failed (rsync says why above): type it again to continue"
}

# push RANK BOARD FOLDER: copies the part of this rank
push() {
    local rank="$1" board="$2" folder="$3" number part there
    number="$(number_of "$rank")"
    part="$(realpath -m -- "${SPLIT:-.}/stage_$number")"  # a colon in a relative path would be another host's for rsync
    there="$folder/splits/$(name_of_split)/stage_$number"
    echo "rank $rank: $part to $(at "$board" "$there")"
    copy "$board" "$there" -- "$part/" ||
        fail "copying to $(at "$board" "$there") failed (rsync says why above): type the same command again to continue"
    if [ -n "$DRY" ]; then return; fi
    sums "$part/manifest.json" | over "$board" "cd $(quoted "$there") && sha256sum --check --quiet -" ||
        fail "$(at "$board" "$there") differs from its manifest (above): delete the file there, and type the same command again"
    echo "rank $rank: compared with the hashes, all the same"
}

read_words "$@"
case " ${MODEL[*]-} " in
    "  ") ;;
    *" model="*) [ -z "$SPLIT$REPLICAS" ] || fail "model= is split for a pipeline: leave split= and replicas= out, or split the model first, and give split=DIR" ;;
    *) fail "${MODEL[0]} needs a model: give model=NAME" ;;
esac
[ -n "$SPLIT$CODE${MODEL[*]-}" ] || fail "nothing to copy: give model=NAME, split=DIR, as split_and_save_models.py wrote it, or code=true"
command -v rsync >/dev/null || fail "rsync is missing: install it (sudo apt install rsync)"
command -v "${SSH%% *}" >/dev/null || fail "${SSH%% *} is missing: install it (sudo apt install openssh-client)"
TEMP="$(mktemp -d)"
trap 'rm -rf "$TEMP"' EXIT
LIST="$TEMP/list" HOSTS_COPY="$TEMP/hosts.txt"
read_boards "$HOSTS" "$TEMP/boards"
WORLD="$(awk '$1 == $2' "$TEMP/boards" | wc -l)"
cp -- "$HOSTS" "$HOSTS_COPY"
if [ ${#MODEL[@]} -gt 0 ]; then
    SPLIT="$(project_python -m launch.share_out hosts="$HOSTS" "${MODEL[@]}")" || exit 2
fi
check_ranks "$RANKS"
for rank in ${RANKS//,/ }; do
    grep -q "^$rank " "$TEMP/boards" || fail "ranks=$RANKS: $HOSTS has no line for rank $rank, only for 0 to $(($(wc -l <"$TEMP/boards") - 1))"
done
while read -r line ranks board folder <&3; do
    case ",${RANKS:-$line}," in *",$line,"*) ;; *) continue ;; esac
    push_program "$board" "$folder"
    [ -n "$SPLIT" ] || continue
    for rank in ${ranks//,/ }; do
        [ -f "$SPLIT/stage_$(number_of "$rank")/manifest.json" ] ||
            fail "there is no complete folder $SPLIT/stage_$(number_of "$rank") for rank $rank of $HOSTS: split the model for $WORLD ranks first"
        push "$rank" "$board" "$folder"
    done
done 3<"$TEMP/boards"
if [ -n "$SPLIT" ]; then
    echo "Type on each board, in its folder, with the preset and the number type of your model if it has them:"
    echo "bash run_jetson.sh [PRESET] hosts=hosts.txt model_dir=splits/$(name_of_split) [dtype=float16]"
fi
