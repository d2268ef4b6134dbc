// SPDX-License-Identifier: BSD-3-Clause
// The walk over tiles, one for dense, windowed, split and block-sparse problems: the tiles that
// hold something visible, from the last to the first, each said to be full or not.
//
//   KvTiles   the key tiles of some query rows (forward; any pass that keeps its queries)
//   QTiles    the query tiles of some keys (backward)
//
// Without a block list the walk is a range. With one it goes through the list's line; a block of
// the list is a whole number of tiles, and the fixed side lies within one line of blocks. Entries
// that are -1, out of range, past the sequence's end or wholly hidden by the window are passed
// over. A listed tile is full only where the window and the lengths hide nothing of it. An entry
// that stands twice is walked twice: lists hold each block once.
#pragma once

#include "core/mask.h"
#include "core/params.h"
#include "core/seqlen.h"

namespace flash_attn {

struct KvTile {
  int n;  // keys n * block_n …
  bool full;
  int bits;  // bit tile of the block it lies in (block_bit, core/mask.h), -1: none
};
struct QTile {
  int m;  // queries m * block_m …
  bool full;
  int bits;
};

// The largest divisor of a mask's `block` that is at most `tile`: a block is whole tiles. 0: no
// mask.
FA_HD int tile_within(int block, int tile) {
  if (block <= 0) return tile;
  int size = min_of(block, tile);
  while (block % size != 0) {
    --size;
  }
  return size;
}

// A few registers, depending on nothing but the problem and the fixed side: two warps that each own
// one walk in step.
class TileWalk {
 public:
  // `range`: what the mask leaves. `ratio`: tiles in a block of the list. The slice `split` of
  // `num_splits` is contiguous, and the slices together are the whole walk.
  FA_HD TileWalk(const TileRange& range, int split, int num_splits) : range_(range) {
    slice(range.begin, range.end - range.begin, split, num_splits);
  }
  FA_HD TileWalk(
      const TileRange& range, const BlockLine& line, int ratio, int split, int num_splits)
      : range_(range), index_(line.index), bits_(line.bits), ratio_(ratio) {
    const int count = range.begin == range.end ? 0 : min_of(line.count, kMaxTiles / ratio);
    slice(0, count * ratio, split, num_splits);
  }

  FA_HD bool next(int& tile, bool& full, int& bits) {
    while (position_ > stop_) {
      --position_;
      int64_t found = position_;
      bits = -1;
      if (index_ != nullptr) {
        const int entry = quotient(position_, ratio_);
        found = int64_t{index_[entry]} * ratio_ + (position_ - entry * ratio_);
        if (found < range_.begin || found >= range_.end) continue;
        if (bits_ != nullptr) bits = bits_[entry];
      }
      tile = static_cast<int>(found);
      full = bits < 0 && tile >= range_.full_begin && tile < range_.full_end;
      return true;
    }
    return false;
  }

  // Tiles from here on are full and follow each other down to this one: of a range, not of a list.
  FA_HD int full_down_to() const {
    return index_ != nullptr ? kMaxTiles : max_of(range_.full_begin, stop_);
  }

  // All that next() changes: a walk may be kept elsewhere and taken up again.
  FA_HD int position() const { return position_; }
  FA_HD void resume(int position) { position_ = position; }

 private:
  static constexpr int kMaxTiles = 0x7fffffff;

  FA_HD void slice(int begin, int count, int split, int num_splits) {
    const int each = quotient(count, num_splits);
    const int more = count - each * num_splits;
    stop_ = begin + split * each + min_of(split, more);
    position_ = stop_ + each + (split < more ? 1 : 0);
  }

  TileRange range_;
  int position_ = 0, stop_ = 0;     // positions [stop_, position_) are still to come
  const int32_t* index_ = nullptr;  // null: a position is a tile
  const int32_t* bits_ = nullptr;   // null: no bit tiles
  int ratio_ = 1;
};

struct KvTiles {
  // Rows [row_begin, row_end) are query positions; with a block list they lie in one block row and
  // block_n divides block_k.
  FA_HD KvTiles(const AttnParams& p,
                const SeqInfo& seq,
                int batch,
                int head,
                int row_begin,
                int row_end,
                int block_n,
                int split = 0,
                int num_splits = 1)
      : walk(make(p,
                  Mask(p.mask, seq).kv_tiles(row_begin, row_end, block_n),
                  batch,
                  head,
                  row_begin,
                  block_n,
                  split,
                  num_splits)) {}

  FA_HD bool next(KvTile& t) { return walk.next(t.n, t.full, t.bits); }

  TileWalk walk;

 private:
  FA_HD static TileWalk make(const AttnParams& p,
                             const TileRange& range,
                             int batch,
                             int head,
                             int row_begin,
                             int block_n,
                             int split,
                             int num_splits) {
    if (p.mask.blocks.index == nullptr) return TileWalk(range, split, num_splits);
    const BlockLine line = block_line(p.mask.blocks, batch, head, row_begin / p.mask.block_q);
    return TileWalk(range, line, p.mask.block_k / block_n, split, num_splits);
  }
};

struct QTiles {
  // Keys [key_begin, key_end) lie, with a block list, in one block column; block_m divides block_q.
  FA_HD QTiles(const AttnParams& p,
               const SeqInfo& seq,
               int batch,
               int head,
               int key_begin,
               int key_end,
               int block_m,
               int split = 0,
               int num_splits = 1)
      : walk(make(p,
                  Mask(p.mask, seq).q_tiles(key_begin, key_end, block_m),
                  batch,
                  head,
                  key_begin,
                  block_m,
                  split,
                  num_splits)) {}

  FA_HD bool next(QTile& t) { return walk.next(t.m, t.full, t.bits); }

  TileWalk walk;

 private:
  FA_HD static TileWalk make(const AttnParams& p,
                             const TileRange& range,
                             int batch,
                             int head,
                             int key_begin,
                             int block_m,
                             int split,
                             int num_splits) {
    if (p.mask.blocks_t.index == nullptr) return TileWalk(range, split, num_splits);
    const BlockLine line = block_line(p.mask.blocks_t, batch, head, key_begin / p.mask.block_k);
    return TileWalk(range, line, p.mask.block_q / block_m, split, num_splits);
  }
};

}  // namespace flash_attn
