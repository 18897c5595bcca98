#include <atomic>
#include <cstdint>
#include <numeric>

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "arguments.h"
#include "pipeline.h"
#include "ptx.h"
#include "warp.h"

namespace k_golden {

using namespace tuner;

using Element = __nv_bfloat16;

constexpr int kWidth = 576, kLatent = 512;       // columns of the cache, and of its values
constexpr int kRows = 64, kKeys = 64;            // of a block, of a tile
constexpr int kColumns = 64;                     // of a chunk: 128 bytes
constexpr int kChunks = kWidth / kColumns;       // of Q and of a tile, the last one is rotary
constexpr int kHalf = kLatent / kColumns / 2;    // chunks whose columns of O are one group's
constexpr int kChunkBytes = 64 * kSwizzleBytes;
constexpr int kTileBytes = kChunks * kChunkBytes;
constexpr int kStages = 2;
constexpr int kCluster = 1;
constexpr int kWarp = 32, kWarpGroup = 128, kGroupWarps = 4;
constexpr int kThreads = 3 * kWarpGroup;
// (56 + 2 x 224) x 128 = 384 x 168
constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
constexpr int kScores = kKeys / 2, kResults = kHalf * kColumns / 2;  // of a thread
constexpr int kCombineThreads = 512, kCombineBlocks = 2;  // of a multiprocessor
constexpr int kMostBlocks = 144;            // multiprocessors of a whole GH100
constexpr int kKnownDevices = 64;
constexpr float kLn2 = 0.693147181f, kLog2E = 1.44269504f;
// Base-2 logarithm of what a row's maximum may grow by before O is scaled anew.
constexpr float kMostGrowth = 8.0f;

constexpr int kFirstTile = kTileBytes;  // behind Q
constexpr int kFirstMessage = kFirstTile + kStages * kTileBytes;
constexpr int kFirstSum = kFirstMessage + kStages * kRows * 4;
constexpr int kFirstBarrier = kFirstSum + 2 * 2 * kRows * 4;
constexpr int kBarriers = kStages * (kChunks + 2 + 1) + 2;
constexpr int kSmemBytes = kFirstBarrier + kBarriers * 8;
static_assert(kSmemBytes <= 232448, "Q and two tiles exceed shared memory");

enum NamedBarrier { kGroupMeets = 1, kConsumersMeet = 3 };  // the first and the next one: of a group each

struct Params {
  CUtensorMap query, cache;
  const int* table;
  const int* lengths;
  Element* out;
  float* lse;
  float* partial;       // (blocks, 2, 64, 512)
  float2* statistics;   // (blocks, 2, 64): maximum, sum
  int2* begins;         // (shares): sequence and tile
  int batch, queries, heads;
  int packed;           // heads of a query in a block's rows, a power of two
  int head_blocks, row_blocks;  // blocks of a query's heads, and of a sequence's rows
  int shares;
  int page_size, box;   // rows that a copy brings
  int overhead, cut_overhead;
  int64_t table_row, out_batch, out_row, out_head;
  float scale_log2;
};

// d = x y, or += x y: 64 rows, 64 columns, 16 of K.
__device__ __forceinline__ void multiply_scores(float (&d)[32], uint64_t x, uint64_t y, int adds) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, p, 1, 1, 0, 0;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), 
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), 
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), 
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(x), "l"(y), "r"(adds));
}

// d = x y, or += x y: 64 rows, 256 columns, 16 of K.
__device__ __forceinline__ void multiply_values(float (&d)[128], uint64_t x, uint64_t y, int adds) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
      "}, %128, %129, p, 1, 1, 0, 1;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), 
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), 
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), 
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), 
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), 
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), 
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), 
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), 
        "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), 
        "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), 
        "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), 
        "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), 
        "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), 
        "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), 
        "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), 
        "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
      : "l"(x), "l"(y), "r"(adds));
}

// d = x y, or += x y: 64 rows, 256 columns, 16 of K.
__device__ __forceinline__ void multiply_own_values(float (&d)[128], uint32_t const (&x)[4], uint64_t y, int adds) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %133, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
      "}, { %128, %129, %130, %131 }, %132, p, 1, 1, 1;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), 
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), 
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), 
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), 
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), 
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), 
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), 
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), 
        "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), 
        "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), 
        "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), 
        "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), 
        "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), 
        "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), 
        "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), 
        "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
      : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(y), "r"(adds));
}

// Until all products but those of the last group have ended.
__device__ __forceinline__ void earlier_products_wait() { asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory"); }

// A box of the cache, to the same place in each block of the cluster.
__device__ __forceinline__ void copy_rows(CUtensorMap const& map, uint32_t to, int column, int slot, int page, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, { %2, %3, %4 }], [%5];"
      ::"r"(to), "l"(&map), "r"(column), "r"(slot), "r"(page), "r"(barrier) : "memory");
}

__device__ __forceinline__ void copy_queries(CUtensorMap const& map, uint32_t to, int column, int head, int query, int sequence,
                                             uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, { %2, %3, %4, %5 }], [%6];"
      ::"r"(to), "l"(&map), "r"(column), "r"(head), "r"(query), "r"(sequence), "r"(barrier) : "memory");
}

// Whether the phase of this parity has ended.
__device__ __forceinline__ bool has_ended(uint32_t barrier, uint32_t parity) {
  uint32_t ended;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(ended)
      : "r"(barrier), "r"(parity)
      : "memory");
  return ended;
}

