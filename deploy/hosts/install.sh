#!/usr/bin/env bash
# Put the Varuna agent on machines of your own, over ssh; run it again to upgrade them, one after the other: each is
# drained first, so that its jobs go on elsewhere, and uncordoned when its new agent is ready.
#
#   install.sh [options] HOSTS.txt
#
# HOSTS.txt has a line for each host: its name, where ssh finds it, and options of its agent (docs/agent.md):
#
#   gpu-1   root@10.0.0.11    --gpus 8 --device cuda --device-memory-bytes 85899345920
#   gpu-2   admin@10.0.0.12   --gpus 8 --device cuda --device-memory-bytes 85899345920 --host 10.1.0.12
#
# A user other than root needs sudo without a password there. The manager has to know the hosts: --list prints the file for
# `varuna manager --provider static:FILE`. Here you need an admin's token (VARUNA_TOKEN_FILE, or varuna's config file):
# each host gets a join token of its own, good once and for an hour, which also names the manager's authority: the host
# trusts no other. docs/operations.md has more.
#
#   --manager ADDRESS     host:port of the manager's agent port; of several managers, separated by commas (needed)
#   --join-url URL        the manager's REST API; default: https, port 8750 of --manager's hosts
#   --wheel FILE          default: dist/varuna_spot-*.whl of this repository (make wheel), with constraints.txt beside it
#   --extras NAMES        of the wheel, separated by commas; default: runtime (with PyTorch); '' for a Python that has it
#   --pip FLAGS           for pip on the hosts, such as the index of PyTorch's wheels
#   --python PROGRAM      on the hosts; default: python3
#   --only NAME           this host only
#   --run-as USER         jobs run as this user, who is made when missing; default: varuna-jobs; '' for root
#   --drain-deadline S    how long a host's jobs may take to save and leave before its agent is upgraded; default: 600
#   --start WAY           systemd (default); process (a plain process, for hosts without systemd); none
#   --prefix FOLDER       on the hosts, instead of / (with --start process or none)
#   --ssh COMMAND         default: ssh; for example 'ssh -J bastion'
#   --list                print the list of hosts for the manager, and end
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
manager='' join_url='' wheel='' extras=runtime pip_flags='' python=python3 only='' run_as=varuna-jobs start=systemd prefix='' ssh=ssh
list='' inventory='' drain_deadline=600

fail() { printf 'install.sh: %s\n' "$*" >&2; exit 2; }
usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }

while [ $# -gt 0 ]; do
    case $1 in
    --manager | --join-url | --wheel | --extras | --pip | --python | --only | --run-as | --start | --prefix | --ssh | --drain-deadline)
        [ $# -ge 2 ] || fail "$1 needs a value"
        case $1 in
        --manager) manager=$2 ;;
        --join-url) join_url=$2 ;;
        --wheel) wheel=$2 ;;
        --extras) extras=$2 ;;
        --pip) pip_flags=$2 ;;
        --python) python=$2 ;;
        --only) only=$2 ;;
        --run-as) run_as=$2 ;;
        --start) start=$2 ;;
        --prefix) prefix=${2%/} ;;
        --ssh) ssh=$2 ;;
        --drain-deadline) drain_deadline=$2 ;;
        esac
        shift 2
        ;;
    --list) list=yes; shift ;;
    -h | --help) usage; exit 0 ;;
    -*) fail "$1 is not an option: install.sh --help lists them" ;;
    *) [ -z "$inventory" ] || fail "one list of hosts, not $inventory and $1"; inventory=$1; shift ;;
    esac
done
[ -n "$inventory" ] || fail "no list of hosts is given: install.sh [options] HOSTS.txt (--help explains it)"
[ -r "$inventory" ] || fail "the list of hosts $inventory cannot be read"

# By line: the names, where ssh finds them, and the agent's options.
names=() places=() options=()
while read -r name place rest; do
    case $name in '' | '#'*) continue ;; esac
    [[ $name =~ ^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$ ]] ||
        fail "$inventory: a host's name is letters, digits, '.', '_' and '-', not '$name'"
    [ -n "$place" ] || fail "$inventory: $name has no ssh destination"
    [[ $place != -* ]] || fail "$inventory: $name: '$place' is not an ssh destination"
    [[ $rest =~ ^[A-Za-z0-9\ ._:/,=@%+-]*$ ]] || fail "$inventory: $name: the options '$rest' contain a character that no option has"
    [[ " ${names[*]-} " != *" $name "* ]] || fail "$inventory: host $name occurs twice"
    names+=("$name") places+=("$place") options+=("$rest")
done <"$inventory"
[ ${#names[@]} -gt 0 ] || fail "$inventory: there is no host in it"

if [ -n "$list" ]; then
    printf 'hosts:\n'
    for i in "${!names[@]}"; do
        gpus=1
        [[ " ${options[i]} " =~ \ --gpus[\ =]([0-9]+)\  ]] && gpus=${BASH_REMATCH[1]}
        printf '  - {name: %s, gpus: %s}\n' "${names[i]}" "$gpus"
    done
    exit 0
fi

[ -n "$manager" ] || fail "--manager is missing: host:port of the manager's agent port"
case $start in
systemd) [ -z "$prefix" ] || fail "systemd has one place for its units: --prefix goes with --start process or none" ;;
process | none) ;;
*) fail "--start $start: systemd, process or none" ;;
esac
if [ -z "$wheel" ]; then
    for found in "$root"/dist/varuna_spot-*.whl; do wheel=$found; done
