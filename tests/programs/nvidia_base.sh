#!/bin/bash
# Start CUDA's ComputeCache from a read-only base on an NVIDIA GPU, and show what the driver does with the links.
# Wants OCL_ICD_VENDORS, PYTHONPATH (with cachectl) and PYTHON; uses a new folder below TMPDIR. The superuser becomes
# another user for the runs from the base, because a file must be read-only for this user to be linked.
set -u
here=$(dirname "$(readlink -f "$0")")
python=${PYTHON:-python3}
top=$(mktemp -d)
base=$top/base
chmod 755 "$top"
export PYTHONDONTWRITEBYTECODE=1
as=()
[ "$(id -u)" = 0 ] && as=(setpriv --reuid=65534 --regid=65534 --clear-groups --inh-caps=+dac_read_search
    --ambient-caps=+dac_read_search)
sum() { (cd "$base" && find . -printf '%p %m %T@ %s\n' | sort; find "$base" -type f -print0 | sort -z | xargs -0 sha256sum) | sha256sum; }
own() { find "$1/cuda" -mindepth 2 -type f | wc -l; }
links() { find "$1/cuda" -type l | wc -l; }
state() { echo "   own files $(own "$1"), links $(links "$1"), index $(stat -c %s "$1/cuda/index") bytes"; }
run() { # root, kernels: run from the base
    mkdir -p "$top/home" "$1"; [ "$(id -u)" = 0 ] && chown 65534:65534 "$top/home" "$1"
    HOME=$top/home "${as[@]}" "$python" -m cachectl run --base "$base" --isolated="$1" -- "$python" "$here/nvidia.py" "$2" 2>&1
    state "$1"
}
echo "1. fill the base: 4 kernels"
HOME=$top/maker "$python" -m cachectl run --isolated="$base" -- "$python" "$here/nvidia.py" 4
rm -rf "$base/cuda/cachectl"*; chmod -R go+rX,a-w "$base"
before=$(sum); find "$base/cuda" -mindepth 2 -type f | wc -l
echo "2. the same 4 kernels from the base: expect no own file"; run "$top/own" 4
echo "3. a fifth kernel: expect own files for it alone, and all links left"; run "$top/own" 5
echo "4. again: expect no further own file"; run "$top/own" 5
echo "5. a small cap: the driver drops the oldest entries of the own root, never those of the base"
CUDA_CACHE_MAXSIZE=60000 run "$top/own" 9
echo "6. an own root whose index is removed: what the driver does with links at its next store"
run "$top/bare" 4; rm -f "$top/bare/cuda/index"
CUDA_CACHE_PATH=$top/bare/cuda HOME=$top/home "${as[@]}" "$python" "$here/nvidia.py" 5; state "$top/bare"
echo "7. verify and report of the own root"
HOME=$top/home "$python" -m cachectl verify --root "$top/own" cuda; HOME=$top/home "$python" -m cachectl ls --root "$top/own" cuda
[ "$before" = "$(sum)" ] && echo "the base is unchanged" || echo "THE BASE HAS CHANGED"
chmod -R u+w "$top"; rm -rf "$top"
