#!/usr/bin/env bash
# A copy by TMA that one thread issues, chosen by `threadIdx.x == 0`, is issued in a loop over lanes:
# ptxas does not know that one lane is active. Chosen by `elect.sync` it is one instruction.
# Exits non-zero where that changed. Needs g++ and a network.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check \
  nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 \
  nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 nvidia-cuda-cuobjdump==13.5.37 \
  nvidia-cuda-nvdisasm==13.5.37
folder_of_tools=$(echo "$PWD"/venv/lib/python3*/site-packages/nvidia/cu13/bin)
export PATH="$folder_of_tools:$PATH"
nvcc --version | tail -2 | head -1
cat >unit.cu <<'END'
#include <cuda.h>
#include <cstdint>
__device__ __forceinline__ bool is_copying() {
#ifdef ELECTS
  uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected != 0;
#else
  return threadIdx.x == 0;
#endif
}
__global__ void copies(const __grid_constant__ CUtensorMap map, int count) {
  extern __shared__ __align__(1024) char shared[];
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  if (threadIdx.x / 32 == 0 && is_copying())
    for (int i = 0; i < count; ++i)
      asm volatile(
          "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, { %2, %3 }], [%4];"
          ::"r"(to + 1024 + i % 4 * 8192), "l"(&map), "r"(i * 64), "r"(int(blockIdx.x)), "r"(to) : "memory");
}
END
copies() {
  nvcc -O3 -gencode=arch=compute_90a,code=sm_90a -cubin "$@" unit.cu -o unit.cubin
  cuobjdump -sass unit.cubin >unit.txt
  echo "$1: $(grep -c UTMALDG unit.txt) copies, $(grep -c 'BRA.U.ANY' unit.txt) loops over lanes"
  grep -c 'BRA.U.ANY' unit.txt >loops || true
}
copies -DCOMPARES
compared=$(cat loops)
copies -DELECTS
elected=$(cat loops)
[ "$compared" -gt 0 ] && [ "$elected" -eq 0 ] || { echo "that changed"; exit 1; }