__device__ __forceinline__ void store_zeros(uint32_t to) {
  asm volatile("st.shared.v4.b32 [%0], { %1, %1, %1, %1 };" ::"r"(to), "r"(0) : "memory");
}

template <int kCount>
__device__ __forceinline__ void fence(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) accumulator_fence(values[i]);
}

// B of O += P C: its columns are contiguous, 64 of them a chunk, and its K are the keys, eight of them 1024
// bytes.
__device__ __forceinline__ uint64_t values_operand(uint32_t address) {
  return (uint64_t(1) << 62) | (uint64_t(8 * kSwizzleBytes / 16) << 32) | (uint64_t(kChunkBytes / 16) << 16) |
         ((address & 0x3FFFF) / 16);
}

// An operand some bytes further on: its address carries into no other field.
__device__ __forceinline__ uint64_t further(uint64_t operand, uint32_t bytes) {
  return (operand & ~uint64_t(0xFFFFFFFF)) | (uint32_t(operand) + bytes / 16);
}

// Where things lie in shared memory.
struct Memory {
  uint32_t base;

  __device__ __forceinline__ uint32_t query(int chunk) const { return base + chunk * kChunkBytes; }
  __device__ __forceinline__ uint32_t tile(int stage, int chunk) const {
    return base + kFirstTile + stage * kTileBytes + chunk * kChunkBytes;
  }
  // The probabilities of a tile.
  __device__ __forceinline__ uint32_t probabilities(int stage) const { return tile(stage, kChunks - 1); }
  // The maximum of a row, as of a stage's tile.
  __device__ __forceinline__ uint32_t message(int stage, int row) const { return base + kFirstMessage + (stage * kRows + row) * 4; }
  // What a group has of a row's sum; items take turns.
  __device__ __forceinline__ uint32_t sum(int item, int group, int row) const {
    return base + kFirstSum + ((item % 2 * 2 + group) * kRows + row) * 4;
  }
  __device__ __forceinline__ uint32_t barrier(int index) const { return base + kFirstBarrier + index * 8; }
  __device__ __forceinline__ uint32_t full(int stage, int chunk) const { return barrier(stage * kChunks + chunk); }
  // A group no longer reads a stage.
  __device__ __forceinline__ uint32_t empty(int stage, int group) const { return barrier(kStages * kChunks + stage * 2 + group); }
  // The probabilities of a stage, and their maxima, are written.
  __device__ __forceinline__ uint32_t ready(int stage) const { return barrier(kStages * (kChunks + 2) + stage); }
  __device__ __forceinline__ uint32_t query_full() const { return barrier(kBarriers - 2); }
  __device__ __forceinline__ uint32_t query_empty() const { return barrier(kBarriers - 1); }
};

__device__ __forceinline__ int tiles_of(int length) { return max((length + kKeys - 1) / kKeys, 1); }

// A block's part of all sequences' tiles: from one tile of a sequence to before another.
struct Share {
  int first, first_tile, last, last_tile;

  // By a whole warp.
  __device__ __forceinline__ Share(Params const& p, int index) : first(p.batch), first_tile(0), last(p.batch), last_tile(0) {
    const int lane = threadIdx.x % kWarp;
    int total = 0;
    for (int b = lane; b < p.batch; b += kWarp) total += tiles_of(p.lengths[b]) + p.overhead;
    for (int step = kWarp / 2; step > 0; step /= 2) total += int(__shfl_xor_sync(kAllLanes, uint32_t(total), step));
    const int size = (total + p.shares - 1) / p.shares, begin = index * size, end = begin + size;
    const int whole = (p.batch + p.shares - 1) / p.shares;  // sequences of a share, if none is divided
    if (longest_of(p, whole) <= size + p.cut_overhead) {
      first = min(index * whole, p.batch), last = min(first + whole, p.batch);
      return;
    }
    int before = 0;
    for (int b = lane; b - lane < p.batch; b += kWarp) {
      const int cost = b < p.batch ? tiles_of(p.lengths[b]) + p.overhead : 0;
      int sum = cost;
      for (int step = 1; step < kWarp; step *= 2) {
        const int other = __shfl_up_sync(kAllLanes, sum, step);
        if (lane >= step) sum += other;
      }
      const int start = before + sum - cost;
      find(begin, b, start, cost, p.overhead, first, first_tile);
      find(end, b, start, cost, p.overhead, last, last_tile);
      before += __shfl_sync(kAllLanes, sum, kWarp - 1);
    }
  }

  // The tiles of sequence `b` in this share: from `begin` to before `end`.
  __device__ __forceinline__ int begin(int b) const { return b == first ? first_tile : 0; }
  __device__ __forceinline__ int end(int b, int tiles) const { return b == last ? last_tile : tiles; }

 private:
  // The tiles of the longest of shares of `whole` sequences.
  __device__ __forceinline__ static int longest_of(Params const& p, int whole) {
    int longest = 0;
    for (int b = threadIdx.x % kWarp * whole; b < p.batch; b += kWarp * whole) {
      int sum = 0;
      for (int i = b; i < min(b + whole, p.batch); ++i) sum += tiles_of(p.lengths[i]) + p.overhead;
      longest = max(longest, sum);
    }
    for (int step = kWarp / 2; step > 0; step /= 2)
      longest = max(longest, int(__shfl_xor_sync(kAllLanes, uint32_t(longest), step)));
    return longest;
  }

