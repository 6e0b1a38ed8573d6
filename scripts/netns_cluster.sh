#!/usr/bin/env bash
# Several boards in one Linux machine: network namespaces with addresses, cables and hosts' names of their own. Needs root.
#
#   sudo bash scripts/netns_cluster.sh [boards=5] [rate_mbps=0] [delay_ms=0] [logs=DIR] -- [PRESET] [key=value ...]
#   sudo bash scripts/netns_cluster.sh [boards=5] [rate_mbps=0] [delay_ms=0] [logs=DIR]
#
# With `--`, run_jetson.sh is started on every board with the words after it; rank 0's output is shown here, that of the
# others goes to logs=DIR/board_RANK.log, and is shown if they fail. Without `--`, the network is built, its boards are
# listed, and it lasts until Ctrl-C, for commands such as
#
#   sudo ip netns exec NAME bash run_jetson.sh hosts=DIR/hosts
#
# Each board sends at most rate_mbps megabits per second, delay_ms milliseconds late (0: no limit, no delay). Everything
# is removed at the end. The boards' switch is a namespace too, so the machine's own network is not changed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/boards.sh"
NAME="flowspec-$$" BOARDS=5 RATE=0 DELAY=0 LOGS="" OWN_LOGS="" WORDS=() WAITS="" TYPED="$*"

# Ends only processes in the namespaces of this cluster, and deletes nothing else.
tear_down() {
    local space
    trap '' INT TERM
    if [ -n "$WAITS" ]; then kill "$WAITS" 2>/dev/null || true; fi
    for space in $(ip netns list | sed -n "s/^\($NAME-[a-z0-9]*\).*/\1/p"); do
        ip netns pids "$space" | xargs -r kill -9 2>/dev/null || true
        ip netns del "$space"
    done
    if [ -n "$OWN_LOGS" ]; then rm -rf "$OWN_LOGS"; fi
}

read_words() {
    while [ $# -gt 0 ]; do
        case "$1" in
            boards=*) BOARDS="${1#*=}" ;;
            rate_mbps=*) RATE="${1#*=}" ;;
            delay_ms=*) DELAY="${1#*=}" ;;
            logs=*) LOGS="$(realpath -m "${1#*=}")" ;;
            --) shift && WORDS=("$@") && HAS_WORDS=1 && return ;;
            -h | --help | help) show_help ;;
            *) fail "unknown word $1: give boards=, rate_mbps=, delay_ms=, logs=, then -- and those of run_jetson.sh" ;;
        esac
        shift
    done
}

build() {
    local rank
    [[ "$BOARDS" =~ ^[0-9]+$ ]] && [ "$BOARDS" -ge 2 ] && [ "$BOARDS" -le 200 ] || fail "boards=$BOARDS is not possible: give 2 to 200"
    ip netns add "$NAME-switch" 2>/dev/null ||
        fail "this machine does not allow network namespaces (perhaps a container): run it on the machine itself"
    ip -n "$NAME-switch" link add switch type bridge
    ip -n "$NAME-switch" link set switch up
    for ((rank = 0; rank < BOARDS; rank++)); do
        ip netns add "$NAME-$rank"
        ip -n "$NAME-$rank" link add eth0 type veth peer name "port$rank" netns "$NAME-switch"
        ip -n "$NAME-switch" link set "port$rank" master switch up
        ip -n "$NAME-$rank" address add "10.77.0.$((rank + 1))/24" dev eth0
        ip -n "$NAME-$rank" link set lo up
        ip -n "$NAME-$rank" link set eth0 up
        ip netns exec "$NAME-$rank" bash "$ROOT/scripts/netem.sh" set eth0 "rate_mbps=$RATE" "delay_ms=$DELAY" \
            >"$LOGS/board_$rank.log" 2>&1 || fail "$(tail -n 1 "$LOGS/board_$rank.log" | sed 's/^flowspec: //')"
        echo "10.77.0.$((rank + 1))"
    done >"$LOGS/hosts"
}

# on RANK COMMAND ...: runs it on that board, with a host name of its own
on() {
    local rank="$1"
    shift
    exec ip netns exec "$NAME-$rank" unshare --uts bash -c 'hostname "$0" && exec "$@"' "board$rank" "$@"
}

# run_all: runs run_jetson.sh on every board; the exit code is that of the first failed board, rank 0 before the others
run_all() {
    local rank pids=() code ended
    for ((rank = 1; rank < BOARDS; rank++)); do
        # Ctrl-C is for rank 0, which ends the others in an orderly way
        (trap '' INT && on "$rank" bash "$ROOT/run_jetson.sh" "${WORDS[@]}" "hosts=$LOGS/hosts") >"$LOGS/board_$rank.log" 2>&1 &
        pids+=($!)
    done
    code=0
    (on 0 bash "$ROOT/run_jetson.sh" "${WORDS[@]}" "hosts=$LOGS/hosts") || code=$?
    for ((rank = 1; rank < BOARDS; rank++)); do
        ended=0
        wait "${pids[rank - 1]}" || ended=$?
        if [ "$ended" != 0 ]; then
            if [ "$code" = 0 ]; then code="$ended"; fi
            sed "s/^/board$rank: /" "$LOGS/board_$rank.log" >&2
        fi
    done
    return "$code"
}

HAS_WORDS=""
read_words "$@"
[ "$(id -u)" = 0 ] || fail "making network namespaces needs root: type sudo bash scripts/netns_cluster.sh $TYPED"
command -v ip >/dev/null && command -v tc >/dev/null || fail "ip and tc are missing: install them (apt install iproute2)"
if [ -z "$LOGS" ]; then OWN_LOGS="$(mktemp -d)" && LOGS="$OWN_LOGS"; fi
mkdir -p "$LOGS"
trap tear_down EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
build
if [ -n "$HAS_WORDS" ]; then
    run_all
else
    for ((rank = 0; rank < BOARDS; rank++)); do echo "rank $rank: $NAME-$rank 10.77.0.$((rank + 1)) eth0"; done
    echo "hosts file: $LOGS/hosts. The network lasts until Ctrl-C."
    sleep infinity &
    WAITS=$!
    wait "$WAITS"
fi
