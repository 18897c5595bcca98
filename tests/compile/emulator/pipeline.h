// The functions of `templates/pipeline.h` on a host: a cluster's threads as fibers, in an order drawn at
// random. Copies arrive at a random time; what they are to replace is poisoned when they are issued. Products
// read their operands when they are waited for. A wrong arrival, a block that is used after its end and a
// standstill end the program.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include <ucontext.h>

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

namespace emulator {

constexpr uint32_t kBase = 1024;           // of a block's shared memory, as swizzles want it
constexpr uint32_t kBlockBits = 24;        // an address in another block has its rank + 1 above them
constexpr int kStackBytes = 96 << 10;
constexpr uint32_t kNan = 0x7FC00000;

[[noreturn]] inline void fail(char const* what) {
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

struct Barrier {
  int arrivals = 0, pending = 0, bytes = 0;
  uint32_t phase = 0;
};

struct Meeting {
  int here = 0;
  uint64_t round = 0;
};

struct Block {
  std::vector<uint8_t> memory;
  std::map<uint32_t, Barrier> barriers;
  std::map<int, Meeting> meetings;  // named barriers; -1: all threads
  int alive = 0;
};

struct Product {
  float* d;
  uint64_t x, y;
  int adds, columns;
  bool transposed = false;  // whether the columns of y are contiguous, and not K
  int group = 0;  // that it was committed with; 0 before
  std::vector<float> own = {};  // two rows of x, where it is in registers
};

struct Copy {
  std::function<void()> run;
};

struct Warp {
  uint32_t words[32];
  Meeting meeting;
};

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  uint3 thread{}, block_index{};
  int rank = 0;
  Block* block = nullptr;
  Warp* warp = nullptr;
  bool ended = false;
  std::vector<Product> products;
  int groups = 0;  // of products, committed
  std::deque<Copy> copies;  // of single floats, and arrivals behind them: in order
  std::deque<Copy> stores;  // boxes that are still to be read
};

struct Machine {
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<Copy> boxes;  // by TMA: in any order
  Meeting meeting;          // of the cluster
  Fiber* current = nullptr;
  ucontext_t scheduler;
  std::mt19937 random;
  uint64_t progress = 0;
  dim3 grid, block;
  std::function<void()> body;
};

inline Machine& machine() {
  static Machine one;
  return one;
}
inline Fiber& self() { return *machine().current; }

inline void yield() { swapcontext(&self().context, &machine().scheduler); }

template <class Condition>
void wait_until(Condition&& holds) {
  while (!holds()) yield();
  ++machine().progress;
}

// `count` threads come to a meeting.
inline void meet(Meeting& meeting, int count) {
  uint64_t const round = meeting.round;
  if (++meeting.here == count) meeting.here = 0, ++meeting.round;
  ++machine().progress;
  wait_until([&] { return meeting.round != round; });
}

// A thread comes to a named barrier and does not wait.
inline void come(int name, int count) {
  Meeting& meeting = self().block->meetings[name];
  if (++meeting.here == count) meeting.here = 0, ++meeting.round;
  ++machine().progress;
}

struct Place {
  Block* block;
  uint32_t address;
};

inline Place place_of(uint32_t address) {
  uint32_t const rank = address >> kBlockBits;
  Block* block = rank == 0 ? self().block : machine().blocks.at(rank - 1).get();
  if (block->alive == 0) fail("a block's shared memory is used after its end");
  address &= (1u << kBlockBits) - 1;
  if (address < kBase || address - kBase >= block->memory.size()) fail("an address is not in shared memory");
  return {block, address};
}

inline void complete(Barrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.arrivals;
  barrier.phase ^= 1;
}

inline void arrive_at(Place place, int bytes) {
  auto found = place.block->barriers.find(place.address);
  if (found == place.block->barriers.end()) fail("no barrier is there");
  Barrier& barrier = found->second;
  if (--barrier.pending < 0) fail("a barrier has more arrivals than it waits for");
  barrier.bytes += bytes;
  ++machine().progress;
  complete(barrier);
}

inline uint8_t* bytes_at(Place place, uint32_t count) {
  if (place.address - kBase + count > place.block->memory.size()) fail("an access ends beyond shared memory");
  return place.block->memory.data() + place.address - kBase;
}

inline void enter() {
  machine().body();
  Fiber& fiber = self();
  fiber.ended = true;
  --fiber.block->alive;
  ++machine().progress;
  yield();
}

inline bool run_copy() {
  Machine& m = machine();
  std::vector<Fiber*> with;
  for (auto& fiber : m.fibers)
    if (!fiber->copies.empty()) with.push_back(fiber.get());
  size_t const choices = m.boxes.size() + with.size();
  if (choices == 0) return false;
  size_t const chosen = m.random() % choices;
  if (chosen < m.boxes.size()) {
    Copy copy = std::move(m.boxes[chosen]);
    m.boxes.erase(m.boxes.begin() + chosen);
    copy.run();
  } else {
    Fiber* fiber = with[chosen - m.boxes.size()];
    Copy copy = std::move(fiber->copies.front());
    fiber->copies.pop_front();
    copy.run();
  }
  ++m.progress;
  return true;
}

// Runs `body` in all threads of a grid, cluster after cluster.
inline void launch(int grid, int cluster, int threads, int smem_bytes, unsigned seed, std::function<void()> body) {
  Machine& m = machine();
  m.random.seed(seed);
  m.grid = dim3(grid), m.block = dim3(threads);
  m.body = std::move(body);
  for (int first = 0; first < grid; first += cluster) {
    m.fibers.clear(), m.blocks.clear(), m.warps.clear();
    m.meeting = {};
    for (int rank = 0; rank < cluster; ++rank) {
      m.blocks.push_back(std::make_unique<Block>());
      Block* block = m.blocks.back().get();
      block->memory.assign(smem_bytes, 0x7F);
      block->alive = threads;
      for (int thread = 0; thread < threads; ++thread) {
        if (thread % 32 == 0) m.warps.push_back(std::make_unique<Warp>());
        m.fibers.push_back(std::make_unique<Fiber>());
        Fiber* fiber = m.fibers.back().get();
        fiber->thread = make_uint3(thread, 0, 0);
        fiber->block_index = make_uint3(first + rank, 0, 0);
        fiber->rank = rank;
        fiber->block = block;
        fiber->warp = m.warps.back().get();
        fiber->stack.resize(kStackBytes);
        getcontext(&fiber->context);
        fiber->context.uc_stack.ss_sp = fiber->stack.data();
        fiber->context.uc_stack.ss_size = fiber->stack.size();
        fiber->context.uc_link = nullptr;
        makecontext(&fiber->context, enter, 0);
      }
    }
    std::vector<Fiber*> order;
    for (auto& fiber : m.fibers) order.push_back(fiber.get());
    int slow = -1;  // a block that gets no turn for a while
    for (int round = 0;; ++round) {
      if (round % 64 == 0) slow = cluster > 1 ? int(m.random() % (2 * cluster)) : -1;
      uint64_t const before = m.progress;
      std::shuffle(order.begin(), order.end(), m.random);
      bool is_done = true, has_waited = false;
      for (Fiber* fiber : order) {
        if (fiber->ended) continue;
        is_done = false;
        if (fiber->rank == slow) {
          has_waited = true;
          continue;
        }
        m.current = fiber;
        swapcontext(&m.scheduler, &fiber->context);
        if (m.random() % 64 == 0) {  // of the thread that issued it, or of none: copies need no thread
          m.current = fiber;
          run_copy();
        }
      }
      if (is_done) break;
      if (m.progress == before && !run_copy()) {
        if (!has_waited) fail("all threads wait");
        slow = -1;
      }
    }
    if (!m.boxes.empty()) fail("copies are under way after the end");
  }
}

struct Matrix {  // what a tensor map describes
  uint8_t const* data;
  int64_t columns, rows, stride;
  int box_rows;
  int floats = 0;  // of a box's row, which is not swizzled then; else 128 bytes
};

inline CUtensorMap map_of(Matrix const& matrix) {
  CUtensorMap map{};
  static_assert(sizeof(matrix) <= sizeof(map));
  std::memcpy(&map, &matrix, sizeof(matrix));
  return map;
}

struct Tensor {  // what a tensor map of more dimensions describes: 16-bit rows, and what they lie in
  uint16_t const* data;
  int columns;
  int sizes[3];
  int64_t strides[3];  // elements
  int box[3];          // of 64 columns
};

inline CUtensorMap tensor_of(Tensor const& tensor) {
  CUtensorMap map{};
  static_assert(sizeof(tensor) <= sizeof(map));
  std::memcpy(&map, &tensor, sizeof(tensor));
  return map;
}

inline float e4m3(uint8_t bits) {
  int const exponent = bits >> 3 & 15, mantissa = bits & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  float const size = exponent ? std::ldexp(1.0f + mantissa / 8.0f, exponent - 7) : std::ldexp(mantissa / 8.0f, -6);
  return bits & 0x80 ? -size : size;
}

inline uint32_t swizzled(uint32_t address) { return address ^ ((address >> 7 & 7) << 4); }

// A box of a tensor to the block of a rank.
inline void copy_tensor(CUtensorMap const& map, uint32_t to, int column, int x, int y, int z, uint32_t barrier, uint32_t rank) {
  to |= (rank + 1) << kBlockBits, barrier |= (rank + 1) << kBlockBits;
  Tensor tensor;
  std::memcpy(&tensor, &map, sizeof(tensor));
  int const rows = tensor.box[0] * tensor.box[1] * tensor.box[2];
  if (to % 1024) fail("a box lies between swizzle atoms");
  Place const target = place_of(to), at = place_of(barrier);
  std::memset(bytes_at(target, rows * 128), 0x7F, rows * 128);
  machine().boxes.push_back({[=] {
    for (int r = 0; r < rows; ++r)
      for (int c = 0; c < 64; ++c) {
        int const place[] = {x + r % tensor.box[0], y + r / tensor.box[0] % tensor.box[1], z + r / (tensor.box[0] * tensor.box[1])};
        bool is_there = column + c < tensor.columns;
        int64_t offset = column + c;
        for (int i = 0; i < 3; ++i) is_there &= place[i] >= 0 && place[i] < tensor.sizes[i], offset += place[i] * tensor.strides[i];
        uint16_t const word = is_there ? tensor.data[offset] : 0;
        std::memcpy(target.block->memory.data() + swizzled(target.address + r * 128 + 2 * c) - kBase, &word, 2);
      }
    Barrier& there = at.block->barriers.at(at.address);
    there.bytes -= rows * 128;
    complete(there);
  }});
}

// Bytes of an operand's element: e4m3, or bf16 where the program says so before.
#ifdef EMULATES_BF16
constexpr int kElementBytes = 2;
#else
constexpr int kElementBytes = 1;
#endif

// A row's elements of K of an operand of WGMMA, or a column's of one whose columns are contiguous.
inline float element(uint64_t descriptor, int row, int k, bool transposed = false) {
  if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0) fail("an operand is not in the widest swizzle at its base");
  uint32_t const start = (descriptor & 0x3FFF) << 4, stride = (descriptor >> 32 & 0x3FFF) << 4;
  uint32_t const leading = (descriptor >> 16 & 0x3FFF) << 4, columns = 128 / kElementBytes;
  uint32_t const place = transposed ? row / columns * leading + row % columns * kElementBytes + k / 8 * stride + k % 8 * 128
                                    : row / 8 * stride + row % 8 * 128 + k * kElementBytes;
  uint32_t const address = swizzled(start + place);
  uint8_t const* const bytes = bytes_at(place_of(address), kElementBytes);
  if (kElementBytes == 1) return e4m3(*bytes);
  uint32_t const bits = uint32_t(bytes[1]) << 24 | uint32_t(bytes[0]) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Runs all products but those of the last `left` groups.
inline void run_products(int left = 0) {
  int const thread = self().thread.x % 128, lane = thread % 32, last = self().groups - left;
  std::vector<Product> later;
  for (Product const& product : self().products) {
    if (product.group > last) {
      later.push_back(product);
      continue;
    }
    for (int i = 0; i < product.columns / 2; ++i) {
      int const row = thread / 32 * 16 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      double sum = product.adds ? product.d[i] : 0.0;
      for (int k = 0; k < 32 / kElementBytes; ++k) sum += double(product.own.empty() ? element(product.x, row, k) : product.own[i / 2 % 2 * 16 + k]) * element(product.y, column, k, product.transposed);
      product.d[i] = static_cast<float>(sum);
    }
  }
  self().products = later;
}

}  // namespace emulator