  // Keeps the place of position `at`, if it lies in the sequence of one of the lanes.
  __device__ __forceinline__ static void find(int at, int b, int start, int cost, int overhead, int& sequence, int& tile) {
    const unsigned lanes = __ballot_sync(kAllLanes, at >= start && at < start + cost);
    if (lanes == 0) return;
    const int lane = __ffs(int(lanes)) - 1;
    sequence = __shfl_sync(kAllLanes, b, lane);
    tile = max(at - __shfl_sync(kAllLanes, start, lane) - overhead, 0);
  }
};

// The work of a block on one sequence.
struct Item {
  int sequence, length, tiles, begin, end;

  __device__ __forceinline__ bool is_whole() const { return begin == 0 && end == tiles; }
  // Of a share only the first sequence may have begun before, and only the last one go on behind.
  __device__ __forceinline__ int slot() const { return begin > 0 ? 0 : 1; }
};

// Calls work(item) for all of a share that have tiles.
template <class Work>
__device__ __forceinline__ void for_each_item(Params const& p, Share const& share, Work&& work) {
#pragma unroll 1
  for (int b = share.first; b < p.batch && b <= share.last; ++b) {
    const int length = p.lengths[b], tiles = tiles_of(length);
    const Item item{b, length, tiles, share.begin(b), share.end(b, tiles)};
    if (item.begin < item.end) work(item);
  }
}

// Brings this block's part of a tile's rows: `kBoxes` boxes a chunk, of which `count` hold keys.
template <int kFirst, int kLast, int kBoxes>
__device__ __forceinline__ void copy_tile(Params const& p, Memory memory, int stage, uint32_t parity, int count, int rank,
                                          int const (&page)[4], int const (&slot)[4]) {
  constexpr int kGroup = kFirst / kHalf;
  wait_for(memory.empty(stage, kGroup), parity);
#pragma unroll
  for (int chunk = kFirst; chunk < kLast; ++chunk) {
    if (chunk == kChunks - 1) wait_for(memory.empty(stage, 1 - kGroup), parity);  // both groups read it
    const uint32_t full = memory.full(stage, chunk), to = memory.tile(stage, chunk);
    arrive_expecting(full, count * p.box * kSwizzleBytes);
#pragma unroll
    for (int i = 0; i < kBoxes / kCluster; ++i) {
      const int box = i * kCluster + rank;
      if (box < count) copy_rows(p.cache, to + box * p.box * kSwizzleBytes, chunk * kColumns, slot[i], page[i], full);
    }
  }
}

// A warp, whose first lane copies the chunks `kFirst` to before `kLast` of all tiles; the first such warp also Q.
template <int kFirst, int kLast>
__device__ __forceinline__ void load(Params const& p, Memory memory, Share const& share) {
  const int lane = threadIdx.x % kWarp, boxes = kKeys / p.box, rank = kCluster > 1 ? block_rank() : 0;
  const int row_block = blockIdx.x % p.row_blocks;
  const int head = row_block % p.head_blocks * kRows, query = row_block / p.head_blocks * (kRows / p.packed);
  int counter = 0, items = 0;
  for_each_item(p, share, [&](Item const& item) {
    if (kFirst == 0 && lane == 0) {
      wait_for(memory.query_empty(), items % 2 ^ 1);
      arrive_expecting(memory.query_full(), kTileBytes);
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk)
        copy_queries(p.query, memory.query(chunk), chunk * kColumns, head, query, item.sequence, memory.query_full());
    }
    ++items;
    // The lanes keep where 32 boxes lie, and the 32 after them: to divide takes a thread long.
    const int first = item.begin * boxes, last = (min(item.length, item.end * kKeys) + p.box - 1) / p.box;
    const auto place_of = [&](int box) {
      const int page = box * p.box / p.page_size;
      return make_int2(box < last ? p.table[item.sequence * p.table_row + page] : 0, box * p.box - page * p.page_size);
    };
    int2 places = place_of(first + lane), later = place_of(first + kWarp + lane);
#pragma unroll 1
    for (int tile = item.begin; tile < item.end; ++tile, ++counter) {
      const int box = tile * boxes, of = (box - first) % kWarp;
      if (of == 0 && box > first) places = later, later = place_of(box + kWarp + lane);
      const int count = max(min(last - box, boxes), 0), stage = counter % kStages;
      int page[4], slot[4];
#pragma unroll
      for (int i = 0; i < 4 / kCluster; ++i) {
        page[i] = __shfl_sync(kAllLanes, places.x, (of + i * kCluster + rank) % kWarp);
        slot[i] = __shfl_sync(kAllLanes, places.y, (of + i * kCluster + rank) % kWarp);
      }
      const uint32_t parity = counter / kStages % 2 ^ 1;  // the first time round a stage is empty
      if (lane == 0) {
        if (boxes == kCluster) copy_tile<kFirst, kLast, kCluster>(p, memory, stage, parity, count, rank, page, slot);
        else copy_tile<kFirst, kLast, 4>(p, memory, stage, parity, count, rank, page, slot);
      }
      __syncwarp();
    }
  });
}

// A thread that multiplies: half of O's columns of a block's rows, two rows a thread. A group's own tiles lie in the
// stage of its number, the other group's in the other one.
struct Consumer {
  using Words = uint32_t[kKeys / 16][4];  // probabilities as an instruction takes them

  Params const& p;
  Memory memory;
  int group, warp, row, column;  // row: the first, the other is eight further; first of two columns of eight
  int first_head, first_query;
  float (&o)[kResults];
  float maximum[2], sum[2];  // of the sum this thread's part of this group's tiles
  int items;

