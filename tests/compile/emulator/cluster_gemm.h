// One product by an emulated kernel of few hundred rows, all of it compared: elements are small numbers, so that
// sums are exact and the result is the rounded reference.
#pragma once

namespace emulated {

struct Case {
  int m, n, k, band;
  bool along_x;
  int blocks;  // or clusters, at once
};

inline int run(Case const& c, unsigned seed) {
  using namespace k_emulated;
  std::mt19937 random(seed);
  std::vector<uint16_t> a(size_t(c.m) * c.k), b(size_t(c.n) * c.k), d(size_t(c.m) * c.n, 0x7FA5), bias(c.n);
  const uint16_t values[] = {0, 0x3F80, 0x4000, 0xBF80, 0xC000, 0x3F00};  // 0, 1, 2, -1, -2, 0.5
  for (auto* operand : {&a, &b, &bias})
    for (uint16_t& x : *operand) x = values[random() % 6];
  const auto value = [](uint16_t bits) {
    const uint32_t wide = uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &wide, 4);
    return x;
  };
  const auto map = [&](std::vector<uint16_t>& operand, int rows, int box_rows) {
    return emulator::map_of({reinterpret_cast<uint8_t*>(operand.data()), 2 * c.k, rows, 2 * c.k, box_rows});
  };
  Params p{};
  p.x = kSwapped ? map(b, c.n, kTileX) : map(a, c.m, kTileX);
  p.y = kSwapped ? map(a, c.m, kTileY) : map(b, c.n, kTileY);
  p.d = reinterpret_cast<__nv_bfloat16*>(d.data());
  p.bias = reinterpret_cast<__nv_bfloat16*>(bias.data());
  p.m = c.m, p.n = c.n, p.blocks = (c.k + kBlock - 1) / kBlock;
  p.tiles_x = ((kSwapped ? c.n : c.m) + kTileX - 1) / kTileX;
  p.tiles_y = ((kSwapped ? c.m : c.n) + kTileY - 1) / kTileY;
  p.band = c.band, p.along_x = c.along_x, p.lead = true;
  p.ldd = c.n, p.alpha = 2.0f;
  const int tiles = p.tiles_x * p.tiles_y, resident = kSplits > 1 ? tiles : std::min(tiles, c.blocks);
  emulator::launch(resident * kSplits, kSplits, kThreads, kSmemBytes, seed, [&] { cluster_gemm_emulated(p); });
  for (int row = 0; row < c.m; ++row)
    for (int column = 0; column < c.n; ++column) {
      double sum = 0;
      for (int k = 0; k < c.k; ++k) sum += double(value(a[size_t(row) * c.k + k])) * value(b[size_t(column) * c.k + k]);
      sum = 2 * sum + (kHasBias ? value(bias[column]) : 0.0f);
      const uint16_t got = d[size_t(row) * c.n + column];
      const uint16_t expected = __bfloat16_as_ushort(__float2bfloat16(float(sum)));
      if (got == expected || ((expected << 1 & 0xFFFF) == 0 && (got << 1 & 0xFFFF) == 0)) continue;
      std::printf("(%d, %d) of %d x %d x %d is %04x, not %04x\n", row, column, c.m, c.n, c.k, got, expected);
      return 1;
    }
  return 0;
}

}  // namespace emulated
