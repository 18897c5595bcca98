#include <atomic>
#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "arguments.h"
#include "pipeline.h"
#include "ptx.h"
#include "warp.h"

namespace k_0123456789abcdef {

using namespace tuner;

constexpr bool kSwapped = false;
constexpr int kTileX = 128;
constexpr int kTileY = 128;
constexpr int kStages = 6;
constexpr int kClusterX = 1;
constexpr int kClusterY = 1;
constexpr int kSplits = 1;
constexpr int kStoreBuffers = 1;
constexpr bool kGrouped = false;

constexpr int kBlock = 128;  // of K, and of B's columns: what one factor is for
constexpr int kWarp = 32;
constexpr int kWarpGroup = 128;
constexpr int kGroups = kTileX > 64 ? 2 : 1;      // warp groups that multiply
constexpr int kParts = kTileX / 64 / kGroups;     // times 64 rows, of a warp group
constexpr int kResults = kTileY / 2;              // of an instruction, a thread
constexpr int kThreads = kWarpGroup * (1 + kGroups);
constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;  // (56 + 2 x 224) x 128 = 384 x 168
constexpr int kMulticast = kClusterX * kClusterY;
constexpr int kCluster = kMulticast * kSplits;
constexpr int kKnownDevices = 64;
constexpr int kMaxSmem = 232448;

// Factors of A's rows in a tile, and of B's columns: one for each run of them that never lies in two blocks.
constexpr int kRowFactors = kSwapped ? kTileY : kTileX;
constexpr int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }
constexpr int kRun = kSwapped ? kBlock : gcd(kTileY, kBlock);
constexpr int kColumnFactors = ((kSwapped ? kTileX : kTileY) + kRun - 1) / kRun;
constexpr int kColumnPlaces = 12;
static_assert(kColumnFactors <= kColumnPlaces, "places of a stage's factors of columns");

constexpr int kBytesX = kTileX * kBlock, kBytesY = kTileY * kBlock;
constexpr int kFactorBytes = ((kRowFactors + 3) / 4 * 4 + kColumnPlaces) * 4;
constexpr int kColumnOffset = (kRowFactors + 3) / 4 * 4;  // floats before the factors of columns
constexpr int kFirstY = kStages * kBytesX;
constexpr int kBoxColumns = 64, kBoxBytes = 16 * kBoxColumns * 2;
constexpr int kFirstBox = kFirstY + kStages * kBytesY;
constexpr int kFirstFactor = kFirstBox + kGroups * (kWarpGroup / kWarp) * kStoreBuffers * kBoxBytes;
constexpr int kFirstBarrier = kFirstFactor + kStages * kFactorBytes;
constexpr int kSmemBytes = kFirstBarrier + 2 * kStages * 8;
static_assert(kSmemBytes <= kMaxSmem, "tile and stages exceed shared memory");
static_assert(kStages >= 2, "a block is copied while another is used");
static_assert(kClusterX == 1 || kClusterY == 1, "multicast goes one way");
static_assert(kSplits == 1 || (kMulticast == 1 && !kGrouped), "blocks that divide K share no tile, nor groups");
static_assert(kSplits == 1 || kTileX * kTileY * 4 <= kFirstFactor, "partial sums take the ring's place");
static_assert(kStoreBuffers == 0 || (!kSwapped && kSplits == 1 && kTileY >= kBoxColumns), "whole boxes");
static_assert(kTileY % (kSwapped ? 8 : 16) == 0 && kTileY % (8 * kClusterX) == 0, "whole swizzle atoms");

// A producer waits for a stage that all consumers of the blocks it writes to have left; its TMA thread and
// its warp of factors arrive when they have filled it.
constexpr int kFullArrivals = 1 + kWarp;
constexpr int kEmptyArrivals = kGroups * (kWarpGroup / kWarp) * kMulticast;

enum NamedBarrier { kConsumersMeet = 1 };

struct Params {
  CUtensorMap x, y, d_map;
  __nv_bfloat16* d;
  const float* scale_a;
  const float* scale_b;
  const int* offsets;
  int m, n, blocks;       // blocks of K
  int groups;
  int tiles_x, tiles_y;   // of a cluster; of groups those of B's columns only
  int band;               // tiles of the other side that are walked together, at most
  bool along_x, lead;
  int64_t ldd, a_row, a_block, b_column, b_block, b_group;
  float alpha;
};