  __device__ __forceinline__ Consumer(Params const& params, Memory at, float (&results)[kResults])
      : p(params), memory(at), group(__shfl_sync(kAllLanes, int(threadIdx.x / kWarpGroup) - 1, 0)),
        warp(__shfl_sync(kAllLanes, int(threadIdx.x / kWarp % kGroupWarps), 0)), row(warp * 16 + threadIdx.x % kWarp / 4),
        column(threadIdx.x % 4 * 2), o(results), items(0) {
    const int row_block = blockIdx.x % p.row_blocks;
    first_head = row_block % p.head_blocks * kRows;
    first_query = row_block / p.head_blocks * (kRows / p.packed);
  }

  __device__ __forceinline__ int head(int r) const { return first_head + (row + 8 * r) % p.packed; }
  __device__ __forceinline__ int query(int r) const { return first_query + (row + 8 * r) / p.packed; }

  // A warp's arrival.
  __device__ __forceinline__ void leave(uint32_t barrier) const {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) arrive(barrier);
  }

  // The same at a barrier of a stage, of each block that copies to it.
  __device__ __forceinline__ void leave_stage(uint32_t barrier) const {
    if constexpr (kCluster == 1) return leave(barrier);
    __syncwarp();
    if (threadIdx.x % kWarp < kCluster) arrive_in_block(in_block(barrier, threadIdx.x % kWarp));
  }

  // Issues the scores of a tile.
  __device__ __forceinline__ void issue_scores(int counter, float (&s)[kScores]) const {
    const uint64_t x = k_major_operand(memory.query(0)), y = k_major_operand(memory.tile(group, 0));
    fence(s);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      wait_for(memory.full(group, chunk), counter / kStages % 2);
      products_begin();
#pragma unroll
      for (int k = 0; k < kColumns / 16; ++k)
        multiply_scores(s, further(x, chunk * kChunkBytes + k * 32), further(y, chunk * kChunkBytes + k * 32), chunk > 0 || k > 0);
    }
    products_commit();
  }

  // Takes keys that a row does not see from the scores.
  __device__ __forceinline__ void mask(Item const& item, int tile, float (&s)[kScores]) const {
    const int base = tile * kKeys;
    if (base + kKeys <= item.length - p.queries + 1) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int seen = min(item.length, item.length - p.queries + 1 + query(r)) - base - column;
#pragma unroll
      for (int i = 0; i < kScores / 2; ++i) {
        float& score = s[i / 2 * 4 + 2 * r + i % 2];
        score = i / 2 * 8 + i % 2 < seen ? score : -INFINITY;
      }
    }
  }

  // Probabilities of a tile to shared memory, with each row's maximum.
  __device__ __forceinline__ void share_probabilities(Item const& item, int tile, float (&s)[kScores], Words& words,
                                                      float (&kept)[2]) {
    float total[2];
    mask(item, tile, s);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = -INFINITY;
#pragma unroll
      for (int i = 0; i < kScores / 2; ++i) most = fmaxf(most, s[i / 2 * 4 + 2 * r + i % 2]);
      most = quad_max(most) * p.scale_log2;
      kept[r] = most > maximum[r] + kMostGrowth ? most : maximum[r];
      const float shift = kept[r] == -INFINITY ? 0.0f : kept[r];
      total[r] = 0.0f;
#pragma unroll
      for (int i = 0; i < kScores / 2; ++i) {
        float& score = s[i / 2 * 4 + 2 * r + i % 2];
        score = exp2_approx(fmaf(score, p.scale_log2, -shift));
        total[r] += score;
      }
    }
    // All four warps have read what the probabilities replace.
    named_barrier(kGroupMeets + group, kWarpGroup);
    const int lane = threadIdx.x % kWarp, to = warp * 16 + lane % 16;