fi
[ -f "$wheel" ] || fail "there is no wheel: run make wheel, or give --wheel FILE"
constraints=$(dirname "$wheel")/constraints.txt
[ -f "$constraints" ] || constraints=$root/constraints.txt
[ -f "$constraints" ] || fail "there is no constraints.txt beside $wheel: make wheel puts it there"
read -ra ssh_command <<<"$ssh"
[ "$start" = systemd ] || run_as=''
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
umask 077

[[ $drain_deadline =~ ^[0-9]+$ ]] || fail "--drain-deadline $drain_deadline: a whole number of seconds"

# What goes to host number $1, for a start in the way $2, lies in $work/send afterwards.
pack() {
    local flags="--manager $manager --vm-id ${names[$1]} --join-token-file $prefix/etc/varuna/join-token"
    [ -z "$join_url" ] || flags+=" --join-url $join_url"
    [ -z "$run_as" ] || flags+=" --run-as $run_as"
    [[ " ${options[$1]} " == *" --host"[\ =]* ]] || flags+=" --host auto"
    rm -rf "$work/send"
    mkdir "$work/send"
    cp "$wheel" "$work/send/"
    cp "$constraints" "$work/send/constraints.txt"
    cp "$root/deploy/hosts/setup.sh" "$root/deploy/systemd/varuna-agent.service" "$work/send/"
    printf 'VARUNA_AGENT_FLAGS="%s %s"\n' "$flags" "${options[$1]}" >"$work/send/agent.env"
    {
        printf 'prefix=%q\nextras=%q\npython=%q\npip_flags=%q\n' "$prefix" "${extras:+[$extras]}" "$python" "$pip_flags"
        printf 'start=%q\nrun_as=%q\n' "$2" "$run_as"
    } >"$work/send/settings"
}

on_host() { "${ssh_command[@]}" "${places[$1]}" "$2"; }

# The manager's view of the VM $1: its state ("gone" when it is not listed), its number of workers, whether it is cordoned,
# and whether its agent's last heartbeat came less than 3 s ago. Fails when the manager does not answer.
vm_now() {
    local vms
    vms=$(varuna vms --json) || return 1
    python3 -c '
import json, sys
vm = {"state": "gone", "workers": [], "last_heard_s": None}
vm = next((one for one in json.load(sys.stdin) if one["id"] == sys.argv[1]), vm)
heard_s = vm["last_heard_s"]
cordon = "cordoned" if vm.get("cordoned_at") else "open"
print(vm["state"], len(vm["workers"]), cordon, "heard" if heard_s is not None and heard_s < 3 else "silent")' "$1" <<<"$vms"
}

# Drains the VM $1: its jobs save and continue elsewhere, and nothing new starts there.
drain_host() {
    local now workers='an unknown number of'
    varuna drain "$1" --deadline "$drain_deadline" >/dev/null
    for _ in $(seq $((drain_deadline + 60))); do
        if now=$(vm_now "$1"); then
            read -r _ workers _ <<<"$now"
            [ "$workers" != 0 ] || return 0
        fi
        sleep 1
    done
    printf '%s: still has %s workers: it is left as it is, drained (varuna uncordon %s)\n' "$1" "$workers" "$1" >&2
    return 1
}

# The token goes through the connection: nobody sees it in a list of processes, here or there.
send_to() {
    tar -C "$work/send" -cf - . | on_host "$1" \
        "set -e; folder=\$(mktemp -d); trap 'rm -rf \$folder' EXIT; tar -C \$folder -xf -; ${2}sh \$folder/setup.sh"
}

install_on() {
    local name=${names[$1]} as='' identity=$prefix/var/lib/varuna-agent/identity/identity.json
    local now='' state='' cordon='' uncordon=''
    printf '%s: ' "$name"
    [ -n "$prefix" ] || [ "$(on_host "$1" 'id -u' </dev/null)" = 0 ] || as='sudo -n '
    if ! on_host "$1" "${as}test -e $identity" </dev/null; then
        pack "$1" "$start"
        varuna token create "$name" --join --vm "$name" --ttl 1h >"$work/send/join-token"
    else
        if [ "$start" != none ]; then
            now=$(vm_now "$name") || { printf '%s: it is left as it is: the manager does not answer\n' "$name" >&2; return 1; }
            read -r state _ cordon _ <<<"$now"
        fi
        case $state in
        ready | suspect | draining)
            # The slow part, the installation, comes first, while the host's jobs still run.
            pack "$1" none
            send_to "$1" "$as"
            [ "$cordon" = cordoned ] || uncordon=yes
            drain_host "$name"
            ;;
        esac
        pack "$1" "$start"
    fi
    send_to "$1" "$as"
    [ "$start" != none ] || return 0
    sleep 4 # heartbeats of the agent before this one must not count
    for _ in $(seq 180); do
        if now=$(vm_now "$name") && [[ $now == "ready "*" heard" ]]; then
            [ -z "$uncordon" ] || varuna uncordon "$name" >/dev/null
            printf '%s: ready\n' "$name"
            return 0
        fi
        sleep 1
    done
    printf '%s: the agent does not become ready: look at its log (journalctl -u varuna-agent)\n' "$name" >&2
    return 1
}

for i in "${!names[@]}"; do
    if [ -z "$only" ] || [ "${names[i]}" = "$only" ]; then
        install_on "$i"
        done_any=yes
    fi
done
[ -n "${done_any-}" ] || fail "there is no host $only in $inventory"