using Accumulators = float[kResults];

// accumulators = x y, or += x y: 64 rows, 32 of K.
__device__ __forceinline__ void multiply(Accumulators& d, uint64_t x, uint64_t y, int adds) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, p, 1, 1;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), 
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), 
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), 
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), 
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), 
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), 
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), 
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "l"(x), "l"(y), "r"(adds));
}

// Keeps the compiler from moving what reads or writes accumulators past it.
__device__ __forceinline__ void fence(Accumulators& d) {
#pragma unroll
  for (int i = 0; i < kResults; ++i) accumulator_fence(d[i]);
}

struct Stage {
  int index = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++index == kStages) index = 0, phase ^= 1;
  }
};

// Where things lie in shared memory.
struct Ring {
  uint32_t base;

  __device__ __forceinline__ uint32_t x(int stage) const { return base + stage * kBytesX; }
  __device__ __forceinline__ uint32_t y(int stage) const { return base + kFirstY + stage * kBytesY; }
  __device__ __forceinline__ uint32_t boxes(int warp) const { return base + kFirstBox + warp * kStoreBuffers * kBoxBytes; }
  __device__ __forceinline__ uint32_t factors(int stage) const { return base + kFirstFactor + stage * kFactorBytes; }
  __device__ __forceinline__ uint32_t full(int stage) const { return base + kFirstBarrier + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(kStages + stage); }
};

// A block's part of K.
struct Part {
  int begin, end;  // blocks
  uint32_t rank;   // of the block in its cluster

  __device__ __forceinline__ explicit Part(Params const& p)
      : begin(0), end(p.blocks), rank(kCluster > 1 ? block_rank() : 0) {
    if constexpr (kSplits > 1) {
      begin = static_cast<int>(int64_t(p.blocks) * rank / kSplits);
      end = static_cast<int>(int64_t(p.blocks) * (rank + 1) / kSplits);
    }
  }
};

struct Tile {
  int x, y;         // first rows of x and y
  int row, column;  // first of D, the column within the group's
  int end;          // of the rows
  int group;
};

// The tile-th of a product with `tiles_x` by `tiles_y` tiles of clusters, at D's row `start`. Bands of
// `band` tiles of one side are walked along the other.
__device__ __forceinline__ Tile tile_of(Params const& p, Part const& part, int tiles_x, int tiles_y, int tile, int start,
                                        int end, int group) {
  const int along = p.along_x ? tiles_x : tiles_y, across = p.along_x ? tiles_y : tiles_x;
  const int widest = min(p.band, across);
  const int band = tile / (widest * along), rest = tile - band * widest * along;
  const int width = min(widest, across - band * widest);
  const int major = rest / width, minor = band * widest + rest % width;
  const int tile_x = p.along_x ? major : minor, tile_y = p.along_x ? minor : major;
  const int x = (tile_x * kClusterX + (kClusterX > 1 ? int(part.rank) : 0)) * kTileX;
  const int y = (tile_y * kClusterY + (kClusterY > 1 ? int(part.rank) : 0)) * kTileY;
  Tile found;
  found.row = start + (kSwapped ? y : x);
  found.column = kSwapped ? x : y;
  found.x = kSwapped ? group * p.n + x : found.row;
  found.y = kSwapped ? found.row : group * p.n + y;
  found.end = end;
  found.group = group;
  return found;
}

// The tiles of a block.
class Tiles {
 public:
  __device__ __forceinline__ explicit Tiles(Params const&) : next_(blockIdx.x / kCluster) {}

  __device__ __forceinline__ bool take(Params const& p, Part const& part, Tile& tile) {
    if (next_ >= p.tiles_x * p.tiles_y) return false;
    tile = tile_of(p, part, p.tiles_x, p.tiles_y, next_, 0, p.m, 0);
    next_ += gridDim.x / kCluster;
    return true;
  }

 private:
  int next_;
};

