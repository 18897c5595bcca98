#!/usr/bin/env bash
# ptxas puts all loads of a software pipeline in registers on one scoreboard: loads of eight
# elements that are carried over a loop, each used eight loads later. A wait for a scoreboard ends
# when it has no load left, so the use of the oldest element waits for the newest load as well. The
# pipeline then hides less than its depth promises; cp.async, whose groups are waited for in order,
# does not have this. Exits non-zero where that changed. Needs g++ and a network.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check \
  nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 \
  nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 nvidia-cuda-nvdisasm==13.2.86
bin=$(echo venv/lib/python3*/site-packages/nvidia/cu13/bin)
"$bin/nvcc" --version | tail -2 | head -1
cat >unit.cu <<'END'
__global__ void sums(const float* in, float* out, int steps) {
  float ahead[8], sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) ahead[i] = in[i * 32 + threadIdx.x];
#pragma unroll 1
  for (int step = 1; step < steps; ++step) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sum = sum * 0.5f + ahead[i];
      ahead[i] = in[(step * 8 + i) * 32 + threadIdx.x];
      asm volatile("" ::: "memory");
    }
  }
  for (int i = 0; i < 8; ++i) sum += ahead[i];
  out[threadIdx.x] = sum;
}
END
"$bin/nvcc" -O3 -gencode=arch=compute_90a,code=sm_90a -cubin unit.cu -o unit.cubin
"$bin/nvdisasm" -hex -c unit.cubin >sass
venv/bin/python - <<'PYTHON'
import re

lines = iter(open("sass"))
loads = []
for line in lines:
    if "LDG" not in line or "/*" not in line:
        continue
    control = int(re.search(r"/\* 0x([0-9a-f]{16}) \*/", next(lines))[1], 16) >> 41
    loads.append((re.search(r"LDG\S* R\d+", line)[0], control >> 5 & 7))
for text, scoreboard in loads:
    print(text, "scoreboard", scoreboard)
in_loop = {scoreboard for _, scoreboard in loads[8:]}
print(len(loads) - 8, "loads of the loop on", len(in_loop), "of six scoreboards")
assert len(loads) == 16 and len(in_loop) == 1
PYTHON
