// One product by an emulated kernel, all of it compared: elements and factors are powers and small numbers, so
// that sums are exact and the result is the rounded reference.
#pragma once

namespace emulated {

using Numbers = std::mt19937;

struct Case {
  int m, n, k, band;
  bool along_x;
  int clusters;  // at once
  int groups;    // 1 unless grouped
};

// Where the kernel has a map of the factors of A's rows.
template <class Parameters>
auto set_factors(Parameters& p, CUtensorMap const& map, int) -> decltype(p.factors, bool()) {
  p.factors = map;
  return true;
}
template <class Parameters>
bool set_factors(Parameters&, CUtensorMap const&, long) {
  return false;
}

// Where the kernel has maps of the last tiles' rows, those there are of them.
template <class Parameters>
auto set_last(Parameters& p, emulator::Matrix x, emulator::Matrix y, int) -> decltype(p.last_x, void()) {
  p.end_x = (x.rows - 1) / x.box_rows * x.box_rows, p.end_y = (y.rows - 1) / y.box_rows * y.box_rows;
  x.box_rows = x.rows - p.end_x, y.box_rows = y.rows - p.end_y;
  p.end_bytes_x = 128 * x.box_rows, p.end_bytes_y = 128 * y.box_rows;
  p.last_x = emulator::map_of(x), p.last_y = emulator::map_of(y);
}
template <class Parameters>
void set_last(Parameters&, emulator::Matrix, emulator::Matrix, long) {}

inline int run(Case const& c, unsigned seed) {
  using namespace k_emulated;
  Numbers random(seed);
  const int blocks = (c.k + kBlock - 1) / kBlock, rows_a = (c.m + 3) / 4 * 4, columns = (c.n + kBlock - 1) / kBlock;
  std::vector<uint8_t> a(size_t(c.m) * c.k), b(size_t(c.groups) * c.n * c.k);
  for (auto* operand : {&a, &b})
    for (uint8_t& x : *operand) x = "\x00\x38\x40\xB8\xC0\x30"[random() % 6];  // 0, 1, 2, -1, -2, 0.5
  std::vector<float> scale_a(size_t(blocks) * rows_a, NAN), scale_b(size_t(c.groups) * columns * blocks + c.n);
  for (int block = 0; block < blocks; ++block)
    for (int row = 0; row < c.m; ++row) scale_a[block * rows_a + row] = std::ldexp(1.0f, int(random() % 5) - 2);
  for (float& x : scale_b) x = std::ldexp(1.0f, int(random() % 5) - 2);
  std::vector<int> offsets = {0};  // some groups are empty, and the last ones end early where there are many
  for (int group = 1; group <= c.groups; ++group)
    offsets.push_back(c.groups == 1 ? c.m : std::min<int>(c.m, offsets.back() + random() % 3 * (random() % (2 * c.m / c.groups + 1)) / 2));
  std::vector<uint16_t> d(size_t(c.m) * c.n, 0x7FA5);
  const int rows_x = kSwapped ? c.groups * c.n : c.m, rows_y = kSwapped ? c.m : c.groups * c.n;
  Params p{};
  const emulator::Matrix x{(kSwapped ? b : a).data(), c.k, rows_x, c.k, kTileX / kClusterY};
  const emulator::Matrix y{(kSwapped ? a : b).data(), c.k, rows_y, c.k, kTileY / kClusterX};
  p.x = emulator::map_of(x), p.y = emulator::map_of(y);
  set_last(p, x, y, 0);
  p.d_map = emulator::map_of({reinterpret_cast<uint8_t*>(d.data()), 2 * c.n, c.m, 2 * c.n, 16});
  emulator::Matrix factors{reinterpret_cast<uint8_t*>(scale_a.data()), 4 * c.m, blocks, 4 * rows_a, 1};
  factors.floats = kBoxFloats;
  // Without a copy of factors, stages have none: rows and columns have one for all of K.
  const bool is_promoted = !set_factors(p, emulator::map_of(factors), 0) && kFullArrivals == 1;
  p.d = reinterpret_cast<__nv_bfloat16*>(d.data());
  p.scale_a = scale_a.data();
  p.scale_b = scale_b.data();
  p.offsets = offsets.data();
  p.m = c.m, p.n = c.n, p.blocks = blocks, p.groups = c.groups;
  p.tiles_x = ((kSwapped ? c.n : c.m) + kTileX * kClusterX - 1) / (kTileX * kClusterX);
  p.tiles_y = ((kSwapped ? c.m : c.n) + kTileY * kClusterY - 1) / (kTileY * kClusterY);
  p.band = c.band, p.along_x = c.along_x, p.lead = true;
  p.ldd = c.n, p.a_row = 1, p.a_block = rows_a, p.b_column = blocks, p.b_block = 1, p.b_group = columns * blocks;
  if (is_promoted) p.a_block = 0, p.b_column = 1, p.b_block = 0;
  p.alpha = 1.0f;
  const int tiles = p.tiles_x * p.tiles_y, resident = kSplits > 1 ? tiles : kGrouped ? c.clusters : std::min(tiles, c.clusters);
  emulator::launch(resident * kCluster, kCluster, kThreads, kSmemBytes, seed, [&] { block_scaled_emulated(p); });
  for (int row = 0; row < c.m; ++row) {
    const int group = int(std::upper_bound(offsets.begin(), offsets.end(), row) - offsets.begin()) - 1;
    for (int column = 0; column < c.n; ++column) {
      const uint16_t got = d[size_t(row) * c.n + column];
      if (group == c.groups) {  // of none
        if (got == 0x7FA5) continue;
        std::printf("row %d beyond the last group was written\n", row);
        return 1;
      }
      double sum = 0;
      for (int k = 0; k < c.k; ++k)
        sum += double(emulator::e4m3(a[size_t(row) * c.k + k])) * emulator::e4m3(b[(size_t(group) * c.n + column) * c.k + k]) *
               (is_promoted ? scale_a[row] * scale_b[column]
                            : scale_a[k / kBlock * rows_a + row] * scale_b[(group * columns + column / kBlock) * blocks + k / kBlock]);
      const uint16_t expected = __bfloat16_as_ushort(__float2bfloat16(float(sum)));
      if (got == expected || (expected << 1 & 0xFFFF) == 0 && (got << 1 & 0xFFFF) == 0) continue;
      std::printf("(%d, %d) of %d x %d x %d is %04x, not %04x\n", row, column, c.m, c.n, c.k, got, expected);
      return 1;
    }
  }
  return 0;
}

}  // namespace emulated