// A warp, whose first lane copies: the ring's tiles. A block loads its share of a tile that the cluster
// shares, for all.
__device__ __forceinline__ void load_tiles(Params const& p, Ring ring, Part const& part) {
  constexpr int kRowsX = kTileX / kClusterY, kRowsY = kTileY / kClusterX;
  constexpr uint16_t kAll = (1 << kMulticast) - 1;
  const bool is_first = threadIdx.x % kWarp == 0;
  const int share_x = kClusterY > 1 ? int(part.rank) * kRowsX : 0, share_y = kClusterX > 1 ? int(part.rank) * kRowsY : 0;
  Tile tile;
  if constexpr (!kGrouped) {
    if (p.lead && is_first && Tiles(p).take(p, part, tile)) {
      // Weights that the L2 fetches while the kernel in front still runs: nothing is read of them yet, and
      // what that kernel writes goes through the L2.
      for (int block = part.begin; block < min(part.end, part.begin + kStages); ++block) {
        if constexpr (kSwapped) fetch_box(p.x, block * kBlock, tile.x + share_x);
        else fetch_box(p.y, block * kBlock, tile.y + share_y);
      }
    }
    __syncwarp();
  }
  grid_dependency_wait();
  Stage stage;
  for (Tiles tiles(p); tiles.take(p, part, tile); __syncwarp()) {
    for (int block = part.begin; is_first && block < part.end; ++block, stage.advance()) {
      const uint32_t full = ring.full(stage.index);
      wait_for(ring.empty(stage.index), stage.phase ^ 1);  // the first time round it is
      arrive_expecting(full, kBytesX + kBytesY);
      const uint32_t x = ring.x(stage.index) + share_x * kBlock, y = ring.y(stage.index) + share_y * kBlock;
      if constexpr (kClusterY > 1) copy_box_to(p.x, x, block * kBlock, tile.x + share_x, full, kAll);
      else copy_box(p.x, x, block * kBlock, tile.x, full);
      if constexpr (kClusterX > 1) copy_box_to(p.y, y, block * kBlock, tile.y + share_y, full, kAll);
      else copy_box(p.y, y, block * kBlock, tile.y, full);
    }
  }
}

// A warp: the factors of the ring's tiles; zeros beyond the matrices.
__device__ __forceinline__ void load_factors(Params const& p, Ring ring, Part const& part) {
  const int lane = threadIdx.x % kWarp;
  const int last_column = (p.n - 1) / kBlock;
  grid_dependency_wait();
  Stage stage;
  Tile tile;
  for (Tiles tiles(p); tiles.take(p, part, tile);) {
    const int column = (tile.column + lane * kRun) / kBlock;
    const bool has_column = lane < kColumnFactors && column <= last_column;
    const float* of_column = p.scale_b + tile.group * p.b_group + (has_column ? column : 0) * p.b_column;
    for (int block = part.begin; block < part.end; ++block, stage.advance()) {
      const uint32_t to = ring.factors(stage.index);
      wait_for(ring.empty(stage.index), stage.phase ^ 1);
#pragma unroll 2
      for (int i = lane; i < kRowFactors; i += kWarp) {
        const bool is_there = tile.row + i < tile.end;
        copy_float(to + i * 4, p.scale_a + (is_there ? tile.row + i : 0) * p.a_row + block * p.a_block, is_there);
      }
      if (lane < kColumnFactors) copy_float(to + (kColumnOffset + lane) * 4, of_column + block * p.b_block, has_column);
      arrive_after_copies(ring.full(stage.index));
    }
  }
}

// Of a thread that multiplies. Its warp's numbers come by a shuffle, which lets the compiler keep what it
// computes of them once a warp.
struct Lane {
  int group, warp, row, column;  // row of eight, and first of two columns of eight

  __device__ __forceinline__ Lane()
      : group(__shfl_sync(kAllLanes, int(threadIdx.x / kWarpGroup) - 1, 0)),
        warp(__shfl_sync(kAllLanes, int(threadIdx.x / kWarp % 4), 0)), row(threadIdx.x % kWarp / 4),
        column(threadIdx.x % 4 * 2) {}
  // First of the two rows of x in its tile, the other is eight further.
  __device__ __forceinline__ int first(int part) const { return (group * kParts + part) * 64 + warp * 16 + row; }
};

using Sums = float[kParts][kResults];

// Swapped operands have the rows' factors along the columns: few are read while the products run, more as they
// are used.
constexpr bool kRowsEarly = !kSwapped || kTileY <= 64;
constexpr int kPairs = kSwapped && kRowsEarly ? kTileY / 8 : 1;

