#!/bin/sh
# The part of install.sh that runs on a host, as root (or as any user, with a --prefix that they own).
# Its folder holds: the wheel, constraints.txt, agent.env, varuna-agent.service, perhaps join-token; and `settings`.
set -eu
umask 022
here=$(cd "$(dirname "$0")" && pwd)
prefix='' extras='' python=python3 pip_flags='' start=systemd run_as=''
# shellcheck source=/dev/null
. "$here/settings"

say() { printf '%s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

wheel=$(find "$here" -name '*.whl')
"$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "$python here is not Python 3.11 or newer with venv: install it (Debian: apt-get install python3-venv), or give another --python"

# Each version has its own folder: running workers keep theirs, and the previous version stays for a way back.
opt=$prefix/opt
version=$(cat "$here"/*.whl "$here/constraints.txt" | sha256sum | cut -c1-12)
folder=$opt/varuna-$version
if [ ! -e "$folder/installed" ]; then
    rm -rf "$folder"
    mkdir -p "$opt"
    say "installing $(basename "$wheel") into $folder"
    "$python" -m venv "$folder"
    # shellcheck disable=SC2086 # several flags
    "$folder/bin/pip" install --quiet --disable-pip-version-check -c "$here/constraints.txt" $pip_flags "$wheel$extras"
    touch "$folder/installed"
fi
current=$(readlink "$opt/varuna" || true)
# An upgrade runs this twice: the second time the link is at this version already.
if [ "$current" != "$folder" ]; then printf '%s\n' "$current" >"$folder/previous"; fi
previous=$(cat "$folder/previous" 2>/dev/null || true)
running=$(cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\0' '\n' || true)
ln -sfn "$folder" "$opt/varuna.new"
mv -T "$opt/varuna.new" "$opt/varuna"
for old in "$opt"/varuna-*; do
    # Installed twice without a start, the agent still runs from a version before the previous one.
    case $running in *"$old/bin/"*) continue ;; esac
    if [ "$old" != "$folder" ] && [ "$old" != "$previous" ]; then rm -rf "$old"; fi
done

etc=$prefix/etc/varuna
mkdir -p "$etc"
install -m 0600 "$here/agent.env" "$etc/agent.env"
if [ -e "$here/join-token" ]; then install -m 0600 "$here/join-token" "$etc/join-token"; fi
if [ -n "$run_as" ] && ! id "$run_as" >/dev/null 2>&1; then
    useradd --system --create-home --shell /usr/sbin/nologin "$run_as"
    for group in video render; do
        if getent group "$group" >/dev/null; then usermod -aG "$group" "$run_as"; fi
    done
fi

case $start in
systemd)
    install -m 0644 "$here/varuna-agent.service" /etc/systemd/system/varuna-agent.service
    systemctl daemon-reload
    systemctl enable --quiet varuna-agent
    systemctl restart varuna-agent
    ;;
process)
    state=$prefix/var/lib/varuna-agent
    mkdir -p "$state"
    chmod 0700 "$state"
    if [ -e "$state/agent.pid" ]; then kill "$(cat "$state/agent.pid")" 2>/dev/null || true; fi
    # Wait until its lock is free, because it ends its workers first.
    flock -w 100 "$state/agent.lock" true || fail "the agent in $state does not end: look at $state/agent.log"
    VARUNA_AGENT_FLAGS=
    # shellcheck source=/dev/null
    . "$etc/agent.env"
    # shellcheck disable=SC2086 # several flags
    setsid "$opt/varuna/bin/varuna" agent --vm-dir "$state" $VARUNA_AGENT_FLAGS \
        </dev/null >>"$state/agent.log" 2>&1 &
    echo $! >"$state/agent.pid"
    ;;
none) ;;
esac
say "installed"
