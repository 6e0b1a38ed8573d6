#!/usr/bin/env bash
# Makes a network interface slower, so that boards on a fast cable behave as on a slow one:
#
#   sudo bash scripts/netem.sh set INTERFACE [rate_mbps=100] [delay_ms=2]
#   bash scripts/netem.sh show INTERFACE
#   sudo bash scripts/netem.sh clear INTERFACE
#
# `set` limits what this machine sends through INTERFACE to rate_mbps megabits per second, and delays each packet by
# delay_ms milliseconds; 0, or a key left out, means no limit, or no delay. Incoming traffic is shaped by its sender, so
# run it on every board. It affects all traffic of the interface, including ssh. It lasts until `clear` or a restart,
# and replaces what `set` did before. Every command of tc is shown as it is run.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/boards.sh"

run() {
    echo "+ tc $*"
    tc "$@"
}

need_rights() {
    [ "$(id -u)" = 0 ] || fail "changing an interface needs root: type sudo bash scripts/netem.sh $*"
}

number() {
    [[ "$2" =~ ^[0-9]+(\.[0-9]+)?$ ]] || fail "$1=$2 is not a number: write for example $1=${3}"
}

clear_it() {
    if tc qdisc show dev "$1" | grep -qE '^qdisc (tbf|netem) [0-9a-f]+: root'; then run qdisc del dev "$1" root; fi
}

# set_it INTERFACE [rate_mbps=..] [delay_ms=..]: the delay first, and the rate after it, or only one of them
set_it() {
    local device="$1" rate=0 delay=0 word place=(root)
    shift
    for word in "$@"; do
        case "$word" in
            rate_mbps=*) rate="${word#*=}" && number rate_mbps "$rate" 100 ;;
            delay_ms=*) delay="${word#*=}" && number delay_ms "$delay" 2 ;;
            *) fail "$word is not known: give rate_mbps=NUMBER and delay_ms=NUMBER" ;;
        esac
    done
    clear_it "$device"
    if [[ "$delay" =~ [1-9] ]]; then
        run qdisc add dev "$device" root handle 1: netem delay "${delay}ms" limit 100000 ||
            fail "this kernel cannot delay packets: load its module (sudo modprobe sch_netem), or give delay_ms=0"
        place=(parent 1:1)
    fi
    # a bucket of 16 kB lets no message through at once; a second of traffic may wait before any is lost
    if [[ "$rate" =~ [1-9] ]]; then
        run qdisc add dev "$device" "${place[@]}" tbf rate "${rate}mbit" burst 16kb latency 1s
    fi
}

case "${1:-}" in
    set | clear | show) ;;
    "" | -h | --help | help) show_help ;;
    *) fail "unknown word $1: give set, show or clear" ;;
esac
command -v tc >/dev/null || fail "tc is missing: install it (sudo apt install iproute2)"
[ -n "${2:-}" ] || fail "which interface? There are: $(ls /sys/class/net | xargs)"
tc qdisc show dev "$2" >/dev/null 2>&1 || fail "there is no interface $2; there are: $(ls /sys/class/net | xargs)"
case "$1" in
    show) tc -s qdisc show dev "$2" ;;
    clear) need_rights "$@" && clear_it "$2" ;;
    set) need_rights "$@" && set_it "${@:2}" ;;
esac