// What a thread needs of a stage's factors, read while the products run: of its rows of x and of the
// columns' runs, or of its columns and of its rows' block where the operands are swapped.
struct Factors {
  float upper[kParts], lower[kParts], weight[kColumnFactors];
  float2 pairs[kPairs];
  uint32_t factors;

  __device__ __forceinline__ Factors(uint32_t factors, Lane const& lane, float alpha) : factors(factors) {
    if constexpr (kSwapped) {
      weight[0] = alpha * load_shared(factors + (kColumnOffset + lane.first(0) / kBlock) * 4);
      if constexpr (kRowsEarly) {
#pragma unroll
        for (int c = 0; c < kPairs; ++c) pairs[c] = load_shared_pair(factors + (8 * c + lane.column) * 4);
      }
    } else {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        upper[part] = alpha * load_shared(factors + lane.first(part) * 4);
        lower[part] = alpha * load_shared(factors + (lane.first(part) + 8) * 4);
      }
#pragma unroll
      for (int i = 0; i < kColumnFactors; ++i) weight[i] = load_shared(factors + (kColumnOffset + i) * 4);
    }
  }
};

// sums += accumulators, times the factors of the block of K.
__device__ __forceinline__ void promote(Accumulators const& d, float (&sums)[kResults], Factors const& of, Lane const& lane,
                                        int part) {
#pragma unroll
  for (int octet = 0; octet < kTileY / 8; ++octet) {
    const int c = 4 * octet;
    if constexpr (kSwapped) {
      float2 factor;
      if constexpr (kRowsEarly) factor = of.pairs[octet];
      else factor = load_shared_pair(of.factors + (8 * octet + lane.column) * 4);
      factor.x *= of.weight[0], factor.y *= of.weight[0];
      sums[c] = fmaf(factor.x, d[c], sums[c]);
      sums[c + 1] = fmaf(factor.y, d[c + 1], sums[c + 1]);
      sums[c + 2] = fmaf(factor.x, d[c + 2], sums[c + 2]);
      sums[c + 3] = fmaf(factor.y, d[c + 3], sums[c + 3]);
    } else {
      const float weight = of.weight[octet * 8 / kRun], upper = of.upper[part] * weight, lower = of.lower[part] * weight;
      sums[c] = fmaf(upper, d[c], sums[c]);
      sums[c + 1] = fmaf(upper, d[c + 1], sums[c + 1]);
      sums[c + 2] = fmaf(lower, d[c + 2], sums[c + 2]);
      sums[c + 3] = fmaf(lower, d[c + 3], sums[c + 3]);
    }
  }
}

// A stage's bytes are no longer read, by this warp. Its products have ended, and factors that were read in
// front of them are long there; those that are read behind them are waited for. Not by all: the fence
// (MEMBAR.ALL.CTA) waits for the last tile's stores too.
__device__ __forceinline__ void leave(uint32_t empty) {
  if constexpr (!kRowsEarly) async_copy_fence();
  __syncwarp();
  const uint32_t lane = threadIdx.x % kWarp;
  if constexpr (kMulticast > 1) {
    if (lane < kMulticast) arrive_in_block(in_block(empty, lane));
  } else {
    if (lane == 0) arrive(empty);
  }
}

__device__ __forceinline__ void store(__nv_bfloat16* to, uint32_t const (&word)[4]) {
  *reinterpret_cast<uint4*>(to) = make_uint4(word[0], word[1], word[2], word[3]);
}

// Rows of x are D's rows: the four lanes of a row trade octets of columns, so that each stores 16 bytes of
// them. `read(i)` is the thread's i-th sum of a part.
template <class Read>
__device__ __forceinline__ void store_rows(Params const& p, Tile const& tile, int row, int first, Read&& read) {
  const int quad = threadIdx.x % 4;
  uint32_t word[4];
  if constexpr (kResults % 16 == 0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) word[i] = packed_bf16(read(first + 4 * i + 2 * half), read(first + 4 * i + 2 * half + 1));
      transpose_quad(word);
      const int at = row + 8 * half, column = tile.column + first * 2 + 8 * quad;
      if (at < tile.end && column < p.n) store(p.d + at * p.ldd + column, word);
    }
  } else {  // two octets of both rows
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = packed_bf16(read(first + 4 * (i % 2) + i / 2 * 2), read(first + 4 * (i % 2) + i / 2 * 2 + 1));
    transpose_quad(word);
    const int at = row + 8 * (quad / 2), column = tile.column + first * 2 + 8 * (quad % 2);
    if (at < tile.end && column < p.n) store(p.d + at * p.ldd + column, word);
  }
}

