// SPDX-License-Identifier: BSD-3-Clause
// What a block of the backward kernel knows of its problem, and the walk through the query heads
// that read its keys and their query tiles.
#pragma once

#include "core/divisor.h"
#include "core/mask.h"
#include "core/philox.h"
#include "core/tiles.h"
#include "cuda/sm80/backward_tile.h"
#include "cuda/support/backward_prepare.cuh"
#include "cuda/support/backward_ring.cuh"
#include "cuda/tile/load.cuh"

namespace flash_attn::sm80 {

// Numbers of the scores, converted once. `inverse`: 1 / scale where a bias may be what the product
// of K and Q is added to, divided by the scale; else 0.
struct ScoreNumbers {
  float scale = 1, inverse = 0, cap = 0, dropout_scale = 1;

  ScoreNumbers() = default;

  // Not with softcap between the two, nor where the division would leave fp32.
  __host__ explicit ScoreNumbers(const AttnParams& p)
      : scale(static_cast<float>(p.softmax_scale)),
        inverse(0),
        cap(static_cast<float>(p.softcap)),
        dropout_scale(static_cast<float>(p.dropout.scale)) {
    const bool usual = p.softmax_scale > 1e-6 && p.softmax_scale < 1e6;
    if (p.bias.ptr != nullptr && p.softcap == 0 && usual) inverse = 1 / scale;
  }
};

// What the launcher adds to the problem.
struct BackwardGrid {
  // (rows of lse or lines of the ring's places, dq_columns), zero before; null when dq is not
  // wanted here.
  float* dq_accum;
  DqRing ring;
  int dq_columns;           // head_dim, rounded up to 16
  uint32_t slots;           // of the key side (core/slots.h)
  uint32_t sequence_slots;  // of a sequence that is not packed
  Divisor by_slots, by_sequence_slots;
  int block_m, block_n;
  int group;  // query heads that read a key head
  // Whether a head's tiles are a range of Tile::kBlockM queries each: no list, no slices.
  bool even;
  // What the prepare kernel found (support/backward_prepare.cuh), and what stands for lse, in its
  // layout; with the weights to be read if a huge one was found.
  const BackwardFindings* findings;
  const RowWeight* rows;
  // Slices, of the query heads and then of their query tiles, when the keys alone make too few
  // blocks: each writes its sum to (splits, rows of keys, columns), laid out as dq_accum is. A row
  // is (batch, row, head_k).
  int splits, tile_splits;  // of all; of the tiles of one head
  float *dk_partial, *dv_partial;
  ScoreNumbers numbers;
  bool by_lane;  // kGeneral only: how keys lie in their tiles, for the sake of the bias
};

// A tile of the walk: queries [begin, end) of a query head; no more tiles when head is -1. Offsets
// of its first row: elements of q and dout, rows of lse, and lines of dq_accum (read here with the
// rest of the step: a sum made in the loop costs head_dim 128 8 % there).
struct __align__(16) QueryStep {
  int head, begin, end;
  int bits;  // bit tile, or kNoBits or kFull
  // Of the block's keys, those in the parts [parts_begin, parts_end) of a warp each may be seen;
  // the others are not touched.
  int parts_begin, parts_end;
  int64_t q, dout, line, dq_line;

  static constexpr int kNoBits = -1, kFull = -2;
};

// For kQuickSteps: queries that the last tile begins with, and the full ones, as [full_begin,
// full_end).
template <bool kQuickSteps>
struct StepRange {};
template <>
struct StepRange<true> {
  int stop, full_begin, full_end;
};

// What a block knows of its problem, in shared memory since registers are short. The walk is one
// thread's; it runs two tiles ahead.
template <class Element, class Tile>
struct BackwardState : StepRange<Tile::kQuickSteps> {
  QueryStep steps[4];  // of tile t: steps[t % 4]
  SeqInfo seq;
  Mask mask;
  int batch, head_k, key_begin, key_end;
  int split, tile_split;
  bool q_whole, dout_whole;  // rows are aligned (copies_whole_chunks)
  bool huge, poison;         // BackwardFindings
  int head, head_end;        // query heads still to come: [head, head_end)
  int64_t q, dout, line;     // of query 0 of `head`, as in QueryStep
  TileWalk tiles;            // of `head`
  DropoutMask dropout;       // of head 0, if there is any
  int place, turn;           // DqRing: of this group, and groups that had the place before
  int64_t dq_line;           // from a row of lse to its line of the accumulator
  bool last;                 // of the group's blocks; once they have arrived

  __device__ __forceinline__ BackwardState(const AttnParams& p,
                                           const BackwardGrid& grid,
                                           const SeqInfo& s,
                                           int b,
                                           int head_,
                                           int key,
                                           int split_)
      : seq(s),
        mask(p.mask, s),
        batch(b),
        head_k(head_),
        key_begin(key),
        key_end(min(key + grid.block_n, s.k_len)),
        split(split_),
        tile_split(grid.splits == 1 ? 0 : split_ % grid.tile_splits),
        q_whole(copies_whole_chunks<Element>(p.q, p.head_dim)),
        dout_whole(copies_whole_chunks<Element>(p.grad.dout, p.head_dim_v)),
        head(first_head(p, grid, head_, split_, 0)),
        head_end(first_head(p, grid, head_, split_, 1)),
        tiles(begin_head(p, grid)),
        place(0),
        turn(0),
        dq_line(0) {
    if (p.dropout.philox != nullptr) dropout = DropoutMask(p, b, 0);
    const DqRing& ring = grid.ring;
    if (ring.places > 0) {
      const int group = head_k * p.batch + batch;
      turn = group / ring.places;
      place = group - turn * ring.places;
      dq_line = place * ring.lines - seq.lse_offset(p, head_k * grid.group, 0);
    }
  }