#pragma unroll
    for (int octet = 0; octet < kKeys / 8; octet += 2) {
      uint32_t (&word)[4] = words[octet / 2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int first = (octet + i / 2) * 4 + i % 2 * 2;
        word[i] = packed_bf16(s[first], s[first + 1]);
      }
      store_matrices(memory.probabilities(group) + to * kSwizzleBytes + ((octet + lane / 16) ^ to % 8) * 16, word);
    }
    if (threadIdx.x % 4 == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) store_shared(memory.message(group, row + 8 * r), kept[r]);
    }
    async_copy_fence();
    leave(memory.ready(group));
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = fmaf(sum[r], factor(r, kept), total[r]);
  }

  // What the results of a row are multiplied with where its maximum is to be another one.
  __device__ __forceinline__ float factor(int r, float const (&kept)[2]) const {
    return exp2_approx(maximum[r] - (kept[r] == -INFINITY ? 0.0f : kept[r]));
  }

  // Takes new maxima. O is scaled anew where they differ, which few do.
  __device__ __forceinline__ void rescale(float const (&kept)[2], bool with_sum) {
    if (!__any_sync(kAllLanes, kept[0] != maximum[0] || kept[1] != maximum[1])) return;
    const float by[] = {factor(0, kept), factor(1, kept)};
#pragma unroll
    for (int i = 0; i < kResults; ++i) o[i] *= by[i / 2 % 2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (with_sum) sum[r] *= by[r];
      maximum[r] = kept[r];
    }
  }

  // What lies behind a sequence's last key may be no number: 0 times it is not 0.
  __device__ __forceinline__ void clear_behind(Item const& item, int tile, int stage) const {
    const int valid = item.length - tile * kKeys;
    if (valid >= kKeys) return;
    const int units = (kKeys - max(valid, 0)) * kSwizzleBytes / 16;
    for (int chunk = 0; chunk < kHalf; ++chunk)
      for (int i = threadIdx.x % kWarpGroup; i < units; i += kWarpGroup)
        store_zeros(memory.tile(stage, group * kHalf + chunk + 1) - (i + 1) * 16);
    async_copy_fence();
    named_barrier(kGroupMeets + group, kWarpGroup);
  }

  // Issues O += P C of a tile.
  __device__ __forceinline__ void issue_values(int stage) {
    const uint64_t x = k_major_operand(memory.probabilities(stage)), y = values_operand(memory.tile(stage, group * kHalf));
    fence(o);
    products_begin();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) multiply_values(o, further(x, k * 32), further(y, k * 16 * kSwizzleBytes), 1);
    products_commit();
  }

  __device__ __forceinline__ void finish_values(int stage) {
    products_wait();
    fence(o);
    leave_stage(memory.empty(stage, group));
  }

  // A tile of this group, whose probabilities are shared.
  __device__ __forceinline__ void add_own(Item const& item, int tile, int counter, Words const& words, float const (&kept)[2]) {
    clear_behind(item, tile, group);
    rescale(kept, false);
    const uint64_t y = values_operand(memory.tile(group, group * kHalf));
    fence(o);
    products_begin();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) multiply_own_values(o, words[k], further(y, k * 16 * kSwizzleBytes), 1);
    products_commit();
    finish_values(group);
  }

  // Issues a tile of the other group.
  __device__ __forceinline__ void add_other(Item const& item, int tile, int counter) {
    const int stage = 1 - group;
    wait_for(memory.ready(stage), counter / kStages % 2);
    const float kept[] = {load_shared(memory.message(stage, row)), load_shared(memory.message(stage, row + 8))};
    clear_behind(item, tile, stage);
    rescale(kept, true);
    issue_values(stage);
  }

  __device__ __forceinline__ void work(Item const& item, int& counter) {
    float s[kScores], kept[2];
    Words words;
#pragma unroll
    for (int i = 0; i < kResults; ++i) o[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) maximum[r] = -INFINITY, sum[r] = 0.0f;
    wait_for(memory.query_full(), items % 2);
    int tile = item.begin;
    if (counter % kStages == group) {
      issue_scores(counter, s);
      products_wait();
      fence(s);
      share_probabilities(item, tile, s, words, kept);
      add_own(item, tile, counter, words, kept);
      ++tile, ++counter;
    }
#pragma unroll 1
    for (; tile + 1 < item.end; tile += 2, counter += 2) {
      add_other(item, tile, counter);
      // Scores queue behind O += P C, unless their tile is still to come: its place may be this stage's.
      const bool is_there = has_ended(memory.full(group, kChunks - 1), (counter + 1) / kStages % 2);
      const bool waits = __any_sync(kAllLanes, !is_there);
      if (waits) finish_values(1 - group);
      issue_scores(counter + 1, s);
      if (!waits) {
        earlier_products_wait();
        leave_stage(memory.empty(1 - group, group));
      }
      products_wait();
      fence(o);
      fence(s);
      share_probabilities(item, tile + 1, s, words, kept);
      add_own(item, tile + 1, counter + 1, words, kept);
    }
    leave(memory.query_empty());
    if (tile < item.end) {
      add_other(item, tile, counter);
      finish_values(1 - group);
      ++counter;
    }
    add_sums();
    if (item.is_whole()) store(item);
    else keep(item);
  }

  // Adds both groups' sums of all lanes.
  __device__ __forceinline__ void add_sums() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] = quad_sum(sum[r]);
      if (threadIdx.x % 4 == 0) store_shared(memory.sum(items, group, row + 8 * r), sum[r]);
    }
    named_barrier(kConsumersMeet, 2 * kWarpGroup);
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] += load_shared(memory.sum(items, 1 - group, row + 8 * r));
    ++items;
  }

  // The result of a sequence that no other block has a part of.
  __device__ __forceinline__ void store(Item const& item) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool is_there = head(r) < p.heads && query(r) < p.queries;
      const float factor = sum[r] > 0.0f ? 1.0f / sum[r] : 0.0f;
      Element* to = p.out + item.sequence * p.out_batch + query(r) * p.out_row + head(r) * p.out_head +
                    group * kHalf * kColumns + threadIdx.x % 4 * 8;
#pragma unroll
      for (int i = 0; i < kResults / 16; ++i) {  // 32 columns
        uint32_t word[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
          word[j] = packed_bf16(o[16 * i + 4 * j + 2 * r] * factor, o[16 * i + 4 * j + 2 * r + 1] * factor);
        transpose_quad(word);
        if (is_there) *reinterpret_cast<uint4*>(to + 32 * i) = make_uint4(word[0], word[1], word[2], word[3]);
      }
      if (p.lse && is_there && group == 0 && threadIdx.x % 4 == 0)
        p.lse[(int64_t(item.sequence) * p.heads + head(r)) * p.queries + query(r)] = (maximum[r] + log2f(sum[r])) * kLn2;
    }
  }

  // A part of a sequence's result, for `combine`.
  __device__ __forceinline__ void keep(Item const& item) const {
    const int64_t first = (blockIdx.x * 2 + item.slot()) * kRows;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (head(r) >= p.heads || query(r) >= p.queries) continue;
      const int64_t at = first + row + 8 * r;
      float* to = p.partial + at * kLatent + group * kHalf * kColumns + column;
#pragma unroll
      for (int i = 0; i < kResults / 4; ++i)
        *reinterpret_cast<float2*>(to + 8 * i) = make_float2(o[4 * i + 2 * r], o[4 * i + 2 * r + 1]);
      if (group == 0 && threadIdx.x % 4 == 0) p.statistics[at] = make_float2(maximum[r], sum[r]);
    }
  }
};

