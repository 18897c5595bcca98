// One call of emulated kernels over a paged cache, all of it compared with double precision. What no sequence
// has a key in is no number.
#pragma once

#include <numeric>

namespace emulated {

struct Case {
  int heads, queries, page_size, shares, overhead, cut_overhead;
  int lengths[6];  // those from the first negative one on do not count
};

constexpr int kWide = 576, kValues = 512;
// Bytes of a row of the cache: of the queries' type, of e4m3 with one factor, of e4m3 with a factor of 128 columns.
constexpr int kRow[] = {2 * kWide, kWide, 656}, kKind = EMULATED_CACHE;
constexpr float kDescale = 0.375f;

inline float value(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}

inline uint16_t rounded(float x) { return __bfloat16_as_ushort(__float2bfloat16(x)); }

// A row of the cache: its element, and what is to be drawn for it.
struct Key {
  uint8_t* row;

  float at(int d) const {
    if (kKind == 0 || kKind == 2 && d >= kValues) return value(word(kKind == 0 ? 2 * d : 528 + 2 * (d - kValues)));
    if (kKind == 1) return kDescale * emulator::e4m3(row[d]);
    float factor;
    std::memcpy(&factor, row + kValues + d / 128 * 4, 4);
    return value(rounded(factor * emulator::e4m3(row[d])));
  }
  template <class Normal>
  void draw(std::mt19937& random, Normal&& normal) {
    for (int at = 0; at < kRow[kKind];) {
      if (kKind == 2 && at == kValues)
        for (; at < 528; at += 4) {
          float const factor = 0.25f + 0.001f * (random() % 1000);
          std::memcpy(row + at, &factor, 4);
        }
      if (kKind == 1 || (kKind == 2 && at < kValues)) {
        uint8_t const bits = random() % 4 ? 0x28 + random() % 24 : random() % 8;  // some below the normal ones
        row[at++] = bits | random() % 2 << 7;
        continue;
      }
      uint16_t const bits = rounded(normal(random));
      std::memcpy(row + at, &bits, 2), at += 2;
    }
  }

