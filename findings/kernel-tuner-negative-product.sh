#!/usr/bin/env bash
# Kernel Tuner 1.5.0: a restriction text that sets a product of two parameters equal to a negative
# number leaves no configuration. As a function the same restriction leaves those that fulfil it.
# Exits non-zero if this changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q kernel-tuner==1.5.0
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

from kernel_tuner.searchspace import Searchspace

print("kernel_tuner", version("kernel_tuner"), "python-constraint2", version("python-constraint2"))
parameters = {"width": [1, 2, 4], "step": [-1, 0, 1]}


def left(restrictions):
    return sorted(Searchspace(dict(parameters), restrictions, 1024).list)


text = left(["width * step == -2"])
function = left(lambda p: p["width"] * p["step"] == -2)
positive = left(["width * step == 2"])
print("text with -2:", text, "function with -2:", function, "text with 2:", positive)
assert not text and function == [(2, -1)] and positive == [(2, 1)]
PYTHON