// Rows of x are D's columns: eight by eight results are transposed within the warp.
template <class Read>
__device__ __forceinline__ void store_columns(Params const& p, Tile const& tile, int row, int first, Read&& read) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t word = transposed(packed_bf16(read(first + 2 * half), read(first + 2 * half + 1)));
    const int lane = threadIdx.x % kWarp;
    const int at = tile.row + first * 2 + lane / 4, column = row - lane / 4 + 8 * half + lane % 4 * 2;
    if (at < tile.end && column < p.n) *reinterpret_cast<uint32_t*>(p.d + at * p.ldd + column) = word;
  }
}

constexpr int kStored = kSwapped ? 4 : (kResults % 16 == 0 ? 16 : 8);  // results that are stored at a time

template <class Read>
__device__ __forceinline__ void store_part(Params const& p, Tile const& tile, Lane const& lane, int part, int first, Read&& read) {
  const int row = (kSwapped ? tile.column : tile.row) + lane.first(part);
  if constexpr (kSwapped) store_columns(p, tile, row, first, read);
  else store_rows(p, tile, row, first, read);
}

// By way of shared memory: a warp's 16 rows of a part, 64 columns a box, the last of them once more where they
// are no multiple. As many boxes as there are buffers are written at a time.
__device__ __forceinline__ void store_boxes(Params const& p, Tile const& tile, Ring ring, Lane const& lane, Sums const& sums) {
  constexpr int kChunks = (kTileY + kBoxColumns - 1) / kBoxColumns, kBoxes = kParts * kChunks;
  constexpr int kBuffers = kStoreBuffers > 0 ? kStoreBuffers : 1;
  const auto first_column = [](int box) { return min(box % kChunks * kBoxColumns, kTileY - kBoxColumns); };
  const int thread = threadIdx.x % kWarp, row = thread % 16;
  const uint32_t boxes = ring.boxes(lane.group * 4 + lane.warp);
#pragma unroll
  for (int first = 0; first < kBoxes; first += kBuffers) {
    if (thread == 0) copies_read();
    __syncwarp();
#pragma unroll
    for (int box = first; box < kBoxes && box < first + kBuffers; ++box) {
      const uint32_t to = boxes + (box - first) * kBoxBytes + row * kSwizzleBytes;
#pragma unroll
      for (int octet = 0; octet < kBoxColumns / 8; octet += 2) {
        uint32_t word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // rows 0 to 7 and 8 to 15 of one octet, and of the next
          const int at = (first_column(box) / 8 + octet + i / 2) * 4 + i % 2 * 2;
          word[i] = packed_bf16(sums[box / kChunks][at], sums[box / kChunks][at + 1]);
        }
        store_matrices(to + ((octet + thread / 16) ^ (row % 8)) * 16, word);
      }
    }
    async_copy_fence();
    __syncwarp();
    if (thread == 0) {
#pragma unroll
      for (int box = first; box < kBoxes && box < first + kBuffers; ++box)
        store_box(p.d_map, boxes + (box - first) * kBoxBytes, tile.column + first_column(box),
                  tile.row + lane.first(box / kChunks) - lane.row);
      copies_commit();
    }
  }
}

// Blocks that divide K: each keeps its sums in shared memory, and adds and stores its share of all.
__device__ __forceinline__ void store_reduced(Params const& p, Tile const& tile, Ring ring, Lane const& lane, uint32_t rank,
                                              Sums const& sums) {
  constexpr int kConsumers = kGroups * kWarpGroup;
  const uint32_t mine = ring.base + (threadIdx.x - kWarpGroup) * 4;
  // Both warp groups have read the last of the ring.
  named_barrier(kConsumersMeet, kConsumers);
#pragma unroll
  for (int part = 0; part < kParts; ++part)
#pragma unroll
    for (int i = 0; i < kResults; ++i)
      store_shared(mine + (part * kResults + i) * kConsumers * 4, sums[part][i]);
  cluster_sync();
#pragma unroll
  for (int part = 0; part < kParts; ++part)
#pragma unroll
    for (int first = 0; first < kResults; first += kStored) {
      if ((part * (kResults / kStored) + first / kStored) % kSplits != rank) continue;
      float values[kStored] = {};
#pragma unroll
      for (int split = 0; split < kSplits; ++split) {
        const uint32_t there = in_block(mine, split);
#pragma unroll
        for (int i = 0; i < kStored; ++i)
          values[i] += load_cluster_float(there + (part * kResults + first + i) * kConsumers * 4);
      }
      store_part(p, tile, lane, part, first, [&](int i) { return values[i - first]; });
    }
}

