#!/usr/bin/env bash
# Triton 3.6.0: the compiler of `@triton.jit` evaluates a parameter's annotation as code of the
# kernel, also under `from __future__ import annotations`. `x: Any` is a NameError at the first
# compilation for a GPU. Triton's interpreter runs the same kernel. `x: tl.tensor` compiles.
# Exits non-zero if this changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q triton==3.6.0
cd "$folder"
for kind in Any tl.tensor; do
    cat >"kernel_${kind/./_}.py" <<PYTHON
from __future__ import annotations
from typing import Any
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def double(x: $kind, BLOCK: tl.constexpr):
    at = x + tl.arange(0, BLOCK)
    tl.store(at, 2 * tl.load(at))


source = ASTSource(double, {"x": "*fp32", "BLOCK": "constexpr"}, constexprs={"BLOCK": 128})
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
print(triton.__version__, "x: $kind compiles,", len(compiled.asm["ptx"]), "characters of PTX")
PYTHON
done
venv/bin/python kernel_tl_tensor.py
! venv/bin/python kernel_Any.py >any.txt 2>&1
tail -n 1 any.txt
grep -q "NameError.*global variable Any" any.txt