#define __launch_bounds__(...)
#define __grid_constant__
#undef __shared__
#define __shared__ static  // blocks that have some of their own run one after the other
#define threadIdx (emulator::self().thread)
#define blockIdx (emulator::self().block_index)
#define gridDim (emulator::machine().grid)

inline void __syncwarp(unsigned = ~0u) { emulator::meet(emulator::self().warp->meeting, 32); }
inline void __syncthreads() { emulator::meet(emulator::self().block->meetings[-1], int(emulator::machine().block.x)); }
[[noreturn]] inline void __trap() { emulator::fail("trap"); }
// A lane's word, as all lanes gave theirs.
inline uint32_t word_of_lane(uint32_t word, int lane) {
  emulator::Warp& warp = *emulator::self().warp;
  warp.words[threadIdx.x % 32] = word;
  emulator::meet(warp.meeting, 32);
  uint32_t const other = warp.words[lane];
  emulator::meet(warp.meeting, 32);
  return other;
}
inline uint32_t __shfl_xor_sync(unsigned, uint32_t word, int step) { return word_of_lane(word, threadIdx.x % 32 ^ step); }
inline int __shfl_sync(unsigned, int word, int lane) { return int(word_of_lane(word, lane)); }
inline int __shfl_up_sync(unsigned, int word, int step) {
  int const lane = threadIdx.x % 32;
  return int(word_of_lane(word, lane >= step ? lane - step : lane));
}
inline unsigned __ballot_sync(unsigned, bool holds) {
  unsigned all = 0;
  for (int lane = 0; lane < 32; ++lane) all |= word_of_lane(holds, lane) << lane;
  return all;
}
inline int __popc(unsigned word) { return __builtin_popcount(word); }
inline float __shfl_xor_sync(unsigned, float x, int step) {
  uint32_t word;
  std::memcpy(&word, &x, 4);
  word = __shfl_xor_sync(~0u, word, step);
  std::memcpy(&x, &word, 4);
  return x;
}
inline bool __any_sync(unsigned, bool holds) { return __ballot_sync(~0u, holds) != 0; }
inline int __ffs(int word) { return __builtin_ffs(word); }
inline int atomicAdd(int* to, int x) { return (*to += x) - x; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }

