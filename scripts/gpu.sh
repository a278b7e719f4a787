#!/usr/bin/env bash
# Everything that needs an NVIDIA GPU, unattended: build with kernels, tests marked `gpu`, compute-sanitizer, benchmarks.
# Text goes to benchmarks/results/gpu-<device>.txt.  Exit status: 0 only when every step that could run has passed; a
# machine without a GPU, or with a PyTorch that cannot use it, is an error here and not a reason to skip.
#
#   PYTHON=...   the interpreter to use; else .venv's, else python3, whichever has a PyTorch that sees the GPU first
#   BUDGET=540   seconds for everything; each step gets a share and is stopped at its end
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
started=$SECONDS
budget=${BUDGET:-540}

stop() {
    printf 'gpu: %s\n' "$*" >&2
    exit 2
}

gpu=$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null | head -n 1)
[ -n "$gpu" ] || stop "no NVIDIA GPU on this machine (nvidia-smi finds none); nothing was run"

python=
for candidate in ${PYTHON:+"$PYTHON"} .venv/bin/python python3; do
    if "$candidate" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
        python=$candidate
        break
    fi
done
[ -n "$python" ] || stop "$gpu is here, but no PyTorch that can use it: set PYTHON to an interpreter that has a CUDA build"

export DDP_MP_REQUIRE_GPU=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1
device=$("$python" -c 'import re, torch; print(re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-"))')
pytest=("$python" -m pytest -p no:cacheprovider -q)
"$python" -c 'import pytest_timeout' 2>/dev/null && pytest+=(--timeout=120)
results=benchmarks/results
scratch=build/gpu
mkdir -p "$results" "$scratch"
report=$results/gpu-$device.txt
failed=()

{
    echo "gpu: $gpu"
    "$python" -c 'import sys, torch; print("python", sys.version.split()[0], "| torch", torch.__version__)'
    nvcc --version 2>/dev/null | tail -n 2 | head -n 1
} | tee "$report"

# step NAME SECONDS COMMAND...: runs it within SECONDS and within what is left of the budget, and keeps its last lines.
step() {
    local name=$1 limit=$2 left=$((budget - (SECONDS - started))) code log
    shift 2
    log=$scratch/$name.log
    if [ "$left" -le 5 ]; then
        failed+=("$name: no time left")
        echo "== $name: not run, no time left" | tee -a "$report"
        return 1
    fi
    [ "$limit" -le "$left" ] || limit=$left
    local from=$SECONDS
    timeout --kill-after=10 "$limit" "$@" >"$log" 2>&1
    code=$?
    {
        echo "== $name: exit $code after $((SECONDS - from)) s"
        tail -n "${LINES_KEPT:-12}" "$log"
    } | tee -a "$report"
    [ "$code" -eq 0 ] || failed+=("$name: exit $code, see $log")
    return "$code"
}

step build 180 "$python" setup.py build_ext --inplace || stop "the build failed"
step info 60 "$python" -m ddp_mp info
step check 120 "$python" -m ddp_mp check
step tests 200 "${pytest[@]}" -m gpu -rs tests

if sanitizer=$(command -v compute-sanitizer); then
    # Some virtual machines hide the debugger interface: tell "refused" from "found something".
    timeout --kill-after=10 60 "$sanitizer" --tool memcheck "$python" -c \
        'import torch; torch.zeros(8, device="cuda").add_(1).cpu()' >"$scratch/probe.log" 2>&1
    if grep -q 'ERROR SUMMARY: 0 errors' "$scratch/probe.log"; then
        for tool in memcheck racecheck; do
            step "$tool" 120 "$sanitizer" --tool "$tool" --error-exitcode 9 --target-processes all \
                "${pytest[@]}" -x -m "gpu and not long" -k "cast or kernel" tests/cuda/test_gpu.py
        done
    else
        echo "== compute-sanitizer: this machine refuses it: $(grep -m 1 -i -E 'not supported|error' "$scratch/probe.log")" |
            tee -a "$report"
    fi
else
    echo "== compute-sanitizer: not installed" | tee -a "$report"
fi

LINES_KEPT=400 step benchmarks 200 "$python" -m benchmarks --device cuda --tag "gpu-$device"

if [ ${#failed[@]} -gt 0 ]; then
    printf 'FAILED %s\n' "${failed[@]}" | tee -a "$report"
    exit 1
fi
echo "gpu: all passed in $((SECONDS - started)) s; report in $report" | tee -a "$report"