// Products of 64 rows of a warp group by 128 of K, under way.
__device__ __forceinline__ void begin_products(Accumulators& d, uint64_t x, uint64_t y, int part) {
  fence(d);
  products_begin();
#pragma unroll
  for (int k = 0; k < kBlock / 32; ++k) multiply(d, x + (part * 64 * kBlock + k * 32) / 16, y + k * 32 / 16, k);
  products_commit();
  fence(d);
}

__device__ __forceinline__ void store_tile(Params const& p, Tile const& tile, Ring ring, Lane const& lane, uint32_t rank,
                                           Sums const& sums) {
  if constexpr (kSplits > 1) {
    store_reduced(p, tile, ring, lane, rank, sums);
    return;
  }
  if constexpr (kStoreBuffers > 0) {
    // A box has whole rows of a group: where one ends within, the threads store.
    const int last = lane.first(kParts - 1) - lane.row + 16;
    if (!kGrouped || tile.row + last <= tile.end) {
      store_boxes(p, tile, ring, lane, sums);
      return;
    }
  }
  if constexpr (kStoreBuffers == 0 || kGrouped) {
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int first = 0; first < kResults; first += kStored)
        store_part(p, tile, lane, part, first, [&](int i) { return sums[part][i]; });
  }
}

__device__ __forceinline__ void multiply_tiles(Params const& p, Ring ring, Part const& of_k) {
  const Lane lane;
  Stage stage;
  Tiles tiles(p);
  Tile tile, next;
  for (bool has_tile = tiles.take(p, of_k, tile); has_tile; tile = next) {
    Sums sums = {};
    Accumulators d;
#pragma unroll 1
    for (int block = of_k.begin; block < of_k.end; ++block, stage.advance()) {
      const uint64_t x = k_major_operand(ring.x(stage.index) + lane.group * kParts * 64 * kBlock);
      const uint64_t y = k_major_operand(ring.y(stage.index));
      wait_for(ring.full(stage.index), stage.phase);
      const Factors factors(ring.factors(stage.index), lane, p.alpha);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        begin_products(d, x, y, part);
        // The next tile is found while the last products of this one run.
        if (part == kParts - 1 && block == of_k.end - 1) has_tile = tiles.take(p, of_k, next);
        products_wait();
        fence(d);
        if (kRowsEarly && part == kParts - 1) leave(ring.empty(stage.index));
        promote(d, sums[part], factors, lane, part);
      }
      if (!kRowsEarly) leave(ring.empty(stage.index));
    }
    store_tile(p, tile, ring, lane, of_k.rank, sums);
  }
  if constexpr (kStoreBuffers > 0) {
    if (threadIdx.x % kWarp == 0) copies_stored();
    __syncwarp();
  }
}

