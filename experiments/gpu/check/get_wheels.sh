#!/usr/bin/env bash
# Downloads the wheels of wheels.txt into .whl/ at the project's root, which git ignores. Needs PyPI; runs anywhere.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../../.."
mkdir -p .whl
"${PY:-python3}" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --platform any -d .whl -r "$here/wheels.txt"
du -sh .whl