  // Everything but the steps, and what was found.
  __device__ __forceinline__ void take(const BackwardState& from, const BackwardFindings& found) {
    seq = from.seq;
    mask = from.mask;
    batch = from.batch, head_k = from.head_k;
    key_begin = from.key_begin, key_end = from.key_end;
    split = from.split, tile_split = from.tile_split;
    q_whole = from.q_whole, dout_whole = from.dout_whole;
    huge = found.huge_lse != 0, poison = found.empty_row_poisoned != 0;
    head = from.head, head_end = from.head_end;
    q = from.q, dout = from.dout, line = from.line;
    tiles = from.tiles;
    StepRange<Tile::kQuickSteps>::operator=(from);
    dropout = from.dropout;
    place = from.place, turn = from.turn, dq_line = from.dq_line;
  }

  // Of the slice of the heads that read a key head, or of the slice after it.
  __device__ __forceinline__ static int first_head(
      const AttnParams& p, const BackwardGrid& grid, int head_k, int split, int after) {
    const int group = grid.group;
    if (grid.splits == 1) return (head_k + after) * group;
    const int slices = grid.splits / grid.tile_splits, slice = split / grid.tile_splits + after;
    return head_k * group + static_cast<int>(int64_t{slice} * group / slices);
  }

  __device__ __forceinline__ TileWalk begin_head(const AttnParams& p, const BackwardGrid& grid) {
    q = seq.q_offset(p.q, 0, head);
    dout = seq.q_offset(p.grad.dout, 0, head);
    line = seq.lse_offset(p, head, 0);
    if ((Tile::kUsual && Tile::kEven) || grid.even) {
      const TileRange range = mask.q_tiles(key_begin, key_end, Tile::kBlockM);
      if constexpr (Tile::kQuickSteps) {
        const bool whole = key_end - key_begin == Tile::kBlockN;
        this->stop = range.begin * Tile::kBlockM;
        this->full_begin = range.full_begin * Tile::kBlockM;
        this->full_end = whole ? range.full_end * Tile::kBlockM : 0;
      }
      return TileWalk(range, 0, 1);
    }
    return any_tiles(p, grid, seq, batch, head, key_begin, key_end, tile_split);
  }

  // Out of line: what a block runs once should be short, since it is fetched for every block.
  __device__ __noinline__ static TileWalk any_tiles(const AttnParams& p,
                                                    const BackwardGrid& grid,
                                                    SeqInfo seq,
                                                    int batch,
                                                    int head,
                                                    int key_begin,
                                                    int key_end,
                                                    int tile_split) {
    return QTiles(p, seq, batch, head, key_begin, key_end, grid.block_m, tile_split,
                  grid.tile_splits)
        .walk;
  }

  // Step t, after step t - 1: mostly the tile below that one.
  __device__ __forceinline__ void quick_step(const AttnParams& p, const BackwardGrid& grid, int t) {
    const QueryStep last = steps[(t - 1) % 4];
    if (last.head < 0) return;
    if (last.begin <= this->stop) {
      tiles.resume(last.begin / Tile::kBlockM);
      advance(p, grid, steps[t % 4]);
      return;
    }
    const int begin = last.begin - Tile::kBlockM, end = last.begin;
    const int first_key = max(begin + mask.low, key_begin) - key_begin;
    const int last_key = min(end - 1 + mask.high, key_end) - 1 - key_begin;
    const bool full = begin >= this->full_begin && begin < this->full_end;
    steps[t % 4] = {last.head,
                    begin,
                    end,
                    full ? QueryStep::kFull : QueryStep::kNoBits,
                    first_key / Tile::kWarpKeys,
                    last_key / Tile::kWarpKeys + 1,
                    last.q - Tile::kBlockM * p.q.row,
                    last.dout - Tile::kBlockM * p.grad.dout.row,
                    last.line - Tile::kBlockM,
                    last.dq_line - Tile::kBlockM};
  }

  __device__ __forceinline__ void advance(const AttnParams& p,
                                          const BackwardGrid& grid,
                                          QueryStep& to) {
    QTile t;
    while (!tiles.next(t.m, t.full, t.bits)) {
      if (++head >= head_end) {
        head = head_end;
        to.head = -1;
        return;
      }
      tiles = begin_head(p, grid);
    }
    const int begin = t.m * grid.block_m, end = min(begin + grid.block_m, seq.q_len);
    const bool full =
        t.full && end - begin == Tile::kBlockM && key_end - key_begin == Tile::kBlockN;
    const int first_key = max(begin + mask.low, key_begin) - key_begin;
    const int last_key = min(end - 1 + mask.high, key_end) - 1 - key_begin;
    to = {head,
          begin,
          end,
          full ? QueryStep::kFull : t.bits,
          first_key / Tile::kWarpKeys,
          last_key / Tile::kWarpKeys + 1,
          q + begin * p.q.row,
          dout + begin * p.grad.dout.row,
          line + begin,
          line + begin + dq_line};
  }
};

}  // namespace flash_attn::sm80
