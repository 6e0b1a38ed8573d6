#!/usr/bin/env bash
# Makes the keys of a cluster, so that no stranger can join, read or disturb it, and copies each board's to the board:
#
#   bash scripts/make_keys.sh hosts=FILE [ranks=0,3] [keys=DIR] [push=false]
#   bash scripts/make_keys.sh names=pc,pi-3 [keys=DIR]
#
# DIR (cluster_keys) keeps the cluster's authority, cluster.key, which no board needs: guard it. A board's own keys go to
# DIR/RANK, and over ssh to FOLDER/keys on the board of that rank, where run_jetson.sh finds them by itself; FOLDER is
# folder= of its line (flowspec, in the home of its user, if there is none). The line of this machine needs no ssh: its
# FOLDER is this repository. With push=false copy them yourself. With names= boards have names, and their keys stay in
# DIR/NAME: so hosts=auto makes them, and sends them itself.
#
# Type it again for boards that come later: existing keys stay as they are. To shut out a stolen board, delete DIR and
# make the keys of all others again. Needs openssl here, and ssh, with options in $SSH.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/boards.sh"
HOSTS="" RANKS="" NAMES="" KEYS="cluster_keys" PUSH=1

for word in "$@"; do
    case "$word" in
        hosts=?*) HOSTS="${word#*=}" ;;
        ranks=?*) RANKS="${word#*=}" ;;
        names=?*) NAMES="${word#*=}" ;;
        keys=?*) KEYS="${word#*=}" ;;
        push=false) PUSH="" ;;
        push=true) ;;
        -h | --help | help) show_help ;;
        *) fail "unknown word $word: give hosts=FILE, ranks=0,3, names=pc,pi-3, keys=DIR or push=false" ;;
    esac
done
check_ranks "$RANKS"
[[ "$NAMES" =~ ^([A-Za-z0-9-]+(,[A-Za-z0-9-]+)*)?$ ]] || fail "names=$NAMES is not possible: write letters, digits and hyphens, with commas between"
command -v openssl >/dev/null || fail "openssl is missing: install it (sudo apt install openssl)"

CURVE=(-pkeyopt ec_paramgen_curve:prime256v1)
EVER=36500  # days
umask 077
TEMP="$(mktemp -d)"
trap 'rm -rf "$TEMP"' EXIT
[ -n "$NAMES" ] || read_boards "$HOSTS" "$TEMP/boards"

# made FOLDER: moves $TEMP/new there, which is atomic
made() {
    mkdir -p "$(dirname -- "$1")"
    mv -T -- "$TEMP/new" "$1"
}

authority() {
    mkdir "$TEMP/new"
    openssl req -x509 -newkey ec "${CURVE[@]}" -nodes -days "$EVER" -subj "/CN=FlowSpec cluster" \
        -keyout "$TEMP/new/cluster.key" -out "$TEMP/new/cluster.crt" 2>/dev/null ||
        fail "openssl could not make a key (openssl version: $(openssl version)): install OpenSSL 1.1.1 or newer"
    made "$KEYS"
    echo "$KEYS: the authority of a new cluster; guard cluster.key"
}

# board RANK|NAME: makes its own key, and the certificate for it
board() {
    local own="$TEMP/new"
    mkdir "$own"
    openssl req -newkey ec "${CURVE[@]}" -nodes -subj "/CN=FlowSpec board $1" \
        -keyout "$own/board.key" -out "$TEMP/request" 2>/dev/null
    openssl x509 -req -in "$TEMP/request" -days "$EVER" -set_serial "0x$(openssl rand -hex 16)" \
        -CA "$KEYS/cluster.crt" -CAkey "$KEYS/cluster.key" -out "$own/board.crt" 2>/dev/null ||
        fail "$KEYS/cluster.key and cluster.crt do not go together: delete $KEYS to begin a new cluster"
    cp -- "$KEYS/cluster.crt" "$own/"
    made "$KEYS/$1"
}

# push BOARD FOLDER RANK: copies the files of $KEYS/RANK to FOLDER/keys, readable only by its user
push() {
    local there
    there="$(quoted "$2")/keys"
    tar -C "$KEYS/$3" -cf - board.key board.crt cluster.crt |
        over "$1" "umask 077 && mkdir -p $there && chmod 700 $there && tar -C $there -xf -" ||
        fail "$(at "$1" "$2/keys") did not take its keys (the reason is above): type the same command again, or copy $KEYS/$3 there"
}

[ -f "$KEYS/cluster.key" ] || authority
if [ -n "$NAMES" ]; then
    for name in ${NAMES//,/ }; do [ -d "$KEYS/$name" ] || board "$name"; done
    exit
fi
while read -r rank _ board folder <&3; do
    case ",${RANKS:-$rank}," in *",$rank,"*) ;; *) continue ;; esac
    [ -d "$KEYS/$rank" ] || board "$rank"
    if [ -n "$PUSH" ]; then
        push "$board" "$folder" "$rank"
        echo "rank $rank: keys to $(at "$board" "$folder/keys")"
    else
        echo "rank $rank: copy $KEYS/$rank to $(at "$board" "$folder/keys")"
    fi
done 3<"$TEMP/boards"
