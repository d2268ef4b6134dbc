// SPDX-License-Identifier: BSD-3-Clause
// Packed rows: a bijection with ascending positions. Pages: every slot to its row, by hand
// arithmetic, with missing and wrong pages and offsets past 2^32. Divisors: the quotient.
#include <random>
#include <vector>

#include "check.h"
#include "core/divisor.h"
#include "core/pages.h"
#include "core/rows.h"

using namespace flash_attn;

namespace {

void test_packed_rows() {
  for (int group = 1; group <= 5; ++group) {
    for (int head_k = 0; head_k < 3; ++head_k) {
      const PackedRows rows(group, head_k);
      const int q_len = 7;
      CHECK_EQ(rows.rows(q_len), int64_t{7} * group);
      std::vector<int> hits(q_len * group, 0);
      for (int64_t r = 0; r < rows.rows(q_len); ++r) {
        const int i = rows.position(r), h = rows.head(r);
        CHECK(i >= 0 && i < q_len && h >= head_k * group && h < (head_k + 1) * group, r, i, h);
        CHECK_EQ(rows.row(i, h), r);
        CHECK(r == 0 || rows.position(r - 1) <= i);
        ++hits[i * group + h - head_k * group];
      }
      for (int n : hits)
        CHECK_EQ(n, 1);
      for (int64_t end = 1; end <= rows.rows(q_len); ++end) {
        CHECK_EQ(rows.position_end(end), rows.position(end - 1) + 1);
      }
    }
  }
  const PackedRows many(64, 0);
  CHECK_EQ(many.rows(0x7fffffff), int64_t{64} * 0x7fffffff);
}

void test_page_rows() {
  for (int page_size = 1; page_size <= 5; ++page_size) {
    AttnParams p;
    p.batch = 2;
    p.heads_q = p.heads_k = 2;
    p.seqlen_q = 1;
    p.seqlen_k = 4 * page_size;
    // Stride 5: the table is a slice of something wider. Page 9 does not exist, -1 is none.
    const std::vector<int32_t> table = {3, 0, -1, 9, 77, 5, 5, 2, -2, 77};
    p.pages = {table.data(), 5, page_size, 4, 6};
    const TensorRef t = {nullptr, 1000, 20, 8};
    for (int batch = 0; batch < 2; ++batch) {
      const SeqInfo s(p, batch);
      CHECK_EQ(s.k_len, 4 * page_size);
      for (int j = 0; j < 5 * page_size; ++j) {
        const int column = j / page_size;
        const int page = column < 4 ? table[batch * 5 + column] : -1;
        const bool exists = page >= 0 && page < 6;
        CHECK_EQ(page_of(p.pages, batch, j), exists ? page : kNoRow, j, batch);
        CHECK_EQ(key_offset(p, s, t, batch, j, 1),
                 exists ? page * 1000 + j % page_size * 20 + 8 : kNoRow, j, batch);
        for (int end = j + 1; end < 5 * page_size; ++end) {
          const int piece = contiguous_end(p, j, end);
          CHECK(piece > j && piece <= end && (piece - 1) / page_size == j / page_size, j, end,
                piece);
          CHECK(piece == end || piece % page_size == 0, j, end, piece);
        }
      }
    }
  }
}

void test_large_offsets() {
  AttnParams p;
  p.batch = 1;
  p.heads_q = p.heads_k = 1;
  p.seqlen_k = 1 << 20;
  const int32_t table[] = {0, 3000000};
  p.pages = {table, 2, 256, 2, 4000000};
  const SeqInfo s(p, 0);
  CHECK_EQ(key_offset(p, s, {nullptr, 256 * 1024, 1024, 128}, 0, 300, 0),
           int64_t{3000000} * 256 * 1024 + 44 * 1024);
  p.pages = {};
  CHECK_EQ(key_offset(p, SeqInfo(p, 0), {nullptr, 0, 1 << 20, 1}, 0, 1 << 19, 0), int64_t{1} << 39);
  CHECK_EQ(contiguous_end(p, 5, 1000), 1000);
}

void test_divisor() {
  constexpr unsigned kEnd = 0x7fffffffu;
  std::mt19937 random(5);
  for (int repeat = 0; repeat < 2000; ++repeat) {
    const int d = repeat < 1000 ? repeat + 1 : static_cast<int>(random() >> (2 + repeat % 29)) + 1;
    const Divisor by(d);
    const unsigned u = static_cast<unsigned>(d), last = kEnd / u * u;
    for (const unsigned x :
         {0u, u - 1, u, last - 1, last, kEnd, static_cast<unsigned>(random() >> 1)})
      CHECK_EQ(by(x), x / u, x, d);
  }
  CHECK_EQ(Divisor()(kEnd), kEnd);
}

}  // namespace

void test_rows_pages() {
  test_divisor();
  test_packed_rows();
  test_page_rows();
  test_large_offsets();
}
