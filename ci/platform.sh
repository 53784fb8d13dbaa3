#!/usr/bin/env bash
# All that a machine with a platform's hardware runs: install, doctor, conformance, benchmarks, evidence.
#
#     ci/platform.sh [--quick [--tests PATH]...] NAME[:VARIANT]
#                                                    cpu, toy, cuda, rocm, npu:a2, npu:a3, xpu, or a plugin's own
#
# --quick leaves the benchmarks out, and writes the evidence beside the other results instead of into the matrix.
# --tests runs, of the tests that show evidence, those of PATH alone: for a tree whose others are run anyway. Only with
# --quick, since a part of them is not what a platform shows. Everything else that is written lies in build/ci/NAME.
# A simulated device (toy; npu with SRV_NPU_SIMULATOR set) is never benchmarked, and what it shows is E3 at most.
# PYTHON: the interpreter (default: .venv, made if it is not there).
#
# Exit status: 0 all is well; 1 something failed; 2 wrong words; 3 the hardware is not here (or srv cannot compute on it
# yet): the reason is printed, nothing was tested, no evidence was added.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() { sed -n '4,15s/^# \{0,1\}//p' "$0" >&2; exit 2; }
say() { printf '\n== %s\n' "$*"; }
must() { "$@" || { echo "failed with status $?: $*" >&2; exit 1; }; }

quick= device= tests=()
while [ $# -gt 0 ]; do
    case "$1" in
        --quick) quick=1 ;;
        --tests) [ $# -gt 1 ] || usage; tests+=("$2"); shift ;;
        -*) usage ;;
        *) [ -z "$device" ] || usage; device=$1 ;;
    esac
    shift
done
[ -n "$device" ] || usage
[ -n "$quick" ] || [ ${#tests[@]} -eq 0 ] || usage
name=${device%%:*}
out=build/ci/${device/:/-}
python=${PYTHON:-.venv/bin/python}
mkdir -p "$out"

say "install"
[ -n "${PYTHON:-}" ] || [ -x "$python" ] || must make env
export PIP_CONSTRAINT=${PIP_CONSTRAINT:-$PWD/constraints.txt}  # nothing may pull a second torch
words=$(must "$python" ci/platform_state.py install "$name")
if [ -n "$words" ]; then
    mapfile -t missing <<< "$words"
    must "$python" -m pip install "${missing[@]}"
else
    echo "everything for $name is installed"
fi

say "doctor"
rm -f "$out/doctor.json"
"$python" -m srv doctor --device "$device" --report "$out/doctor.json" || true  # the verdict is made from its report
status=0
state=$("$python" ci/platform_state.py verdict "$out/doctor.json") || status=$?
echo "$state"
[ "$status" -eq 0 ] || exit "$status"

say "conformance"
must "$python" -m srv conformance run --device "$device" --level L4 --report "$out/conformance.jsonl"

if [ -n "$quick" ]; then
    say "no benchmarks: --quick"
elif [ "$state" = simulated ]; then
    say "no benchmarks: the speed of a simulated device says nothing"
else
    say "benchmarks"
    SRV_DEVICE=$device must "$python" tests/bench/spine.py --out "$out"
fi

say "evidence"
# Tests that take their device from the option; all others say which platform they are evidence of.
following=(tests/e2e/test_e2e_openai.py tests/e2e/test_e2e_arguments.py)
[ "$name" != cpu ] || following=()
[ ${#tests[@]} -eq 0 ] || following=("${tests[@]}")
target=(--srv-evidence support_matrix/evidence)
[ -z "$quick" ] || target=(--srv-evidence "$out/evidence.jsonl" --srv-evidence-any-tree)
export TORCH_DEVICE_BACKEND_AUTOLOAD=${TORCH_DEVICE_BACKEND_AUTOLOAD:-0}
must "$python" -m pytest -q -m covers "${target[@]}" --srv-evidence-device "$name" "${following[@]}"

say "$device: all is well; results in $out"
