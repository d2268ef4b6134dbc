// SPDX-License-Identifier: BSD-3-Clause
// Mask against the sentence it implements, element by element, over every small problem: lengths
// 0-8, left padding, all windows, tiles 1-4, both directions.
#include <climits>
#include <vector>

#include "check.h"
#include "core/mask.h"

using namespace flash_attn;

namespace {

AttnParams problem(int q_len, int k_len, int left, int right) {
  AttnParams p;
  p.batch = 1;
  p.heads_q = p.heads_k = 1;
  p.seqlen_q = q_len;
  p.seqlen_k = k_len;
  p.mask.window_left = left;
  p.mask.window_right = right;
  return p;
}

// The rule of the contract, in the plainest words.
bool rule(const SeqInfo& s, int64_t left, int64_t right, int64_t i, int64_t j) {
  const int64_t d = int64_t{s.k_len} - s.q_len;
  if (i < 0 || i >= s.q_len || j < s.k_first || j >= s.k_len) return false;
  return (left < 0 || j >= i + d - left) && (right < 0 || j <= i + d + right);
}

// Tiles along one side: `size` positions, `see(x)` counts visible elements of the other side's
// range. Compares begin/end with the tiles that hold something and full with those that are wholly
// visible.
template <class Visible>
void check_range(const TileRange& r, int block, int tiles, int a, int b, Visible visible) {
  CHECK(r.begin <= r.full_begin && r.full_begin <= r.full_end && r.full_end <= r.end);
  for (int n = 0; n < tiles; ++n) {
    bool any = false, all = true;
    for (int x = n * block; x < (n + 1) * block; ++x) {
      for (int y = a; y < b; ++y) {
        const bool v = visible(x, y);
        any |= v;
        all &= v;
      }
    }
    all &= any;
    CHECK_EQ(n >= r.begin && n < r.end, any, n, block, a, b);
    CHECK_EQ(n >= r.full_begin && n < r.full_end, all, n, block, a, b);
  }
}

void check_problem(const AttnParams& p, const SeqInfo& s) {
  const Mask mask(p.mask, s);
  const int q_len = s.q_len, k_len = s.k_len, left = p.mask.window_left,
            right = p.mask.window_right;
  const auto see = [&](int i, int j) { return rule(s, left, right, i, j); };
  for (int i = 0; i < q_len + 3; ++i) {
    int count = 0;
    for (int j = 0; j < k_len + 3; ++j) {
      CHECK_EQ(mask.visible(i, j), see(i, j), i, j, q_len, k_len, left, right);
      count += see(i, j);
      if (i >= q_len) continue;
      CHECK_EQ(j >= mask.first_key(i) && j < mask.end_key(i), see(i, j), i, j, q_len, k_len);
      if (j >= s.k_first && j < k_len) {
        CHECK_EQ(i >= mask.first_query(j) && i < mask.end_query(j), see(i, j), i, j, q_len, k_len);
      }
    }
    if (i < q_len) CHECK_EQ(mask.end_key(i) - mask.first_key(i), count);
    if (i > 0 && i < q_len) {
      CHECK(mask.first_key(i) >= mask.first_key(i - 1) && mask.end_key(i) >= mask.end_key(i - 1));
    }
  }
  for (int j = s.k_first + 1; j < k_len; ++j) {
    CHECK(mask.first_query(j) >= mask.first_query(j - 1));
    CHECK(mask.end_query(j) >= mask.end_query(j - 1));
    CHECK(mask.first_query(j) <= mask.end_query(j));
  }
  for (int block = 1; block <= 4; ++block) {
    for (int other = 1; other <= 4; ++other) {
      for (int begin = 0; begin < q_len + 2; begin += other) {
        const int end = begin + other;
        check_range(mask.kv_tiles(begin, end, block), block, k_len / block + 2, begin,
                    end < q_len ? end : q_len, [&](int j, int i) { return see(i, j); });
      }
      for (int begin = 0; begin < k_len + 2; begin += other) {
        check_range(mask.q_tiles(begin, begin + other, block), block, q_len / block + 2, begin,
                    begin + other, see);
      }
      for (int i = 0; i < q_len; i += block) {
        for (int j = s.k_first; j < k_len; j += other) {
          const int i_end = i + block < q_len ? i + block : q_len;
          const int j_end = j + other < k_len ? j + other : k_len;
          int seen = 0;
          for (int r = i; r < i_end; ++r)
            for (int c = j; c < j_end; ++c)
              seen += see(r, c);
          CHECK_EQ(mask.sees_some(i, i_end, j, j_end), seen > 0);
          CHECK_EQ(mask.sees_all(i, i_end, j, j_end), seen == (i_end - i) * (j_end - j));
        }
      }
    }
  }
}

void test_small() {
  for (int q_len = 0; q_len <= 8; ++q_len) {
    for (int k_len = 0; k_len <= 8; ++k_len) {
      for (int left = -1; left <= 9; ++left) {
        for (int right = -1; right <= 9; ++right) {
          const AttnParams p = problem(q_len, k_len, left, right);
          SeqInfo s(p, 0);
          for (int first = 0; first <= k_len; first += 1 + first) {
            s.k_first = first;
            check_problem(p, s);
          }
        }
      }
    }
  }
}

// Windows and lengths at the edge of an int.
void test_huge() {
  const int lengths[] = {0, 1, 5, INT_MAX - 1, INT_MAX};
  const int windows[] = {-1, 0, 1, 6, INT_MAX - 7, INT_MAX};
  for (int q_len : lengths) {
    for (int k_len : lengths) {
      for (int left : windows) {
        for (int right : windows) {
          const AttnParams p = problem(q_len, k_len, left, right);
          const SeqInfo s(p, 0);
          const Mask mask(p.mask, s);
          for (int i : {0, 1, q_len - 2, q_len - 1}) {
            if (i < 0 || i >= q_len) continue;
            const int first = mask.first_key(i), end = mask.end_key(i);
            CHECK(0 <= first && first <= end && end <= k_len, q_len, k_len, left, right, i);
            for (int j : {0, 1, first - 1, first, end - 1, end, k_len - 1}) {
              if (j < 0 || j >= k_len) continue;
              const bool v = rule(s, left, right, i, j);
              CHECK_EQ(mask.visible(i, j), v, q_len, k_len, left, right, i, j);
              CHECK_EQ(j >= first && j < end, v, q_len, k_len, left, right, i, j);
              CHECK_EQ(i >= mask.first_query(j) && i < mask.end_query(j), v, q_len, k_len, i, j);
            }
          }
          for (int block : {1, 64, INT_MAX}) {
            const TileRange r = mask.kv_tiles(q_len - 1 > 0 ? q_len - 1 : 0, q_len, block);
            CHECK(0 <= r.begin && r.begin <= r.full_begin && r.full_end <= r.end);
            const TileRange t = mask.q_tiles(k_len - 1 > 0 ? k_len - 1 : 0, k_len, block);
            CHECK(0 <= t.begin && t.begin <= t.full_begin && t.full_end <= t.end);
          }
        }
      }
    }
  }
}

// Pictures of the contract: causal for 2 x 5 and 5 x 2, and the window (0, 0).
void test_pictures() {
  const auto row = [](int q_len, int k_len, int left, int right, int i) {
    const AttnParams p = problem(q_len, k_len, left, right);
    const SeqInfo s(p, 0);
    const Mask mask(p.mask, s);
    std::string line;
    for (int j = 0; j < k_len; ++j)
      line += mask.visible(i, j) ? '1' : '0';
    return line;
  };
  CHECK_EQ(row(2, 5, -1, 0, 0), "11110");
  CHECK_EQ(row(2, 5, -1, 0, 1), "11111");
  CHECK_EQ(row(5, 2, -1, 0, 2), "00");
  CHECK_EQ(row(5, 2, -1, 0, 3), "10");
  CHECK_EQ(row(5, 2, -1, 0, 4), "11");
  CHECK_EQ(row(3, 4, 0, 0, 0), "0100");
}

void test_block_visible() {
  const std::vector<int32_t> count = {2, 0, 9, 1}, index = {0, 2, -1, -1, 1, 2, 2, -1};
  MaskSpec spec;
  CHECK(block_visible(spec, 0, 0, 5, 5));  // no list hides nothing
  spec.block_q = 2;
  spec.block_k = 3;
  spec.blocks = {count.data(), index.data(), 0, 2, 0, 4, 2, 2};  // heads differ, batches share
  const auto visible = [&](int head, int i, int j) { return block_visible(spec, 5, head, i, j); };
  for (int j = 0; j < 9; ++j) {
    CHECK_EQ(visible(0, 1, j), j / 3 == 0 || j / 3 == 2, j);
    CHECK_EQ(visible(0, 2, j), false, j);                     // count 0
    CHECK_EQ(visible(1, 0, j), j / 3 == 1 || j / 3 == 2, j);  // a count past the width is cut to it
    CHECK_EQ(visible(1, 3, j), j / 3 == 2, j);
    CHECK_EQ(visible(1, 4, j), false, j);  // past the list's rows
  }
}

// Bit tiles: a block with one is cut by it, inside and past a word; a tile that does not exist
// hides nothing.
void test_block_bits() {
  const std::vector<int32_t> count = {3, 2}, index = {0, 1, 2, 0, 2, -1},
                             tiles = {1, -1, 0, 7, 1, -1};
  MaskSpec spec;
  spec.block_q = 3;
  spec.block_k = 40;  // two words
  spec.blocks = {count.data(), index.data(), 0, 0, 0, 0, 2, 3, tiles.data()};
  std::vector<uint32_t> bits(2 * 3 * 2);
  const auto bit = [](int tile, int i, int j) { return (tile * 5 + i * 7 + j * 3) % 4 < 2; };
  for (int tile = 0; tile < 2; ++tile) {
    for (int i = 0; i < 3; ++i) {
      for (int j = 0; j < 40; ++j)
        bits[(tile * 3 + i) * 2 + j / 32] |= uint32_t{bit(tile, i, j)} << (j % 32);
    }
  }
  spec.block_bits = bits.data();
  spec.bit_tiles = 2;
  for (int i = 0; i < 6; ++i) {
    for (int j = 0; j < 120; ++j) {
      const int row = i / 3, column = j / 40;
      bool expected = true;
      if (row == 0 && column == 0) expected = bit(1, i % 3, j % 40);
      if (row == 0 && column == 2) expected = bit(0, i % 3, j % 40);
      if (row == 1 && column == 1) expected = false;
      if (row == 1 && column == 2) expected = bit(1, i % 3, j % 40);
      CHECK_EQ(block_visible(spec, 0, 0, i, j), expected, i, j);
    }
  }
}

}  // namespace

void test_mask() {
  test_small();
  test_huge();
  test_pictures();
  test_block_visible();
  test_block_bits();
}
