"""C++ in place of CuTe, for kernels' masks on the host: the scores of a warp group as the
accumulators of its threads hold them.
"""

PREAMBLE = """
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <type_traits>
#include <vector>
#define CUTE_DEVICE
#define CUTE_UNROLL
using std::max;
using std::min;
using std::true_type;
using std::false_type;
struct { int x; } threadIdx;
struct Octets { int c, r, j; };
Octets make_coord(int c, int r, int j) { return {c, r, j}; }
namespace cutlass {
struct FastDivmod {
  int divisor = 1;
  FastDivmod() = default;
  explicit FastDivmod(int divisor) : divisor(divisor) {}
  void operator()(int& quotient, int& remainder, int x) const {
    quotient = x / divisor, remainder = x % divisor;
  }
};
}  // namespace cutlass
// 64 rows of a warp group, as the accumulators of its threads hold them.
struct Scores {
  std::vector<float> at;
  int columns;
  explicit Scores(int columns) : at(64 * columns), columns(columns) {}
  float& operator()(Octets o, int, int) {
    int const row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * o.r;
    return at[row * columns + 8 * o.j + threadIdx.x % 4 * 2 + o.c];
  }
};
"""
