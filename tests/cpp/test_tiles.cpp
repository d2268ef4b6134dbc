// SPDX-License-Identifier: BSD-3-Clause
// KvTiles and QTiles against brute force: every tile with a visible element exactly once over all
// splits, no other, `full` exactly where the whole tile is visible. Dense, windowed and block
// lists, the latter with entries that are -1, past the end or wholly hidden. Tiles of a block with
// a bit tile carry its number and are never full.
#include <algorithm>
#include <random>
#include <vector>

#include "check.h"
#include "core/tiles.h"

using namespace flash_attn;

namespace {

struct Problem {
  AttnParams p;
  std::vector<int32_t> count, index, count_t, index_t;
};

// Tells what a walk gave: the tiles in order, each with its full flag.
struct Walked {
  std::vector<int> tiles;
  std::vector<bool> full;
};

Walked walk_kv(
    const AttnParams& p, const SeqInfo& s, int head, int begin, int end, int block, int splits) {
  Walked walked;
  for (int split = splits - 1; split >= 0; --split) {  // so that the union counts down as well
    KvTiles tiles(p, s, 0, head, begin, end, block, split, splits);
    for (KvTile t; tiles.next(t);) {
      walked.tiles.push_back(t.n);
      walked.full.push_back(t.full);
    }
  }
  return walked;
}

Walked walk_q(const AttnParams& p, const SeqInfo& s, int head, int begin, int end, int block) {
  Walked walked;
  QTiles tiles(p, s, 0, head, begin, end, block);
  for (QTile t; tiles.next(t);) {
    walked.tiles.push_back(t.m);
    walked.full.push_back(t.full);
  }
  return walked;
}

// `visible(x, y)`: x along the walk, y over the fixed side [a, b). Elements the block list hides
// make a tile invisible as a whole, since a tile lies inside one block.
template <class Visible>
void check_walk(const Walked& w, int block, int tiles, int a, int b, Visible visible) {
  CHECK(std::is_sorted(w.tiles.rbegin(), w.tiles.rend()));
  CHECK(std::adjacent_find(w.tiles.begin(), w.tiles.end()) == w.tiles.end());
  for (int n = 0; n < tiles; ++n) {
    bool any = false, all = true;
    for (int x = n * block; x < (n + 1) * block; ++x) {
      for (int y = a; y < b; ++y) {
        const bool v = visible(x, y);
        any |= v;
        all &= v;
      }
    }
    const auto found = std::find(w.tiles.begin(), w.tiles.end(), n);
    CHECK_EQ(found != w.tiles.end(), any, n, block, a, b);
    if (found != w.tiles.end()) CHECK_EQ(w.full[found - w.tiles.begin()], all, n, block, a, b);
  }
  for (int n : w.tiles)
    CHECK(n >= 0 && n < tiles, n, tiles);
}

void check_problem(const AttnParams& p, const SeqInfo& s, int head, int block_m, int block_n) {
  const Mask mask(p.mask, s);
  const auto see = [&](int i, int j) {
    return mask.visible(i, j) && block_visible(p.mask, 0, head, i, j);
  };
  for (int begin = 0; begin < s.q_len; begin += block_m) {
    const int end = std::min(begin + block_m, s.q_len);
    for (int splits : {1, 2, 3, 7}) {
      check_walk(walk_kv(p, s, head, begin, end, block_n, splits), block_n, s.k_len / block_n + 2,
                 begin, end, [&](int j, int i) { return see(i, j); });
    }
  }
  if (p.mask.blocks.index != nullptr && p.mask.blocks_t.index == nullptr) return;
  for (int begin = 0; begin < s.k_len; begin += block_n) {
    check_walk(walk_q(p, s, head, begin, begin + block_n, block_m), block_m, s.q_len / block_m + 2,
               begin, begin + block_n, see);
  }
}

void test_dense() {
  for (int q_len : {0, 1, 2, 5, 8}) {
    for (int k_len = 0; k_len <= 9; ++k_len) {
      for (int left : {-1, 0, 1, 3, 20}) {
        for (int right : {-1, 0, 2, 20}) {
          AttnParams p;
          p.seqlen_q = q_len;
          p.seqlen_k = k_len;
          p.heads_q = p.heads_k = 1;
          p.mask.window_left = left;
          p.mask.window_right = right;
          SeqInfo s(p, 0);
          for (int first : {0, 1, 4}) {
            s.k_first = std::min(first, k_len);
            for (int block_m : {1, 2, 3}) {
              for (int block_n : {1, 2, 4})
                check_problem(p, s, 0, block_m, block_n);
            }
          }
        }
      }
    }
  }
}

// Fills `list` from a bool matrix (heads, lines, columns), with rubbish behind and between the
// entries.
BlockList make_list(const std::vector<bool>& seen,
                    int heads,
                    int lines,
                    int columns,
                    bool transposed,
                    std::mt19937& random,
                    std::vector<int32_t>* count,
                    std::vector<int32_t>* index) {
  const int rows = transposed ? columns : lines, entries = transposed ? lines : columns;
  const int width = entries + 3;
  count->assign(heads * rows, 0);
  index->assign(heads * rows * width, -7);
  for (int h = 0; h < heads; ++h) {
    for (int r = 0; r < rows; ++r) {
      int32_t* line = index->data() + (h * rows + r) * width;
      int n = 0;
      if (random() % 2) line[n++] = -1;
      for (int e = 0; e < entries; ++e) {
        const int at = transposed ? (h * lines + e) * columns + r : (h * lines + r) * columns + e;
        if (seen[at]) line[n++] = e;
      }
      if (random() % 2) line[n++] = entries + 5;  // past every sequence
      if (random() % 2) line[n++] = 0x7fffffff;   // far out of range
      (*count)[h * rows + r] = n;
    }
  }
  BlockList list;
  list.count = count->data();
  list.index = index->data();
  list.count_head = heads > 1 ? rows : 0;
  list.index_head = heads > 1 ? int64_t{rows} * width : 0;
  list.rows = rows;
  list.width = width;
  return list;
}

void test_blocks() {
  std::mt19937 random(1);
  const int windows[][2] = {{-1, -1}, {-1, 0}, {2, 0}, {0, 0}, {3, 2}, {-1, 1}};
  for (int repeat = 0; repeat < 600; ++repeat) {
    const int heads = 1 + random() % 2, ratio_m = 1 + random() % 3, ratio_n = 1 + random() % 3;
    const int block_m = 1 + random() % 3, block_n = 1 + random() % 4;
    Problem x;
    AttnParams& p = x.p;
    p.heads_q = 2;
    p.heads_k = 1;
    p.seqlen_q = random() % 14;
    p.seqlen_k = random() % 14;
    p.mask.block_q = block_m * ratio_m;
    p.mask.block_k = block_n * ratio_n;
    const int lines = ceil_div(p.seqlen_q, p.mask.block_q);
    const int columns = ceil_div(p.seqlen_k, p.mask.block_k);
    std::vector<bool> seen(heads * lines * columns);
    for (size_t e = 0; e < seen.size(); ++e)
      seen[e] = random() % 3 != 0;
    p.mask.blocks = make_list(seen, heads, lines, columns, false, random, &x.count, &x.index);
    p.mask.blocks_t = make_list(seen, heads, lines, columns, true, random, &x.count_t, &x.index_t);
    for (const auto& window : windows) {
      p.mask.window_left = window[0];
      p.mask.window_right = window[1];
      SeqInfo s(p, 0);
      // A shorter sequence of the same batch: blocks past its end are ignored.
      for (int cut : {0, 1, 5}) {
        s.q_len = std::max(0, p.seqlen_q - cut);
        s.k_len = std::max(0, p.seqlen_k - cut);
        s.k_first = std::min<int>(random() % 3, s.k_len);
        for (int head : {0, 1})
          check_problem(p, s, head, block_m, block_n);
      }
    }
  }
}

// Every other listed block has a bit tile, of a number that says which block it is, in the list and
// in its transpose.
void test_bits() {
  std::mt19937 random(2);
  const auto bits_of = [](int a, int b) { return (a + b) % 2 == 0 ? a * 10 + b : -1; };
  for (int repeat = 0; repeat < 200; ++repeat) {
    const int ratio_m = 1 + random() % 3, ratio_n = 1 + random() % 3, lines = 4, columns = 5;
    AttnParams p;
    p.heads_q = p.heads_k = 1;
    p.mask.block_q = 2 * ratio_m;
    p.mask.block_k = 3 * ratio_n;
    p.seqlen_q = p.mask.block_q * lines - random() % 2;
    p.seqlen_k = p.mask.block_k * columns - random() % 3;
    p.mask.window_right = random() % 2 ? kUnlimited : 0;
    std::vector<bool> seen(lines * columns);
    for (size_t e = 0; e < seen.size(); ++e)
      seen[e] = random() % 3 != 0;
    std::vector<int32_t> count, index, count_t, index_t;
    p.mask.blocks = make_list(seen, 1, lines, columns, false, random, &count, &index);
    p.mask.blocks_t = make_list(seen, 1, lines, columns, true, random, &count_t, &index_t);
    const auto fill = [&](const std::vector<int32_t>& list, int width, bool transposed) {
      std::vector<int32_t> bits(list.size(), -1);
      for (size_t e = 0; e < list.size(); ++e) {
        const int line = static_cast<int>(e) / width;
        if (list[e] >= 0 && list[e] < 100)
          bits[e] = transposed ? bits_of(list[e], line) : bits_of(line, list[e]);
      }
      return bits;
    };
    const std::vector<int32_t> bits = fill(index, p.mask.blocks.width, false);
    const std::vector<int32_t> bits_t = fill(index_t, p.mask.blocks_t.width, true);
    const SeqInfo s(p, 0);
    // Ours with the bits against the same walk without them: the tiles are the same.
    for (int begin = 0; begin < p.seqlen_q; begin += 2) {
      p.mask.blocks.bits = nullptr;
      KvTiles plain(p, s, 0, 0, begin, begin + 2, 3);
      p.mask.blocks.bits = bits.data();
      KvTiles walk(p, s, 0, 0, begin, begin + 2, 3);
      for (KvTile t{}, u{}; plain.next(t);) {
        CHECK(walk.next(u) && u.n == t.n && t.bits == -1);
        CHECK_EQ(u.bits, bits_of(begin / p.mask.block_q, u.n / ratio_n));
        CHECK_EQ(u.full, t.full && u.bits < 0);
      }
    }
    for (int begin = 0; begin < p.seqlen_k; begin += 3) {
      p.mask.blocks_t.bits = nullptr;
      QTiles plain(p, s, 0, 0, begin, begin + 3, 2);
      p.mask.blocks_t.bits = bits_t.data();
      QTiles walk(p, s, 0, 0, begin, begin + 3, 2);
      for (QTile t{}, u{}; plain.next(t);) {
        CHECK(walk.next(u) && u.m == t.m && t.bits == -1);
        CHECK_EQ(u.bits, bits_of(u.m / ratio_m, begin / p.mask.block_k));
        CHECK_EQ(u.full, t.full && u.bits < 0);
      }
    }
  }
}

// The slices of a split are within one tile of each other.
void test_balance() {
  AttnParams p;
  p.seqlen_q = 1;
  p.heads_q = p.heads_k = 1;
  for (int tiles = 0; tiles <= 20; ++tiles) {
    p.seqlen_k = tiles;
    const SeqInfo s(p, 0);
    for (int splits = 1; splits <= 8; ++splits) {
      int least = 100, most = 0;
      for (int split = 0; split < splits; ++split) {
        KvTiles walk(p, s, 0, 0, 0, 1, 1, split, splits);
        int n = 0;
        for (KvTile t; walk.next(t);)
          ++n;
        least = std::min(least, n);
        most = std::max(most, n);
      }
      CHECK(most - least <= 1, tiles, splits);
    }
  }
}

}  // namespace

void test_tiles() {
  test_dense();
  test_blocks();
  test_bits();
  test_balance();
}
