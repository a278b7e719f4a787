#!/usr/bin/env bash
# Runs the tests with the extension built under AddressSanitizer and UndefinedBehaviorSanitizer, in a folder of its own:
# the ordinary build in the checkout stays as it is.  Arguments go to pytest.
#
# Python itself is not instrumented, so the runtimes are preloaded; libstdc++ too, because PyTorch throws C++ exceptions
# and the interceptor of __cxa_throw must find the real one at start.  Leak detection is off: an interpreter that exits
# owns memory on purpose.  Reference leaks have tests of their own.  So is detect_stack_use_after_return, because GCC's fake
# frames are not aligned for spilled 64-byte vectors.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(realpath --no-symlinks "${PYTHON:-.venv/bin/python}")
compiler=${CC:-gcc}
build=$PWD/build/sanitize

runtimes=()
for library in libasan.so libubsan.so libstdc++.so.6; do
    path=$("$compiler" -print-file-name=$library)
    [ "$path" != "$library" ] || {
        echo "sanitize: $compiler has no $library; install its sanitizer runtimes" >&2
        exit 1
    }
    runtimes+=("$(realpath "$path")")
done

DDP_MP_DEVELOP=1 DDP_MP_SANITIZE=address,undefined "$python" setup.py --quiet build \
    --build-base "$build/temporary" --build-lib "$build/library"
# build_py copies what setuptools lists; an extension built in place earlier must not be among it.
instrumented=$(find "$build/library/ddp_mp" -name '_C*.so' -print -quit)
nm --dynamic --undefined-only "$instrumented" | grep -q __asan_ || {
    echo "sanitize: $instrumented is not instrumented" >&2
    exit 1
}

# Tests run compilers.  nvcc does not survive a preloaded runtime and the others are slow under it, so they are found
# through scripts that drop it.
tools=$build/tools
rm -rf "$tools" && mkdir -p "$tools/bin"
without_runtimes() {
    printf '#!/bin/sh\nunset LD_PRELOAD\nexec "%s" "$@"\n' "$1" >"$tools/bin/${1##*/}"
    chmod +x "$tools/bin/${1##*/}"
}
for name in cc gcc c++ g++; do
    path=$(command -v "$name") && without_runtimes "$path"
done
for nvcc in "${CUDA_HOME:+$CUDA_HOME/bin/nvcc}" "$(command -v nvcc || true)" /usr/local/cuda/bin/nvcc; do
    toolkit=$(dirname "$(dirname "$(realpath "${nvcc:-/none}")")")
    [ -x "$nvcc" ] && [ -f "$toolkit/include/cuda.h" ] || continue
    without_runtimes "$toolkit/bin/nvcc"
    ln -s "$toolkit/include" "$tools/include"
    export CUDA_HOME=$tools
    break
done
export PATH=$tools/bin:$PATH

export LD_PRELOAD="${runtimes[*]}"
export ASAN_OPTIONS=detect_leaks=0:strict_string_checks=1:abort_on_error=1
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export PYTHONMALLOC=malloc PYTHONPATH=$build/library PYTHONSAFEPATH=1 DDP_MP_UNDER_SANITIZER=1
loaded=$("$python" -c 'import ddp_mp._C as extension; print(extension.__file__)')
[ "$loaded" = "$instrumented" ] || {
    echo "sanitize: Python imports $loaded instead of $instrumented" >&2
    exit 1
}
# The C programs build themselves, with their own sanitizers; the simulator's own tests are about the simulator; the
# benchmarks measure nothing here.
exec "$python" -m pytest -p no:cacheprovider --timeout=1200 --ignore=tests/unit/test_c_programs.py --ignore=tests/simulator \
    --ignore=tests/shipping/test_benchmarks.py -m "not long" "$@" tests