namespace tuner {

constexpr int kSwizzleBytes = 128;

inline uint32_t shared_address(void const*) { return emulator::kBase; }
inline uint32_t block_rank() { return emulator::self().rank; }
// Two rows of a WGMMA's first operand, 16 of K each, as the four lanes of a quad hold them.
inline std::vector<float> rows_of_quad(uint32_t const (&words)[4]) {
  std::vector<float> rows(32);
  for (int word = 0; word < 4; ++word)
    for (int q = 0; q < 4; ++q) {
      uint32_t const both = word_of_lane(words[word], threadIdx.x % 32 / 4 * 4 + q);
      for (int i = 0; i < 2; ++i) {
        uint32_t const bits = both >> 16 * i << 16;
        std::memcpy(&rows[word % 2 * 16 + word / 2 * 8 + 2 * q + i], &bits, 4);
      }
    }
  return rows;
}
inline void cluster_sync() {
  emulator::Machine& m = emulator::machine();
  emulator::meet(m.meeting, int(m.fibers.size()));
}
inline void named_barrier(int name, int threads) { emulator::meet(emulator::self().block->meetings[name], threads); }
template <int kRegisters> void give_registers() {}
template <int kRegisters> void take_registers() {}
inline uint32_t in_block(uint32_t address, uint32_t rank) { return address | (rank + 1) << emulator::kBlockBits; }
inline void init_barrier(uint32_t barrier, int arrivals) {
  emulator::self().block->barriers[emulator::place_of(barrier).address] = {arrivals, arrivals, 0, 0};
}
inline void barrier_init_fence() {}
inline void wait_for(uint32_t barrier, uint32_t parity) {
  emulator::Place const place = emulator::place_of(barrier);
  emulator::wait_until([&] { return place.block->barriers.at(place.address).phase != parity; });
}
inline void arrive(uint32_t barrier) { emulator::arrive_at(emulator::place_of(barrier), 0); }
inline void arrive_in_block(uint32_t barrier) { arrive(barrier); }
inline void arrive_expecting(uint32_t barrier, int bytes) { emulator::arrive_at(emulator::place_of(barrier), bytes); }
inline void arrive_after_copies(uint32_t barrier) {
  emulator::Place const place = emulator::place_of(barrier);
  emulator::self().copies.push_back({[place] { emulator::arrive_at(place, 0); }});
}
inline void copy_float(uint32_t to, float const* from, bool is_there) {
  uint8_t* const target = emulator::bytes_at(emulator::place_of(to), 4);
  std::memcpy(target, &emulator::kNan, 4);
  volatile float const read = *from;  // the address is read or not, but never wrong
  emulator::self().copies.push_back({[=] {
    float const x = is_there ? read : 0.0f;
    std::memcpy(target, &x, 4);
  }});
}
inline void copy_box_to(CUtensorMap const& map, uint32_t to, int column, int row, uint32_t barrier, uint16_t blocks) {
  emulator::Matrix matrix;
  std::memcpy(&matrix, &map, sizeof(matrix));
  int const element = matrix.floats ? 4 : emulator::kElementBytes, width = matrix.floats ? 4 * matrix.floats : 128;
  if (to % (matrix.floats ? 128 : 1024)) emulator::fail("a box lies between swizzle atoms");
  // The device: an illegal instruction (an H200, 27 November 2026).
  if (column * element % 16) emulator::fail("a box begins within 16 bytes");
  for (uint32_t rank = 0; rank < 16; ++rank) {
    if (!(blocks >> rank & 1)) continue;
    emulator::Place const target = emulator::place_of(in_block(to, rank)), at = emulator::place_of(in_block(barrier, rank));
    uint8_t* const bytes = emulator::bytes_at(target, matrix.box_rows * width);
    std::memset(bytes, 0x7F, matrix.box_rows * width);
    emulator::machine().boxes.push_back({[=] {
      for (int r = 0; r < matrix.box_rows; ++r)
        for (int c = 0; c < width; ++c) {
          bool const is_there = row + r < matrix.rows && column * element + c < matrix.columns;
          uint8_t const value = is_there ? matrix.data[(row + r) * matrix.stride + column * element + c] : 0;
          uint32_t const address = target.address + r * width + c;
          target.block->memory.at((matrix.floats ? address : emulator::swizzled(address)) - emulator::kBase) = value;
        }
      emulator::Barrier& there = at.block->barriers.at(at.address);
      there.bytes -= matrix.box_rows * width;
      emulator::complete(there);
    }});
  }
}
inline void copy_box(CUtensorMap const& map, uint32_t to, int column, int row, uint32_t barrier) {
  copy_box_to(map, to, column, row, barrier, uint16_t(1 << emulator::self().rank));
}
inline void fetch_box(CUtensorMap const&, int column, int row) {
  if (column < 0 || row < 0) emulator::fail("a box before the matrix");
}
inline float load_shared(uint32_t from) {
  float x;
  std::memcpy(&x, emulator::bytes_at(emulator::place_of(from), 4), 4);
  return x;
}
inline float2 load_shared_pair(uint32_t from) { return make_float2(load_shared(from), load_shared(from + 4)); }
inline float __uint_as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline uint4 load_shared_words(uint32_t from) {
  uint4 x;
  std::memcpy(&x, emulator::bytes_at(emulator::place_of(from), 16), 16);
  return x;
}
inline void store_shared(uint32_t to, float x) { std::memcpy(emulator::bytes_at(emulator::place_of(to), 4), &x, 4); }
inline float load_cluster_float(uint32_t from) { return load_shared(from); }
inline uint64_t k_major_operand(uint32_t address) {
  return uint64_t(1) << 62 | uint64_t(64) << 32 | uint64_t(1) << 16 | (address & 0x3FFFF) / 16;
}
inline void products_begin() {}
inline void products_commit() {
  ++emulator::self().groups;
  for (emulator::Product& product : emulator::self().products)
    if (product.group == 0) product.group = emulator::self().groups;
}
inline void products_wait() { emulator::run_products(); }
inline void accumulator_fence(float&) {}
inline void store_matrices(uint32_t to, uint32_t const (&word)[4]) {
  emulator::Warp& warp = *emulator::self().warp;
  int const lane = threadIdx.x % 32;
  for (int matrix = 0; matrix < 4; ++matrix) {
    warp.words[lane] = word[matrix];
    emulator::meet(warp.meeting, 32);
    if (lane / 8 == matrix) {  // this lane has the address of one of its rows
      if (to % 16) emulator::fail("a row of a matrix lies between 16 bytes");
      std::memcpy(emulator::bytes_at(emulator::place_of(to), 16), warp.words + lane % 8 * 4, 16);
    }
    emulator::meet(warp.meeting, 32);
  }
}
inline void store_box(CUtensorMap const& map, uint32_t from, int column, int row) {
  emulator::Matrix matrix;
  std::memcpy(&matrix, &map, sizeof(matrix));
  if (from % 1024) emulator::fail("a box lies between swizzle atoms");
  emulator::Place const source = emulator::place_of(from);
  uint8_t const* const bytes = emulator::bytes_at(source, matrix.box_rows * 128);
  emulator::self().stores.push_back({[=] {
    for (int r = 0; r < matrix.box_rows; ++r)
      for (int c = 0; c < 128; ++c)
        if (row + r < matrix.rows && 2 * column + c < matrix.columns)
          const_cast<uint8_t*>(matrix.data)[(row + r) * matrix.stride + 2 * column + c] =
              source.block->memory.at(emulator::swizzled(source.address + r * 128 + c) - emulator::kBase);
  }});
}
inline void copies_commit() {}
inline void copies_read() {
  auto& stores = emulator::self().stores;
  for (; !stores.empty(); stores.pop_front()) stores.front().run();
}
inline void copies_stored() { copies_read(); }
inline uint32_t packed_bf16(float low, float high) {
  auto const bits = [](float x) { return uint32_t(__bfloat16_as_ushort(__float2bfloat16(x))); };
  return bits(high) << 16 | bits(low);
}
inline uint32_t transposed(uint32_t both) {
  emulator::Warp& warp = *emulator::self().warp;
  int const lane = threadIdx.x % 32;
  warp.words[lane] = both;
  emulator::meet(warp.meeting, 32);
  uint32_t word = 0;  // row lane / 4, columns lane % 4 * 2 and the next, of the transposed
  for (int i = 0; i < 2; ++i) {
    int const row = lane % 4 * 2 + i, column = lane / 4;
    word |= (warp.words[row * 4 + column / 2] >> column % 2 * 16 & 0xFFFF) << 16 * i;
  }
  emulator::meet(warp.meeting, 32);
  return word;
}

}  // namespace tuner
