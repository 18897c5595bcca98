// The host's half of a unit whose device half nvcc compiles alone (tuner/compile/compiler.py). g++
// reads CUTLASS without nvcc: cudafe++, which nvcc runs first over what is for the host, takes
// longer than g++ itself. Here is what CUTLASS's headers then miss, and where the kernels come
// from.
#pragma once

#include <algorithm>

#include <cuda_runtime.h>

// Named in functions that only a device runs; none is ever called.
extern uint3 const threadIdx, blockIdx;
extern dim3 const blockDim, gridDim;
void __syncthreads();
void __syncwarp(unsigned = ~0u);
namespace cutlass::arch {
int SmId();
}  // namespace cutlass::arch
// Empty for compilers older than nvcc 9; its other contents want nvcc's own headers.
#pragma push_macro("__CUDACC_VER_MAJOR__")
#undef __CUDACC_VER_MAJOR__
#include "cutlass/arch/wmma.h"
#pragma pop_macro("__CUDACC_VER_MAJOR__")

asm(".pushsection .nv_fatbin, \"a\"\n"
    ".balign 16\n"
    "tuner_image: .incbin \"unit.fatbin\"\n"
    ".popsection\n");
extern "C" unsigned char const tuner_image[];

namespace tuner {
namespace {

// A kernel of the device half, which is loaded when one is first asked for and stays.
cudaError_t find_kernel(char const* name, cudaKernel_t* kernel) {
  static cudaLibrary_t library = nullptr;
  static cudaError_t const loaded =
      cudaLibraryLoadData(&library, tuner_image, nullptr, nullptr, 0, nullptr, nullptr, 0);
  return loaded == cudaSuccess ? cudaLibraryGetKernel(kernel, library, name) : loaded;
}

}  // namespace
}  // namespace tuner
