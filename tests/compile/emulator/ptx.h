// What `templates/ptx.h` has, where no kernel is in front and the compiler moves nothing.
#pragma once

inline float __fmul_rn(float x, float y) { return x * y; }

namespace tuner {
inline void grid_dependency_wait() {}
inline void grid_dependency_launch() {}
inline void async_copy_fence() {}
inline float exp2_approx(float x) { return std::exp2(x); }
inline uint64_t evict_first_policy() { return 0; }
inline uint4 load_once(void const* from) {
  uint4 x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}
inline void fetch_bytes(void const*, int) {}
inline float4 load_cluster(uint32_t from, float4 const&) {
  return make_float4(load_shared(from), load_shared(from + 4), load_shared(from + 8), load_shared(from + 12));
}
}  // namespace tuner