__global__ void __launch_bounds__(kThreads, 1) mla_decode_golden(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char shared[];
  const Memory memory{shared_address(shared)};
  if (threadIdx.x == 0) {
    if (memory.base % 1024 != 0) __trap();  // of a swizzle atom
    for (int stage = 0; stage < kStages; ++stage) {
      for (int chunk = 0; chunk < kChunks; ++chunk) init_barrier(memory.full(stage, chunk), 1);
      for (int group = 0; group < 2; ++group) init_barrier(memory.empty(stage, group), kCluster * kGroupWarps);
      init_barrier(memory.ready(stage), kGroupWarps);
    }
    init_barrier(memory.query_full(), 1);
    init_barrier(memory.query_empty(), 2 * kGroupWarps);
    barrier_init_fence();
  }
  __syncthreads();
  if constexpr (kCluster > 1) cluster_sync();
  grid_dependency_wait();
  grid_dependency_launch();
  const Share share(p, blockIdx.x / p.row_blocks);
  if (threadIdx.x < kWarpGroup) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x == 0 && blockIdx.x % p.row_blocks == 0) p.begins[blockIdx.x / p.row_blocks] = make_int2(share.first, share.first_tile);
    // A group gives back what only it reads: a warp for each waits for that.
    if (threadIdx.x / kWarp == 0) load<0, kHalf>(p, memory, share);
    if (threadIdx.x / kWarp == 1) load<kHalf, kChunks>(p, memory, share);
  } else {
    take_registers<kConsumerRegisters>();
    float o[kResults];
    Consumer consumer(p, memory, o);
    int counter = 0;
    for_each_item(p, share, [&](Item const& item) { consumer.work(item, counter); });
  }
  // Nobody's shared memory is written after it has ended.
  if constexpr (kCluster > 1) cluster_sync();
}

// Sequences that several shares have parts of: where the second of these begins, and behind the last.
struct Cuts {
  static constexpr int kFew = 8;
  int count[2];  // of few parts, and of more
  short second[2][kMostBlocks], end[2][kMostBlocks];
  uint32_t goes_on[kMostBlocks / kWarp + 1];  // a bit a share: it goes on with what the one before it began or went on with

  // By a whole block, once.
  __device__ __forceinline__ void find(Params const& p) {
    const int share = threadIdx.x, lane = threadIdx.x % kWarp;
    const bool is_later = share > 0 && share < p.shares;
    const int2 begin = is_later ? p.begins[share] : make_int2(-1, 0), earlier = is_later ? p.begins[share - 1] : begin;
    const bool is_cut = is_later && begin.y > 0, is_first = is_cut && (earlier.x != begin.x || earlier.y == 0);
    if (share < 2) count[share] = 0;
    const unsigned further = __ballot_sync(kAllLanes, is_cut && !is_first);
    if (lane == 0 && share <= kMostBlocks) goes_on[share / kWarp] = further;
    __syncthreads();
    if (is_first) {
      int last = share + 1;
      while (last < p.shares && goes_on[last / kWarp] >> last % kWarp & 1) ++last;
      const int kind = last - share + 1 > kFew, place = atomicAdd(&count[kind], 1);
      second[kind][place] = short(share), end[kind][place] = short(last);
    }
    __syncthreads();
  }
};

// What 128 threads have of one row, four columns each.
struct CombinedRow {
  float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float sum = 0.0f;

  // Adds the parts of shares `from` on, every `step`-th: `kBatch` are loaded at once.
  template <int kBatch, class Place>
  __device__ __forceinline__ void add(Params const& p, Place&& place, float shift, int from, int end, int step) {
    const int column = threadIdx.x % kWarpGroup * 4;
#pragma unroll 1
    for (int share = from; share < end; share += kBatch * step) {
      float2 statistics[kBatch];
      float4 x[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int64_t at = place(min(share + i * step, end - 1));
        statistics[i] = p.statistics[at];
        x[i] = *reinterpret_cast<float4 const*>(p.partial + at * kLatent + column);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float weight = share + i * step < end ? exp2_approx(statistics[i].x - shift) : 0.0f;
        sum = fmaf(weight, statistics[i].y, sum);
        total.x = fmaf(weight, x[i].x, total.x), total.y = fmaf(weight, x[i].y, total.y);
        total.z = fmaf(weight, x[i].z, total.z), total.w = fmaf(weight, x[i].w, total.w);
      }
    }
  }
};

