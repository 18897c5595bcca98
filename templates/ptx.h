// PTX instructions for which CUDA C++ has no function, and CUTLASS none or one that does more.
#pragma once

#include <cstdint>

namespace tuner {

// 2^x, wrong by two units in the last place at most; denormal numbers are zero.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, wrong by one unit in the last place; denormal numbers are zero.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Waits until the kernels before this launch in the stream have ended and what they wrote is seen;
// before that a thread touches nothing in memory but the parameters. Takes no time unless the kernel
// was launched as a programmatic dependent.
__device__ __forceinline__ void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the kernel after this one in the stream begin, where it was launched as a programmatic
// dependent, once every block has come here or ended.
__device__ __forceinline__ void grid_dependency_launch() { asm volatile("griddepcontrol.launch_dependents;"); }

// Keeps the compiler from moving plain loads and stores past it. CUTLASS's barriers alone do not.
__device__ __forceinline__ void compiler_fence() { asm volatile("" ::: "memory"); }

// Orders this thread's reads of shared memory before copies (TMA, bulk) that a later arrival at a
// barrier lets in. An arrival alone does not wait for loads that are under way.
__device__ __forceinline__ void async_copy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Values in the shared memory of a block of the cluster; the address is of `cute::set_block_rank`.
__device__ __forceinline__ float2 load_cluster(uint32_t address, float2 const&) {
  float2 x;
  asm volatile("ld.shared::cluster.v2.f32 { %0, %1 }, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address));
  return x;
}
__device__ __forceinline__ float4 load_cluster(uint32_t address, float4 const&) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 { %0, %1, %2, %3 }, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(address));
  return x;
}

}  // namespace tuner
