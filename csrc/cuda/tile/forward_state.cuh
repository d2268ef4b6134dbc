// SPDX-License-Identifier: BSD-3-Clause
// What a block of a forward kernel looks up in shared memory, and how it ends: out and lse.
#pragma once

#include "core/tiles.h"
#include "cuda/tile/forward_task.cuh"

namespace flash_attn {

// The keys that some row of a warp sees, and those that all of them see.
struct alignas(16) WarpKeys {
  int some_begin, some_end, all_begin, all_end;
};

// Keys and values of a block's key head.
template <class Element>
struct KeySide {
  const Element *k, *v;   // key_base
  int batch, first, end;  // live slots [first, end)
  bool k_whole, v_whole;  // copies_whole_chunks

  __device__ KeySide(const AttnParams& p, const SeqInfo& seq, const ForwardTask& task)
      : batch(task.batch), first(seq.k_first), end(seq.k_len) {
    const int head_k = task.rows.head_first / p.group_size();
    k = key_base<Element>(p, p.k, seq, head_k);
    v = key_base<Element>(p, p.v, seq, head_k);
    k_whole = copies_whole_chunks<Element>(p.k, p.head_dim);
    v_whole = copies_whole_chunks<Element>(p.v, p.head_dim_v);
  }
};

// What a block looks up in shared memory, since registers are few: once a tile or less often.
template <class Element, class Tile>
struct ForwardState {
  ForwardTask task;
  SeqInfo seq;
  KvTiles walk;
  KeySide<Element> keys;
  KvTile tiles[2];  // in the stages
  bool even;        // keys lie evenly spaced, in whole chunks, and tiles have all kBlockN of them
  int full_low;     // TileWalk::full_down_to
  WarpKeys warp_keys[Tile::kWarps];
  RowPlace rows[Tile::kBlockM];

  // Whether some row of a warp sees one of the keys [key, key + width); whether all see all.
  __device__ __forceinline__ bool sees(int warp, int key, int width) const {
    const WarpKeys keys = warp_keys[warp];
    return keys.some_end > key && keys.some_begin < key + width;
  }
  __device__ __forceinline__ bool sees_all(int warp, int key, int width) const {
    const WarpKeys keys = warp_keys[warp];
    return keys.all_begin <= key && keys.all_end >= key + width;
  }

  // The rows of a warp, `warp_row` its first in the tile.
  __device__ __forceinline__ WarpRows warp_rows(int warp_row) const {
    return {rows + warp_row, task.begin + warp_row, task.rows.group};
  }
};

// The key tiles of a block.
__device__ __forceinline__ KvTiles key_walk(const AttnParams& p,
                                            const ForwardGrid& grid,
                                            const SeqInfo& seq,
                                            const ForwardTask& task) {
  return KvTiles(p, seq, task.batch, task.rows.head_first, task.rows.position(task.begin),
                 task.rows.position_end(task.end), grid.block_n, task.split, grid.splits);
}

// 6. The rows of one warp, row blocks of 16 from `warp_row` of the tile on, and columns `column0` …
// of out. l: whole sums. `staging`: a swizzled tile of kBlockM rows for these columns.
template <class Element, class Tile, int kRowBlocks, int kColumns>
__device__ __forceinline__ void store_result(const AttnParams& p,
                                             const ForwardGrid& grid,
                                             const ForwardState<Element, Tile>& state,
                                             int warp_row,
                                             const float (&m)[kRowBlocks][2],
                                             const float (&l)[kRowBlocks][2],
                                             float (&out)[kRowBlocks][kColumns][4],
                                             int column0,
                                             uint8_t* staging) {
  const ForwardTask& task = state.task;
  const WarpRows warp = state.warp_rows(warp_row);
  const int dim = min(p.head_dim_v - column0, 8 * kColumns);  // of these columns
#pragma unroll
  for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const RowPlace row = warp(b, h);
      const bool live = warp.first + 16 * b + fragment_row(2 * h) < task.end;
      const RowEnd end =
          finish_row<Element>(p, grid.scale, row.head, task.split == 0, m[b][h], l[b][h]);
      const int64_t at = state.seq.lse_offset(p, row.head, row.position);
      const bool first = live && threadIdx.x % 4 == 0 && column0 == 0;
      if (grid.partial.out != nullptr) {
        const int64_t slot = task.split * grid.partial.rows + at;
        float* to = grid.partial.out + slot * partial_columns(p) + column0;
        store_partial(out[b], h, end.factor, to, live ? dim : 0);
        // exp(rest), so that the combined lse has it: rest is near 0.
        if (first) grid.partial.sums[slot] = make_float2(end.m, fmaf(end.l, end.rest, end.l));
      } else {
        stage_row<Element, Tile::kBlockM>(out[b], h, end.factor, staging, warp_row + 16 * b);
        if (first) static_cast<float*>(p.lse)[at] = lse_of(end.m, end.l, end.rest);
      }
    }
  }
  if (grid.partial.out != nullptr) return;
  __syncwarp();
  QueryRows<Element> out_rows(p.out, state.seq, task.rows);
  out_rows.base += column0;
  store_rows<Tile::kBlockM, 16 * kRowBlocks, 8 * kColumns>(
      staging, warp_row, out_rows, warp.first, task.end, dim, copies_whole_chunks<Element>(p.out));
}

// What the block's threads look up. Needs a barrier before it is read.
template <class Element, class Tile>
__device__ __forceinline__ void fill_state(const AttnParams& p,
                                           const ForwardGrid& grid,
                                           ForwardState<Element, Tile>& state,
                                           const ForwardTask& task,
                                           const SeqInfo& seq,
                                           const KvTiles& walk,
                                           const KeySide<Element>& keys) {
  constexpr int kWarpRows = Tile::kBlockM / (Tile::kPairs ? Tile::kWarps / 2 : Tile::kWarps);
  if (threadIdx.x == 0) {
    state.task = task;
    state.seq = seq;
    state.walk = walk;
    state.keys = keys;
    state.even = p.pages.table == nullptr && keys.k_whole && keys.v_whole &&
                 grid.block_n == Tile::kBlockN && (p.head_dim | p.head_dim_v) % kChunk == 0;
    state.full_low = walk.walk.full_down_to();
  }
  const Mask mask(p.mask, seq);
  for (int r = threadIdx.x; r < Tile::kBlockM; r += Tile::kWarps * 32) {
    const int row = min(task.begin + r, task.end - 1), i = task.rows.position(row);
    state.rows[r] = {i, task.rows.head(row), mask.first_key(i), mask.end_key(i)};
  }
  if (threadIdx.x % 32 == 0 && threadIdx.x / 32 < Tile::kBlockM / kWarpRows) {
    const int begin = task.begin + threadIdx.x / 32 * kWarpRows;
    const int first = task.rows.position(min(begin, task.end - 1));
    const int last = task.rows.position(min(begin + kWarpRows, task.end) - 1);
    const bool live = begin < task.end;
    state.warp_keys[threadIdx.x / 32] = {mask.first_key(first), live ? mask.end_key(last) : 0,
                                         mask.first_key(last), mask.end_key(first)};
  }
}

}  // namespace flash_attn
