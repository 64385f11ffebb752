#!/usr/bin/env bash
# Build the environment of the vLLM instances: install.sh LIST PYTHON VENV, with LIST cpu, cpu-0.23, cuda or npu.
# A second call with the same list returns at once; whatever an interrupted or different call left is built anew.
set -euo pipefail
if [ $# -ne 3 ]; then
    echo "usage: $0 cpu|cpu-0.23|cuda|npu PYTHON VENV" >&2
    exit 2
fi
device=${1%%-*} python=$2 venv=$3
list=$(dirname "$0")/$1.txt
case $device in
    cpu | cuda | npu) ;;
    *) echo "error: DEVICE=$device: expected cpu, cuda or npu" >&2; exit 2 ;;
esac
if [ ! -f "$list" ]; then
    echo "error: VLLM=${1#*-}: there is no $list; expected VLLM=0.23 with DEVICE=cpu, or no VLLM" >&2
    exit 2
fi
if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
    echo "error: Python 3.11 or 3.12 is needed, and ${python:-an empty name} is none; give one with PYTHON=/path/to/python3.11" >&2
    exit 2
fi

done_file=$venv/metronome-vllm  # written last: the device, a checksum of list, script and SOC_VERSION, the list
want=$(printf '%s\n' "$device"; { cat "$list" "$0"; echo "${SOC_VERSION:-}"; } | cksum; cat "$list")
if [ -x "$venv/bin/python" ] && [ "$(cat "$done_file" 2>/dev/null)" = "$want" ]; then
    exit 0
fi

echo "Installing vLLM for $device into $venv (two to five minutes) ..."
rm -rf "$venv"
"$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
pinned() { grep "^$1==" "$list"; }
case $device in
    cpu)
        pip "$(pinned torch)"  # with its dependencies, which differ from build to build
        pip --no-deps -r "$list"
        ;;
    cuda) pip --no-deps -r "$list" ;;
    npu)
        # PyPI's vllm-ascend is built for A2 and refuses other devices; SOC_VERSION, its own variable, names another
        built='^vllm=='
        [ "${SOC_VERSION:-ascend910b1}" = ascend910b1 ] || built='^vllm(-ascend)?=='
        grep -v -E "$built" "$list" > "$venv/wheels.txt"
        pip --no-deps -r "$venv/wheels.txt"
        # both import torch while building, and torch would load torch-npu, which needs CANN's environment.
        # vllm-ascend's setup.py starts the python3 and the cmake of PATH, and asks the former where torch-npu is
        build() { TORCH_DEVICE_BACKEND_AUTOLOAD=0 PATH="$(cd "$venv/bin" && pwd):$PATH" pip --no-cache-dir --no-deps --no-build-isolation --no-binary "$1" "$(pinned "$1")"; }
        # without the version pip would refuse the package: vLLM adds "+empty" to it
        VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$(pinned vllm | cut -d = -f 3) build vllm
        # with its batch-invariant kernels (rollout.deterministic), as in its Dockerfiles; PyPI's wheels have none
        [ "$built" = '^vllm==' ] || VLLM_BATCH_INVARIANT=1 build vllm-ascend
        ;;
esac
if [ "$device" != npu ]; then  # there the import needs CANN's environment, which need not be set while installing
    "$venv/bin/python" -c 'import vllm.entrypoints.openai.api_server' > "$venv/import.log" 2>&1 || { cat "$venv/import.log" >&2; exit 1; }
fi
printf '%s\n' "$want" > "$done_file"
