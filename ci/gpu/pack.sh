#!/usr/bin/env bash
# Gathers the wheels that a bare GPU machine lacks, on a machine with a package index and this project's environment.
#
#     ci/gpu/pack.sh [--python 3.11] [--limit 60] [--out build/gpu-pack] [--list] [--without-model]
#
# It fills numbered folders of at most --limit MB each: 1 has srv, what it requires and FlashInfer; the others have the
# demo model in pieces, and can be left behind (then the stage that compares its tokens is passed over). Copy the folder
# to the machine with the checkout, and start ci/gpu/run.sh there. Prints every wheel with its size and licence.
#
# PYTHON: the interpreter (default: .venv). Exit status: 0, or 1 if a wheel cannot be had or a folder is too large.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${PYTHON:-.venv/bin/python}" ci/gpu/pack.py "$@"
