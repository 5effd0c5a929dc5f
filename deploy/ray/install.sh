#!/bin/sh
# NovaInfer in ~/novainfer, from the source that `ray up` has copied beside this; on every host, and again when it changes.
set -eu

source=$(cd "$(dirname "$0")/.." && pwd)

find_python() {
    for python in python3.13 python3.12 python3.11 python3; do
        if "$python" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$python"
            return
        fi
    done
    return 1
}

# The compiler is for the CPU kernels, and for Triton's launchers on a GPU.
if ! find_python >/dev/null || ! command -v g++ >/dev/null; then
    sudo apt-get update -qq
    sudo apt-get install -y -qq --no-install-recommends g++ python3.11 python3.11-venv python3.11-dev ||
        sudo apt-get install -y -qq --no-install-recommends g++ python3 python3-venv python3-dev
fi
test -x ~/novainfer/bin/python || "$(find_python)" -m venv ~/novainfer
~/novainfer/bin/pip install --quiet torch==2.13.0
~/novainfer/bin/pip install --quiet "$source"
