#!/usr/bin/env bash
# Installs the engines that the slow tests in this folder start, and what emulates processors: SLURM, Open MPI and qemu-user as Debian's packages, for which it needs root and apt, and Ray in
# .venv/engines. What is there already is left alone. It prints what it could not install, and then fails; the tests are skipped, and say why.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
missing=()
log=$(mktemp)
trap 'rm -f "$log"' EXIT

declare -A programs=([slurm-wlm]=slurmctld [munge]=munged [openmpi-bin]=mpirun [iproute2]=ip [util-linux]=unshare [qemu-user]=qemu-x86_64)
packages=()
for package in "${!programs[@]}"; do
    PATH=$PATH:/usr/sbin command -v "${programs[$package]}" >/dev/null || packages+=("$package")
done
if ((${#packages[@]})); then
    # Daemons of its own are not wanted: the tests start theirs.
    if ! { apt-get update && DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install --yes --no-install-recommends "${packages[@]}"; } &>"$log"; then
        missing+=("${packages[@]}: $(tail -n 1 "$log")")
    fi
fi

python=.venv/bin/python
if [[ ! -x $python ]]; then
    missing+=("ray: there is no $python, run make setup")
elif [[ ! -d .venv/engines/ray ]]; then
    # Apart from the environment, and only what that has not: no other test sees Ray, pandas or pyarrow.
    needed=(ray msgpack jsonschema jsonschema-specifications referencing rpds-py pandas pyarrow tensorboardX)
    if ! .venv/bin/uv pip install --python "$python" --target .venv/engines --no-deps "${needed[@]}" &>"$log"; then
        rm -rf .venv/engines
        missing+=("ray: $(tail -n 1 "$log")")
    fi
fi

((${#missing[@]} == 0)) && exit 0
printf 'not installed, its tests are skipped: %s\n' "${missing[@]}" >&2
exit 1
