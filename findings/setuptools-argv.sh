#!/usr/bin/env bash
# setuptools 84.2.1: the PEP 517 hook `build_sdist` replaces `sys.argv` of its caller and leaves it
# so. A script that passes `sys.argv[1]` to `build_sdist` and then to `build_wheel` writes the wheel
# into a folder named after a command of setuptools, with exit code 0.
# Exits non-zero if this changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q setuptools==84.2.1
mkdir "$folder/project" "$folder/out"
cd "$folder/project"
printf '[project]\nname = "some"\nversion = "1"\n' >pyproject.toml
printf 'x = 1\n' >some.py
cat >build.py <<'PYTHON'
import sys
from setuptools import __version__, build_meta
before = list(sys.argv)
build_meta.build_sdist(sys.argv[1])
print("setuptools", __version__, "sys.argv before:", before[1:], "after:", sys.argv[1:], file=sys.stderr)
build_meta.build_wheel(sys.argv[1])
PYTHON
"$folder/venv/bin/python" build.py "$folder/out" >/dev/null
ls "$folder/out" "$folder/project"
[ ! -e "$folder/out/some-1-py3-none-any.whl" ] && ls "$folder"/project/*/some-1-py3-none-any.whl
