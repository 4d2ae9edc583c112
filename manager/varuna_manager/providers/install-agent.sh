#!/bin/sh
# Installs the agent from its manager into /opt/varuna and starts it. Cloud-init runs it once; it may be run again.
# /etc/varuna/install.env says: MANAGER_URLS, CA_FILE (empty: this machine's own trust store), PIP_OPTIONS, JOB_USER.
set -eu
# shellcheck source=/dev/null
. /etc/varuna/install.env
export DEBIAN_FRONTEND=noninteractive

patiently() { # a network that is not up yet, a mirror that is down: the manager gives up on the VM in the end
    until "$@"; do
        echo "again in 5 s: $*" >&2
        sleep 5
    done
}

fetch() { # into this folder, by the name that the manager gives it; from the first manager that answers
    for url in $MANAGER_URLS; do
        curl --fail --silent --show-error --connect-timeout 5 --max-time 300 \
            ${CA_FILE:+--cacert "$CA_FILE"} --remote-name --remote-header-name "$url$1" && return 0
    done
    return 1
}

id "$JOB_USER" >/dev/null 2>&1 || useradd --system --create-home --home-dir "/var/lib/$JOB_USER" "$JOB_USER"
if ! python3 -c 'import ensurepip' 2>/dev/null; then
    patiently apt-get update
    patiently apt-get install --yes python3-venv
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
patiently fetch /api/v1/agent/wheel
patiently fetch /api/v1/agent/constraints
wheel=$(echo "$work"/varuna_spot-*.whl)

[ -x /opt/varuna/bin/python ] || python3 -m venv /opt/varuna
pip="/opt/varuna/bin/python -m pip install --quiet --disable-pip-version-check"
# shellcheck disable=SC2086 # several flags
patiently $pip $PIP_OPTIONS --constraint "$work/constraints.txt" "varuna-spot[runtime] @ file://$wheel"
# An image may bring another build of the same version.
$pip --no-deps --force-reinstall "$wheel"

systemctl daemon-reload
systemctl enable --now varuna-agent.service