__global__ void __launch_bounds__(kThreads, 1) block_scaled_0123456789abcdef(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char shared[];
  const Ring ring{shared_address(shared)};
  const Part part(p);
  if (threadIdx.x == 0) {
    if (ring.base % 1024 != 0) __trap();  // of a swizzle atom
    for (int stage = 0; stage < kStages; ++stage) {
      init_barrier(ring.full(stage), kFullArrivals);
      init_barrier(ring.empty(stage), kEmptyArrivals);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if constexpr (kCluster > 1) cluster_sync();
  if (threadIdx.x < kWarpGroup) {
    if constexpr (kGroups > 1) give_registers<kProducerRegisters>();
    if (threadIdx.x / kWarp == 0) load_tiles(p, ring, part);
    else if (threadIdx.x / kWarp == 1) load_factors(p, ring, part);
    if constexpr (kSplits > 1) cluster_sync();  // with the consumers of `store_reduced`
  } else {
    if constexpr (kGroups > 1) take_registers<kConsumerRegisters>();
    grid_dependency_wait();
    // The kernel behind waits in the same way: it may come as soon as there is room.
    grid_dependency_launch();
    multiply_tiles(p, ring, part);
  }
  // Nobody's shared memory is written to or read after it has ended.
  if constexpr (kCluster > 1) cluster_sync();
}

inline bool aligned(int64_t elements, int64_t width) {
  return elements > 0 && elements * width % 16 == 0 && elements < (int64_t(1) << 36);
}

struct Tensors { void *a, *b, *d, *scale_a, *scale_b; };
struct Integers { int64_t m, n, k, lda, ldb, ldd, scale_a_row, scale_a_block, scale_b_column, scale_b_block, max_swizzle_size, raster_order, pdl, groups, scale_b_group; };
struct Scalars { double alpha; };

inline bool valid(Integers const& call) {
  const int64_t m = call.m, n = call.n, k = call.k, groups = call.groups;
  for (int64_t extent : {m, n, k})
    if (extent < 1 || extent > (1 << 30)) return false;
  if (n % 8 != 0 || k % 16 != 0 || (k + kBlock - 1) / kBlock < kSplits) return false;
  if (!aligned(call.lda, 1) || !aligned(call.ldb, 1) || !aligned(call.ldd, 2)) return false;
  for (int64_t stride : {call.scale_a_row, call.scale_a_block, call.scale_b_column, call.scale_b_block, call.scale_b_group})
    if (stride < 0 || stride >= (int64_t(1) << 36)) return false;
  if (groups < 1 || groups > 65536 || (!kGrouped && groups > 1) || groups * n > INT32_MAX) return false;
  const int64_t tiles = ((m + 7) / 8 + groups - 1) * ((n + 7) / 8);
  return call.lda >= k && call.ldb >= k && call.ldd >= n && call.max_swizzle_size >= 1 && call.max_swizzle_size <= 64 &&
         (call.raster_order == 1 || call.raster_order == 2) && tiles <= (int64_t(1) << 30);
}

// Boxes of 128 bytes by `box_rows` rows of a row-major matrix of `width` elements a row.
inline cudaError_t describe(CUtensorMap* map, CUtensorMapDataType type, int bytes, const void* data, int64_t width, int64_t rows,
                            int64_t stride, uint32_t box_rows) {
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
  const cuuint64_t extents[] = {cuuint64_t(width), cuuint64_t(rows)}, strides[] = {cuuint64_t(stride * bytes)};
  const cuuint32_t box[] = {cuuint32_t(kSwizzleBytes / bytes), box_rows}, steps[] = {1, 1};
  const CUresult made = encode(map, type, 2, const_cast<void*>(data), extents, strides, box, steps,
                               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return made == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

inline int set_attributes(cudaLaunchAttribute* attributes, bool pdl) {
  int count = 0;
  if (kCluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = kCluster;
    attributes[count].val.clusterDim.y = 1;
    attributes[count++].val.clusterDim.z = 1;
  }
  if (pdl) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  return count;
}

// Allows the kernel its shared memory, and asks how many of its clusters the device holds at once. Once a
// device.
inline cudaError_t prepare(int* clusters) {
  static std::atomic<int> known[kKnownDevices];
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if (device < kKnownDevices && (*clusters = known[device].load()) > 0) return cudaSuccess;
  auto entry = &block_scaled_0123456789abcdef;
  error = cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  if (error == cudaSuccess && kCluster == 1)
    error = cudaDeviceGetAttribute(clusters, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess && kCluster > 1) {
    cudaLaunchAttribute attributes[2]{};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(kCluster);
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = kSmemBytes;
    config.attrs = attributes;
    config.numAttrs = set_attributes(attributes, false);
    error = cudaOccupancyMaxActiveClusters(clusters, entry, &config);
  }
  if (error == cudaSuccess && *clusters < 1) error = cudaErrorLaunchOutOfResources;
  if (error == cudaSuccess && device < kKnownDevices) known[device].store(*clusters);
  return error;
}

inline bool misses(const void* tensor, uintptr_t alignment) {
  return tensor == nullptr || reinterpret_cast<uintptr_t>(tensor) % alignment != 0;
}

inline cudaError_t launch(Tensors const& tensors, Integers const& call, Scalars const& scalars, cudaStream_t stream) {
  if (!valid(call)) return cudaErrorInvalidValue;
  for (const void* matrix : {tensors.a, tensors.b, tensors.d})
    if (misses(matrix, 16)) return cudaErrorMisalignedAddress;
  for (const void* vector : { tensors.scale_a, tensors.scale_b })
    if (misses(vector, 4)) return cudaErrorMisalignedAddress;
  int clusters = 0;
  if (cudaError_t error = prepare(&clusters); error != cudaSuccess) return error;
  const int64_t m = call.m, n = call.n, k = call.k, groups = call.groups;
  const int64_t rows_x = kSwapped ? n * groups : m, rows_y = kSwapped ? m : n * groups;
  Params p{};
  const void* const of_x = kSwapped ? tensors.b : tensors.a;
  const void* const of_y = kSwapped ? tensors.a : tensors.b;
  const auto bytes = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  cudaError_t error = describe(&p.x, bytes, 1, of_x, k, rows_x, kSwapped ? call.ldb : call.lda, kTileX / kClusterY);
  if (error == cudaSuccess)
    error = describe(&p.y, bytes, 1, of_y, k, rows_y, kSwapped ? call.lda : call.ldb, kTileY / kClusterX);
  if (error == cudaSuccess && kStoreBuffers > 0)
    error = describe(&p.d_map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, tensors.d, n, m, call.ldd, 16);
  if (error != cudaSuccess) return error;
  p.d = static_cast<__nv_bfloat16*>(tensors.d);
  p.scale_a = static_cast<const float*>(tensors.scale_a);
  p.scale_b = static_cast<const float*>(tensors.scale_b);
  p.m = static_cast<int>(m);
  p.n = static_cast<int>(n);
  p.blocks = static_cast<int>((k + kBlock - 1) / kBlock);
  const auto tiles_of = [](int64_t rows, int a_cluster) { return static_cast<int>((rows + a_cluster - 1) / a_cluster); };
  p.tiles_x = tiles_of(kSwapped ? n : m, kTileX * kClusterX);
  p.tiles_y = tiles_of(kSwapped ? m : n, kTileY * kClusterY);
  p.along_x = (call.raster_order == 1) != kSwapped;
  p.band = static_cast<int>(call.max_swizzle_size);
  p.lead = call.pdl != 0;
  p.ldd = call.ldd;
  p.a_row = call.scale_a_row;
  p.a_block = call.scale_a_block;
  p.b_column = call.scale_b_column;
  p.b_block = call.scale_b_block;
  p.b_group = call.scale_b_group;
  p.groups = static_cast<int>(groups);
  p.alpha = static_cast<float>(scalars.alpha);
  // Of groups at most: each but the first may begin a tile of rows.
  const int tiles = (p.tiles_x + (kGrouped && !kSwapped ? p.groups - 1 : 0)) *
                    (p.tiles_y + (kGrouped && kSwapped ? p.groups - 1 : 0));
  // Partial sums take the ring's place, so that blocks which divide K have one tile each.
  // Of many tiles each block has as many as another, where that leaves few multiprocessors without work: what
  // they do not draw makes the others faster.
  int resident = kSplits > 1 || tiles < clusters ? tiles : clusters;
  const int rounds = (tiles + resident - 1) / resident, even = (tiles + rounds - 1) / rounds;
  if (!kGrouped && even * 8 >= resident * 7) resident = even;
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(resident * kCluster);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kSmemBytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = set_attributes(attributes, call.pdl != 0);
  return cudaLaunchKernelEx(&config, block_scaled_0123456789abcdef, p);
}

}  // namespace k_0123456789abcdef

extern "C" int tuner_0123456789abcdef_workspace(const int64_t* integers, int64_t* bytes) {
  *bytes = 0;
  using namespace k_0123456789abcdef;
  return valid(view<Integers>(integers)) ? 0 : static_cast<int>(cudaErrorInvalidValue);
}

extern "C" int tuner_0123456789abcdef_launch(void* const* tensors, const int64_t* integers, const double* scalars, void*,
                                     void* stream) {
  using namespace k_0123456789abcdef;
  return static_cast<int>(k_0123456789abcdef::launch(view<Tensors>(tensors), view<Integers>(integers), view<Scalars>(scalars),
                                             static_cast<cudaStream_t>(stream)));
}