// Adds what the shares have of sequences that they divide. Each 128 threads have a row of a sequence of few
// parts; all 512 have one row of many parts.
__global__ void __launch_bounds__(kCombineThreads, kCombineBlocks) combine_golden(const __grid_constant__ Params p) {
  constexpr int kRowsAtOnce = kCombineThreads / kWarpGroup;
  __shared__ Cuts cuts;
  __shared__ float4 totals[kCombineThreads];
  __shared__ float sums[kCombineThreads];
  grid_dependency_wait();
  cuts.find(p);
  const int group = threadIdx.x / kWarpGroup, lane = threadIdx.x % kWarp, column = threadIdx.x % kWarpGroup * 4;
  const int all_rows = p.row_blocks * kRows, few_tasks = cuts.count[0] * (all_rows / kRowsAtOnce);
  const int tasks = few_tasks + cuts.count[1] * all_rows;
  for (int task = blockIdx.x; task < tasks; task += gridDim.x) {
    const bool is_few = task < few_tasks;
    const int index = is_few ? task * kRowsAtOnce + group : task - few_tasks;
    const int cut = index / all_rows, at = index - cut * all_rows, row_block = at / kRows, row = at % kRows;
    const int first = cuts.second[!is_few][cut] - 1, end = cuts.end[!is_few][cut], sequence = p.begins[first + 1].x;
    const int head = row_block % p.head_blocks * kRows + row % p.packed;
    const int query = row_block / p.head_blocks * (kRows / p.packed) + row / p.packed;
    const bool is_there = head < p.heads && query < p.queries;
    const auto place = [&](int share) {
      return (int64_t(share * p.row_blocks + row_block) * 2 + (share == first ? 1 : 0)) * kRows + row;
    };
    float most = -INFINITY;
    for (int share = first + lane; share < end; share += kWarp) most = fmaxf(most, p.statistics[place(share)].x);
    most = warp_max(most);
    const float shift = most == -INFINITY ? 0.0f : most;
    CombinedRow mine;
    if (is_few) {
      if (is_there) mine.add<2>(p, place, shift, first, end, 1);
    } else {
      if (is_there) mine.add<8>(p, place, shift, first + group, end, kRowsAtOnce);
      __syncthreads();
      totals[threadIdx.x] = mine.total, sums[threadIdx.x] = mine.sum;
      __syncthreads();
      for (int other = 1; group == 0 && other < kRowsAtOnce; ++other) {
        const float4 x = totals[threadIdx.x + other * kWarpGroup];
        mine.sum += sums[threadIdx.x + other * kWarpGroup];
        mine.total.x += x.x, mine.total.y += x.y, mine.total.z += x.z, mine.total.w += x.w;
      }
    }
    if (!is_there || (!is_few && group > 0)) continue;
    const float factor = mine.sum > 0.0f ? 1.0f / mine.sum : 0.0f;
    uint2 words;
    words.x = packed_bf16(mine.total.x * factor, mine.total.y * factor);
    words.y = packed_bf16(mine.total.z * factor, mine.total.w * factor);
    *reinterpret_cast<uint2*>(p.out + sequence * p.out_batch + query * p.out_row + head * p.out_head + column) = words;
    if (p.lse && column == 0)
      p.lse[(int64_t(sequence) * p.heads + head) * p.queries + query] = (most + log2f(mine.sum)) * kLn2;
  }
}

inline bool aligned(int64_t elements) { return elements >= 0 && elements % 8 == 0 && elements < (int64_t(1) << 38); }

struct Tensors { void *query, *cache, *block_table, *lengths, *out, *lse; };
struct Integers { int64_t batch, queries, heads, page_size, pages, query_batch, query_row, query_head, cache_page, cache_slot, table_row, out_batch, out_row, out_head, tile_overhead, cut_overhead, pdl; };
struct Scalars { double scale; };

struct Blocks {
  int packed, head_blocks, row_blocks;

  explicit Blocks(Integers const& call) : packed(1) {
    while (packed < call.heads && packed < kRows) packed *= 2;
    head_blocks = static_cast<int>((call.heads + kRows - 1) / kRows);
    row_blocks = head_blocks * static_cast<int>((call.queries + kRows / packed - 1) / (kRows / packed));
  }
  int shares(int multiprocessors) const { return row_blocks < multiprocessors ? multiprocessors / row_blocks : 1; }
};

inline bool valid(Integers const& call) {
  for (int64_t extent : {call.batch, call.queries, call.heads, call.page_size, call.pages})
    if (extent < 1 || extent > (1 << 24)) return false;
  if (Blocks(call).row_blocks % kCluster != 0) return false;
  if (call.batch > 65536 || call.queries > 64 || call.heads > 4096 || call.page_size % 16 != 0) return false;
  for (int64_t stride : {call.query_batch, call.query_row, call.query_head, call.cache_page, call.cache_slot, call.out_batch,
                         call.out_row, call.out_head})
    if (!aligned(stride)) return false;
  return call.table_row >= 0 && call.tile_overhead >= 0 && call.tile_overhead <= 64 && call.cut_overhead >= 0 &&
         call.cut_overhead <= 64;
}

struct Sizes {
  int64_t slots, statistics, begins, bytes;

  explicit Sizes(Blocks const& blocks) {
    const int64_t shares = blocks.shares(kMostBlocks);
    slots = shares > 1 ? shares * blocks.row_blocks * 2 * kRows : 0;
    statistics = slots * kLatent * 4;
    begins = statistics + slots * 8;
    bytes = begins + shares * 8;
  }
};

