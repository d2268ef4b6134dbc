// SPDX-License-Identifier: BSD-3-Clause
// Which keys a query sees. The only definition of causal, windows and left padding in the
// repository:
//
//   query i sees key j  iff  i + d - window_left <= j <= i + d + window_right,  d = k_len - q_len,
//   0 <= i < q_len and k_first <= j < k_len          (a negative window side is no limit; causal:
//   0)
//
// Without a block list, the keys of a row form one interval whose two ends never move left as i
// grows; everything below follows from that. Block lists are a further AND (block_visible).
#pragma once

#include "core/params.h"
#include "core/seqlen.h"

namespace flash_attn {

// Tiles [begin, end) hold a visible element, those in [full_begin, full_end) nothing but visible
// ones. begin <= full_begin <= full_end <= end; no tiles at all is begin == end.
struct TileRange {
  int begin = 0, full_begin = 0, full_end = 0, end = 0;
};

struct Mask {
  int q_len, k_len, k_first;
  int low, high;  // visible: low <= j - i < high. Unlimited sides are cut to what j - i can reach

  FA_HD Mask(const MaskSpec& spec, const SeqInfo& seq)
      : q_len(seq.q_len), k_len(seq.k_len), k_first(seq.k_first), low(-seq.q_len), high(seq.k_len) {
    const int64_t d = int64_t{k_len} - q_len;
    if (spec.window_left >= 0)
      low = static_cast<int>(max_of(d - spec.window_left, int64_t{-q_len}));
    if (spec.window_right >= 0) {
      high = static_cast<int>(min_of(d + spec.window_right + 1, int64_t{k_len}));
    }
  }

  // Valid for any i and j >= 0, those past the ends included.
  FA_HD bool visible(int i, int j) const {
    return i < q_len && j >= k_first && j < k_len && j - i >= low && j - i < high;
  }

  // Whether queries [i, i_end) see something of keys [j, j_end), and whether they see it all. None
  // of them lies past an end or before k_first, and both ranges have one at least.
  FA_HD bool sees_some(int i, int i_end, int j, int j_end) const {
    return j_end - 1 - i >= low && j - (i_end - 1) < high;
  }
  FA_HD bool sees_all(int i, int i_end, int j, int j_end) const {
    return j - (i_end - 1) >= low && j_end - 1 - i < high;
  }

  // The keys that row i sees: [first_key, end_key), both in [k_first, k_len] and first <= end.
  FA_HD int first_key(int i) const { return clip_key(int64_t{i} + low); }
  FA_HD int end_key(int i) const { return clip_key(int64_t{i} + high); }

  // The queries that see the live key j: [first_query, end_query), both in [0, q_len], first <=
  // end.
  FA_HD int first_query(int j) const { return clip_query(int64_t{j} - high + 1); }
  FA_HD int end_query(int j) const { return clip_query(int64_t{j} - low + 1); }

  // Tiles of block_n keys (tile n covers keys n * block_n …) for the rows [row_begin, row_end).
  // Rows past q_len do not count, keys past k_len (or before k_first) are hidden: a tile with one
  // of them is not full.
  FA_HD TileRange kv_tiles(int row_begin, int row_end, int block_n) const {
    const int last = min_of(row_end, q_len) - 1;
    if (row_begin > last) return {};
    return tiles(first_key(row_begin), first_key(last), end_key(row_begin), end_key(last), block_n);
  }

  // Tiles of block_m queries for the keys [key_begin, key_end). A tile is full when all its queries
  // exist and see all of these keys, so never when the keys reach past the live ones.
  FA_HD TileRange q_tiles(int key_begin, int key_end, int block_m) const {
    const int first = max_of(key_begin, k_first);
    const int last = min_of(key_end, k_len) - 1;
    if (first > last) return {};
    TileRange range =
        tiles(first_query(first), first_query(last), end_query(first), end_query(last), block_m);
    if (key_begin < k_first || key_end > k_len) range.full_begin = range.full_end = range.begin;
    return range;
  }

 private:
  FA_HD int clip_key(int64_t j) const {
    return static_cast<int>(clamp_to(j, int64_t{k_first}, int64_t{k_len}));
  }
  FA_HD int clip_query(int64_t i) const {
    return static_cast<int>(clamp_to(i, int64_t{0}, int64_t{q_len}));
  }

  // The intervals of consecutive lines run from [first_a, end_a) to [first_b, end_b): their union
  // is [first_a, end_b), since neighbours touch, and what they have in common [first_b, end_a).
  FA_HD static TileRange tiles(int first_a, int first_b, int end_a, int end_b, int block) {
    if (first_a >= end_b) return {};
    TileRange range;
    range.begin = quotient(first_a, block);
    range.end = quotient(end_b - 1, block) + 1;
    const int before = quotient(first_b, block), full_begin = before + (before * block != first_b);
    range.full_begin = clamp_to(full_begin, range.begin, range.end);
    range.full_end = clamp_to(quotient(end_a, block), range.full_begin, range.end);
    return range;
  }
};

// One line of a block list: `count` block numbers at `index`. No blocks where the list has no such
// line.
struct BlockLine {
  const int32_t* index = nullptr;
  int count = 0;
  const int32_t* bits = nullptr;  // null: every block is wholly visible
};

FA_HD BlockLine block_line(const BlockList& list, int batch, int head, int line) {
  if (line < 0 || line >= list.rows) return {};
  const int64_t counts = batch * list.count_batch + head * list.count_head;
  const int64_t indices = batch * list.index_batch + head * list.index_head;
  const int64_t first = indices + int64_t{line} * list.width;
  return {list.index + first, clamp_to(int{list.count[counts + line]}, 0, list.width),
          list.bits == nullptr ? nullptr : list.bits + first};
}

// Bit tile `tile` of a partly visible block: whether query i sees key j, both of the whole problem.
// A tile that does not exist (-1 above all) hides nothing.
FA_HD bool block_bit(const MaskSpec& spec, int tile, int i, int j) {
  if (tile < 0 || tile >= spec.bit_tiles) return true;
  const int words = ceil_div(spec.block_k, 32), key = j % spec.block_k;
  const int64_t row = int64_t{tile} * spec.block_q + i % spec.block_q;
  return spec.block_bits[row * words + key / 32] >> (key % 32) & 1u;
}

// Whether the block mask lets query i see key j: one element, by a walk over its line. The kernels
// use the lists through core/tiles.h instead.
FA_HD bool block_visible(const MaskSpec& spec, int batch, int head, int i, int j) {
  if (spec.blocks.index == nullptr) return true;
  const BlockLine line = block_line(spec.blocks, batch, head, i / spec.block_q);
  for (int entry = 0; entry < line.count; ++entry) {
    if (line.index[entry] == j / spec.block_k) {
      return line.bits == nullptr || block_bit(spec, line.bits[entry], i, j);
    }
  }
  return false;
}

}  // namespace flash_attn
