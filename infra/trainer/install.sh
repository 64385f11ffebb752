#!/usr/bin/env bash
# Install the package and infra/trainer/npu.txt into an interpreter's environment: install.sh PYTHON [PACKAGE], with PACKAGE
# '.' (default) or '.[team]'. Versions that npu.txt does not name are those of constraints.txt.
set -euo pipefail
if [ $# -lt 1 ] || [ $# -gt 2 ]; then
    echo "usage: $0 PYTHON [PACKAGE]" >&2
    exit 2
fi
python=$1 package=${2:-.}
cd "$(dirname "$0")/../.."
list=infra/trainer/npu.txt
pip() { "$python" -m pip install --quiet --disable-pip-version-check "$@"; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
named=$(sed -nE 's/^([a-zA-Z0-9_.-]+)(==| @).*/\1/p' "$list" | sort -u | paste -s -d '|')
grep -v -i -E "^($named)==" constraints.txt > "$work/constraints.txt"
grep -v '^mindspeed' "$list" > "$work/packages.txt"
echo "Installing Metronome for NPUs ..."
"$python" -m pip uninstall --quiet --yes triton
pip --constraint "$work/constraints.txt" --requirement "$work/packages.txt" --editable "$package"
pip --no-deps "$(grep '^mindspeed' "$list")"
