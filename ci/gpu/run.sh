#!/usr/bin/env bash
# Proves srv on a GPU in one run of under 10 minutes, and prints a table of what passed and how fast it was.
#
#     ci/gpu/run.sh [--device cuda|rocm|xpu] [--stages NAME...] [--seconds 570] [--out FOLDER]
#     SRV_GPU_SIMULATOR=sm90 ci/gpu/run.sh --simulated        the same stages on a simulated GPU, without speeds
#
# The machine needs torch for its device, Triton and transformers, but no network: wheels that it lacks come from
# build/gpu-pack, which `ci/gpu/pack.sh` fills on a machine with a package index. Results are written to FOLDER
# (default: $OUT, else build/gpu-proof) as they are found.
# FlashInfer compiles its kernels when they are first used: without what it needs it is passed over, and the table says so.
#
# PYTHON: the interpreter (default: .venv if it exists and no pack does, else python3). PACK: the folder of the pack.
# Exit status: 0 if every stage passed or was passed over for a reason, 1 otherwise, 2 for an invalid command line.
set -euo pipefail
cd "$(dirname "$0")/../.."

pack=${PACK:-build/gpu-pack}
if [ -z "${PYTHON:-}" ]; then
    if [ ! -d "$pack" ] && [ -x .venv/bin/python ]; then PYTHON=$PWD/.venv/bin/python; else PYTHON=python3; fi
fi
# A vendor's plugin of torch is loaded by the platform that needs it.
export TORCH_DEVICE_BACKEND_AUTOLOAD=${TORCH_DEVICE_BACKEND_AUTOLOAD:-0}

if [ -d "$pack" ]; then
    started=$SECONDS
    PYTHON=$("$PYTHON" ci/gpu/unpack.py "$pack" build/gpu-env)
    export PATH="${PYTHON%/*}:$PATH"  # ninja
    echo "installed the pack in $((SECONDS - started)) s"
fi
exec "$PYTHON" ci/gpu/proof.py "$@"