 private:
  uint16_t word(int at) const {
    uint16_t bits;
    std::memcpy(&bits, row + at, 2);
    return bits;
  }
};

template <class P>
auto set_rest(P& p, int) -> decltype(p.rest, void()) { p.rest = p.cache; }
template <class P>
void set_rest(P&, long) {}

inline int run(Case const& c, unsigned seed) {
  using namespace k_emulated;
  std::mt19937 random(seed + 7);
  std::normal_distribution<float> normal;
  const auto draw = [&] { return __bfloat16_as_ushort(__float2bfloat16(normal(random))); };
  std::vector<int> lengths;
  for (int length : c.lengths)
    if (length >= 0) lengths.push_back(length);
  const int batch = int(lengths.size()), longest = *std::max_element(lengths.begin(), lengths.end());
  const int columns = (longest + c.page_size - 1) / c.page_size + 1, pages = batch * columns + 1;
  std::vector<int> order(pages), table(batch * columns, 1 << 30);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  const int64_t slot = kRow[kKind] + 16, page = slot * c.page_size + 32, row = kWide + 24;  // of the cache bytes
  std::vector<uint16_t> cache(pages * page / 2, kKind == 0 ? 0x7FC0 : 0x7F7F), query(size_t(batch) * c.queries * c.heads * row, 0x7FC0);
  std::vector<uint16_t> out(size_t(batch) * c.queries * c.heads * kValues, 0x7FA5);
  std::vector<float> lse(size_t(batch) * c.heads * c.queries, NAN);  // (heads, sequences, queries)
  uint8_t* const bytes = reinterpret_cast<uint8_t*>(cache.data());
  const auto key = [&](int b, int i) { return Key{bytes + table[b * columns + i / c.page_size] * page + i % c.page_size * slot}; };
  for (int b = 0; b < batch; ++b)
    for (int i = 0; i < lengths[b]; ++i) {
      if (i % c.page_size == 0) table[b * columns + i / c.page_size] = order.back(), order.pop_back();
      key(b, i).draw(random, normal);
    }
  for (size_t r = 0; r < query.size() / row; ++r)
    for (int d = 0; d < kWide; ++d) query[r * row + d] = draw();

  Params p{};
  p.table = table.data(), p.lengths = lengths.data(), p.table_row = columns;
  p.out = reinterpret_cast<__nv_bfloat16*>(out.data()), p.lse = lse.data();
  p.out_head = kValues, p.out_row = kValues * c.heads, p.out_batch = p.out_row * c.queries;
  p.lse_batch = c.queries, p.lse_head = batch * c.queries;
  p.batch = batch, p.queries = c.queries, p.heads = c.heads;
  for (p.packed = 1; p.packed < std::min(c.heads, 64);) p.packed *= 2;
  p.head_blocks = (c.heads + 63) / 64;
  p.row_blocks = p.head_blocks * ((c.queries + 64 / p.packed - 1) / (64 / p.packed));
  p.shares = c.shares, p.page_size = c.page_size, p.overhead = c.overhead, p.cut_overhead = c.cut_overhead;
  p.query = emulator::tensor_of({query.data(), kWide, {c.heads, c.queries, batch},
                                 {row, row * c.heads, row * c.heads * c.queries}, {p.packed, 64 / p.packed, 1}});
#if EMULATED_CACHE == 0
  p.box = std::gcd(c.page_size, 64 / kCluster);
  p.cache = emulator::tensor_of({cache.data(), kWide, {c.page_size, pages, 1}, {slot / 2, page / 2, 0}, {kWholeRows ? 8 : p.box, 1, 1}});
  ::octets = p.box / 8, set_rest(p, 0);
#else
  p.cache = reinterpret_cast<const char*>(bytes), p.cache_page = page, p.cache_slot = slot;
#endif
#if EMULATED_CACHE == 1
  p.descale = &kDescale;
#endif
  const int blocks = p.shares * p.row_blocks;
  std::vector<float> partial(size_t(blocks) * 2 * 64 * 512, NAN);
  std::vector<float2> statistics(size_t(blocks) * 2 * 64, make_float2(NAN, NAN));
  std::vector<int2> begins(p.shares);
  p.partial = partial.data(), p.statistics = statistics.data(), p.begins = begins.data();
  const float scale = 0.0625f;
  p.scale_log2 = scale * 1.44269504f;
  emulator::launch(blocks, kCluster, kThreads, kSmemBytes, seed, [&] { mla_decode_emulated(p); });
  if (p.shares > 1) emulator::launch(2, 1, kCombineThreads, 16, seed, [&] { combine_emulated(p); });

  for (int b = 0; b < batch; ++b)
    for (int q = 0; q < c.queries; ++q)
      for (int h = 0; h < c.heads; ++h) {
        const uint16_t* const of = query.data() + ((b * c.queries + q) * c.heads + h) * row;
        const int seen = std::max(lengths[b] - c.queries + 1 + q, 0);
        std::vector<double> sum(kValues), scores(seen);
        double most = -INFINITY, total = 0;
        for (int i = 0; i < seen; ++i) {
          for (int d = 0; d < kWide; ++d) scores[i] += double(value(of[d])) * key(b, i).at(d);
          most = std::max(most, scores[i] *= scale);
        }
        for (int i = 0; i < seen; ++i) {
          const double weight = std::exp(scores[i] - most);
          total += weight;
          for (int d = 0; d < kValues; ++d) sum[d] += weight * key(b, i).at(d);
        }
        const double expected_lse = most + std::log(total);
        const float got_lse = lse[(h * batch + b) * c.queries + q];
        const bool is_lse = seen ? std::abs(got_lse - expected_lse) < 1e-3 : got_lse == -INFINITY;
        if (!is_lse) return std::printf("lse of (%d, %d, %d) is %g, not %g\n", b, q, h, got_lse, expected_lse), 1;
        double error = 0, size = 1e-30;
        for (int d = 0; d < kValues; ++d) {
          const double expected = seen ? sum[d] / total : 0.0, got = value(out[((b * c.queries + q) * c.heads + h) * kValues + d]);
          error += (got - expected) * (got - expected), size += expected * expected;
        }
        if (!(error < 3e-5 * size)) return std::printf("(%d, %d, %d) is wrong by %g\n", b, q, h, std::sqrt(error / size)), 1;
      }
  return 0;
}

}  // namespace emulated
