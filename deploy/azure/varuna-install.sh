#!/bin/sh
# varuna-install WHEEL CONSTRAINTS: installs the manager from varuna's wheel, or replaces the running one.
# New spot VMs get the same wheel from the manager.
set -eu
if [ $# -ne 2 ] || [ ! -f "$1" ] || [ ! -f "$2" ]; then
    echo "usage: varuna-install varuna_spot-VERSION-py3-none-any.whl constraints.txt (both from make wheel)" >&2
    exit 2
fi
wheel=$(realpath "$1")
constraints=$(realpath "$2")

id varuna >/dev/null 2>&1 || useradd --system --home-dir /var/lib/varuna-manager --shell /usr/sbin/nologin varuna
[ -x /opt/varuna/bin/python ] || python3 -m venv /opt/varuna
pip="/opt/varuna/bin/python -m pip install --quiet --disable-pip-version-check"
# shellcheck disable=SC2086 # several flags
$pip ${PIP_OPTIONS:-} --constraint "$constraints" "varuna-spot[manager,azure] @ file://$wheel"
$pip --no-deps --force-reinstall "$wheel" # another build of the same version counts too

mkdir -p /opt/varuna/share/wheels
rm -f /opt/varuna/share/wheels/varuna_spot-*.whl
install -m 0644 "$wheel" "$constraints" /opt/varuna/share/wheels/

systemctl daemon-reload
systemctl enable varuna-manager.service
systemctl restart varuna-manager.service
echo "the manager runs; its first admin's token: sudo cat /var/lib/varuna-manager/admin-token"
