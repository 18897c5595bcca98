#!/usr/bin/env bash
# ptxas ignores setmaxnreg in a kernel with one-argument __launch_bounds__, and takes it with two.
# Its warning (C7508) names no kernel, and comes before the first kernel's name.
# Exits non-zero where that changed. Needs g++ and a network.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check \
  nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 \
  nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85
nvcc=$(echo venv/lib/python3*/site-packages/nvidia/cu13/bin/nvcc)
"$nvcc" --version | tail -2 | head -1
compile() {
  cat >unit.cu <<END
__global__ void __launch_bounds__($1) split(float* out) {
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  out[threadIdx.x] *= 2.0f;
}
END
  "$nvcc" -gencode=arch=compute_90a,code=sm_90a -Xptxas=-v -cubin unit.cu -o unit.cubin 2>&1
}
echo "== __launch_bounds__(384)"
compile 384 | tee one
echo "== __launch_bounds__(384, 1)"
compile "384, 1" | tee two
head -1 one | grep -q "(C7508).*'setmaxnreg' ignored"
! head -1 one | grep -q split
! grep -q C7508 two
