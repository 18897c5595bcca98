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

inline float value(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}

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
  const int64_t slot = kWide + 8, page = slot * c.page_size + 16, row = kWide + 24;
  std::vector<uint16_t> cache(pages * page, 0x7FC0), query(size_t(batch) * c.queries * c.heads * row, 0x7FC0);
  std::vector<uint16_t> out(size_t(batch) * c.queries * c.heads * kValues, 0x7FA5);
  std::vector<float> lse(size_t(batch) * c.heads * c.queries, NAN);  // (heads, sequences, queries)
  const auto key = [&](int b, int i) { return cache.data() + table[b * columns + i / c.page_size] * page + i % c.page_size * slot; };
  for (int b = 0; b < batch; ++b)
    for (int i = 0; i < lengths[b]; ++i) {
      if (i % c.page_size == 0) table[b * columns + i / c.page_size] = order.back(), order.pop_back();
      for (int d = 0; d < kWide; ++d) key(b, i)[d] = draw();
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
  p.shares = c.shares, p.page_size = c.page_size, p.box = std::gcd(c.page_size, 64 / kCluster), p.overhead = c.overhead, p.cut_overhead = c.cut_overhead;
  p.query = emulator::tensor_of({query.data(), kWide, {c.heads, c.queries, batch},
                                 {row, row * c.heads, row * c.heads * c.queries}, {p.packed, 64 / p.packed, 1}});
  p.cache = emulator::tensor_of({cache.data(), kWide, {c.page_size, pages, 1}, {slot, page, 0}, {kWholeRows ? 8 : p.box, 1, 1}});
  ::octets = p.box / 8, set_rest(p, 0);
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
          for (int d = 0; d < kWide; ++d) scores[i] += double(value(of[d])) * value(key(b, i)[d]);
          most = std::max(most, scores[i] *= scale);
        }
        for (int i = 0; i < seen; ++i) {
          const double weight = std::exp(scores[i] - most);
          total += weight;
          for (int d = 0; d < kValues; ++d) sum[d] += weight * value(key(b, i)[d]);
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
