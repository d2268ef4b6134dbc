// SPDX-License-Identifier: BSD-3-Clause
// Philox against the published algorithm written down a second time (as in the paper: multiply into
// a 64-bit product, split, exclusive-or), against numbers fixed here for ever, and the map from
// elements to lanes against a bijection.
#include <array>
#include <map>

#include "check.h"
#include "core/philox.h"

using namespace flash_attn;

namespace {

using Words = std::array<uint32_t, 4>;

// The round function S-P-network of the paper, section 3.3, on (L0, R0, L1, R1) = words 1, 0, 3, 2.
Words published(Words x, uint32_t key0, uint32_t key1, int rounds) {
  for (int r = 0; r < rounds; ++r) {
    const unsigned long long product0 = 0xD2511F53ull * x[0], product1 = 0xCD9E8D57ull * x[2];
    const uint32_t high0 = product0 / 4294967296ull, low0 = product0 % 4294967296ull;
    const uint32_t high1 = product1 / 4294967296ull, low1 = product1 % 4294967296ull;
    const uint32_t k0 = key0 + static_cast<uint32_t>(r) * 0x9E3779B9u;
    const uint32_t k1 = key1 + static_cast<uint32_t>(r) * 0xBB67AE85u;
    x = {high1 ^ x[1] ^ k0, low1, high0 ^ x[3] ^ k1, low0};
  }
  return x;
}

void test_algorithm() {
  // Ten rounds, from the known-answer file of the authors' own library: this pins `published`.
  const Words zeros10 = published({0, 0, 0, 0}, 0, 0, 10);
  CHECK(zeros10 == (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const uint32_t ones = 0xffffffff;
  const Words ones10 = published({ones, ones, ones, ones}, ones, ones, 10);
  CHECK(ones10 == (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  const Words pi10 =
      published({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0xa4093822, 0x299f31d0, 10);
  CHECK(pi10 == (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));

  uint32_t x = 12345;
  const auto next = [&x] { return x = x * 1664525u + 1013904223u; };
  for (int repeat = 0; repeat < 2000; ++repeat) {
    const Words c = {next(), next(), next(), next()};
    const uint32_t k0 = next(), k1 = next();
    const Words expected = published(c, k0, k1, 7);
    const Philox4 got = philox(c[0], c[1], c[2], c[3], k0, k1);
    for (int w = 0; w < 4; ++w)
      CHECK_EQ(got.word[w], expected[w], repeat, w);
    for (int lane = 0; lane < 8; ++lane) {
      CHECK_EQ(got.lane(lane), expected[lane / 2] / (lane % 2 ? 65536u : 1u) % 65536u, repeat,
               lane);
    }
  }
}

AttnParams dropout(const int64_t* philox_words, double keep) {
  AttnParams p;
  p.heads_q = p.heads_k = 3;
  p.dropout.philox = philox_words;
  p.dropout.keep_below = static_cast<uint32_t>(keep * 65536);
  return p;
}

// Counter words and lane of every element, as the contract says it in words.
void test_elements() {
  const int64_t words[2] = {-0x123456789abcdefll, 0x500000007ll};
  const AttnParams p = dropout(words, 0.7);
  const uint64_t seed = static_cast<uint64_t>(words[0]);
  const int batch = 2, head = 1;
  const DropoutMask mask(p, batch, head);
  std::map<std::array<int, 3>, int> used;
  for (int i = 0; i < 64; ++i) {
    for (int j = 0; j < 128; ++j) {
      const uint32_t row = i / 16 * 8 + i % 8, column = j / 32 * 8 + j % 8;
      const Words w = published({row, column, batch * 3 + head, 7}, static_cast<uint32_t>(seed),
                                static_cast<uint32_t>(seed >> 32), 7);
      const int lane = 4 * (i % 16 / 8) + j % 32 / 8;
      const uint32_t value = lane % 2 ? w[lane / 2] >> 16 : w[lane / 2] & 0xffff;
      CHECK_EQ(dropout_lane(i, j), lane, i, j);
      CHECK_EQ(mask.keep(i, j), value < p.dropout.keep_below, i, j);
      ++used[{static_cast<int>(row), static_cast<int>(column), lane}];
    }
  }
  CHECK_EQ(used.size(), size_t{64 * 128});  // no two elements share a lane
}

void test_rate() {
  for (double keep : {0.1, 0.5, 0.9, 1.0, 0.0}) {
    const int64_t words[2] = {42, 0};
    const AttnParams p = dropout(words, keep);
    int kept = 0;
    const int rows = 256, columns = 512;
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j < columns; ++j)
        kept += DropoutMask(p, 0, 0).keep(i, j);
    }
    const double rate = kept / double(rows * columns), sigma = 0.0014;
    CHECK(rate > keep - 5 * sigma && rate < keep + 5 * sigma, keep, rate);
    if (keep == 1.0) CHECK_EQ(kept, rows * columns);
    if (keep == 0.0) CHECK_EQ(kept, 0);
  }
}

// Frozen: a change of these is a change of every user's masks.
void test_frozen() {
  const Words expected = {0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48};  // seven rounds of zeros
  for (int w = 0; w < 4; ++w)
    CHECK_EQ(philox(0, 0, 0, 0, 0, 0).word[w], expected[w]);
  const int64_t words[2] = {1234567890123456789ll, 3};
  const AttnParams p = dropout(words, 0.5);
  uint32_t bits = 0;
  for (int j = 0; j < 32; ++j)
    bits |= uint32_t{DropoutMask(p, 1, 2).keep(5, j)} << j;
  CHECK_EQ(bits, 0x8cfca709u);
}

}  // namespace

void test_philox() {
  test_algorithm();
  test_elements();
  test_rate();
  test_frozen();
}