// Boxes of 128 bytes by `box` of a tensor of 576 columns.
inline cudaError_t describe(CUtensorMap* map, const void* data, uint32_t rank, cuuint64_t const* extents, int64_t const* strides,
                            cuuint32_t const* box) {
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                              const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                              CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static Encode encode = nullptr;
  static const cudaError_t found = [] {
    cudaDriverEntryPointQueryResult result{};
    void* entry = nullptr;
    cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result);
    if (error == cudaSuccess && result != cudaDriverEntryPointSuccess) error = cudaErrorNotSupported;
    encode = reinterpret_cast<Encode>(entry);
    return error;
  }();
  if (found != cudaSuccess) return found;
  cuuint64_t bytes[3];
  for (uint32_t i = 0; i + 1 < rank; ++i) bytes[i] = cuuint64_t(strides[i]) * 2;
  const cuuint32_t steps[] = {1, 1, 1, 1};
  const auto type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult made = encode(map, type, rank, const_cast<void*>(data), extents, bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return made == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Allows the kernel its shared memory, and asks for the device's multiprocessors. Once a device.
inline cudaError_t prepare(int* multiprocessors) {
  static std::atomic<int> known[kKnownDevices];
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if (device < kKnownDevices && (*multiprocessors = known[device].load()) > 0) return cudaSuccess;
  error = cudaFuncSetAttribute(&mla_decode_golden, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (*multiprocessors > kMostBlocks) *multiprocessors = kMostBlocks;
  if (error == cudaSuccess && device < kKnownDevices) known[device].store(*multiprocessors);
  return error;
}

inline cudaError_t launch_one(void (*kernel)(Params), int blocks, int threads, int smem_bytes, int cluster, bool pdl, Params const& p,
                              cudaStream_t stream) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {unsigned(cluster), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks), config.blockDim = dim3(threads);
  config.dynamicSmemBytes = smem_bytes, config.stream = stream;
  config.attrs = attributes, config.numAttrs = pdl ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, p);
}

inline cudaError_t launch(Tensors const& tensors, Integers const& call, Scalars const& scalars, void* workspace, cudaStream_t stream) {
  if (!valid(call) || !(scalars.scale > 0)) return cudaErrorInvalidValue;
  for (const void* tensor : {tensors.query, tensors.cache, tensors.out, tensors.block_table, tensors.lengths})
    if (tensor == nullptr) return cudaErrorMisalignedAddress;
  for (const void* tensor : {tensors.query, tensors.cache, tensors.out})
    if (reinterpret_cast<uintptr_t>(tensor) % 16 != 0) return cudaErrorMisalignedAddress;
  int multiprocessors = 0;
  if (cudaError_t error = prepare(&multiprocessors); error != cudaSuccess) return error;
  const Blocks blocks(call);
  const Sizes sizes(blocks);
  Params p{};
  p.batch = static_cast<int>(call.batch), p.queries = static_cast<int>(call.queries), p.heads = static_cast<int>(call.heads);
  p.packed = blocks.packed, p.head_blocks = blocks.head_blocks, p.row_blocks = blocks.row_blocks;
  p.shares = blocks.shares(multiprocessors);
  p.page_size = static_cast<int>(call.page_size), p.box = static_cast<int>(std::gcd(call.page_size, int64_t(kKeys / kCluster)));
  p.overhead = static_cast<int>(call.tile_overhead);
  p.cut_overhead = static_cast<int>(call.cut_overhead);
  const cuuint64_t of_query[] = {kWidth, cuuint64_t(call.heads), cuuint64_t(call.queries), cuuint64_t(call.batch)};
  const cuuint64_t of_cache[] = {kWidth, cuuint64_t(call.page_size), cuuint64_t(call.pages)};
  const int64_t query_strides[] = {call.query_head, call.query_row, call.query_batch}, cache_strides[] = {call.cache_slot, call.cache_page};
  const cuuint32_t query_box[] = {kColumns, cuuint32_t(p.packed), cuuint32_t(kRows / p.packed), 1};
  const cuuint32_t cache_box[] = {kColumns, cuuint32_t(p.box), 1};
  cudaError_t error = describe(&p.query, tensors.query, 4, of_query, query_strides, query_box);
  if (error == cudaSuccess) error = describe(&p.cache, tensors.cache, 3, of_cache, cache_strides, cache_box);
  if (error != cudaSuccess) return error;
  p.table = static_cast<const int*>(tensors.block_table), p.lengths = static_cast<const int*>(tensors.lengths);
  p.out = static_cast<Element*>(tensors.out), p.lse = static_cast<float*>(tensors.lse);
  char* const bytes = static_cast<char*>(workspace);
  p.partial = reinterpret_cast<float*>(bytes);
  p.statistics = reinterpret_cast<float2*>(bytes + sizes.statistics);
  p.begins = reinterpret_cast<int2*>(bytes + sizes.begins);
  p.table_row = call.table_row, p.out_batch = call.out_batch, p.out_row = call.out_row, p.out_head = call.out_head;
  p.scale_log2 = static_cast<float>(scalars.scale) * kLog2E;
  error = launch_one(mla_decode_golden, p.shares * p.row_blocks, kThreads, kSmemBytes, kCluster, call.pdl != 0, p, stream);
  if (error != cudaSuccess || p.shares == 1) return error;
  return launch_one(combine_golden, kCombineBlocks * multiprocessors, kCombineThreads, 0, 1, true, p, stream);
}

}  // namespace k_golden

extern "C" int tuner_golden_workspace(const int64_t* integers, int64_t* bytes) {
  using namespace k_golden;
  auto const& call = view<Integers>(integers);
  *bytes = valid(call) ? Sizes(Blocks(call)).bytes : 0;
  return valid(call) ? 0 : static_cast<int>(cudaErrorInvalidValue);
}

extern "C" int tuner_golden_launch(void* const* tensors, const int64_t* integers, const double* scalars, void* workspace,
                                     void* stream) {
  using namespace k_golden;
  return static_cast<int>(k_golden::launch(view<Tensors>(tensors), view<Integers>(integers), view<Scalars>(scalars), workspace,
                                             static_cast<cudaStream_t>(stream)));
}
