// SPDX-License-Identifier: BSD-3-Clause
// What the blocks of the forward kernels (forward.cuh, forward_pair.cuh) have in common: their
// place in the grid, what their threads look up, the walk over key tiles, loads, and results.
#pragma once

#include "core/divisor.h"
#include "core/slots.h"
#include "core/tiles.h"
#include "cuda/sm80/gemm.cuh"
#include "cuda/sm80/tile_config.h"
#include "cuda/tile/score.cuh"
#include "cuda/tile/store.cuh"
#include "plan/plan.h"

namespace flash_attn::sm80 {

// The grid, along x: for each run of `run` slots (core/slots.h; of a dense problem the tiles of a
// sequence), for each head, its tiles from the last to the first (under causal the longest come
// first), its splits, the slices of out's columns. Blocks side by side share keys. The first
// `late` tiles of all runs come at the end, those of all heads side by side: under causal the short
// half, which fills the multiprocessors that are done early.
struct ForwardGrid {
  int64_t slots;
  int run, late, lines, heads, splits, slices;     // lines: pairs of a run and a head
  Divisor by_early, by_lines, by_heads, by_group;  // run - late; query heads of a key head
  int block_m, block_n, group;
  PartialResult partial;
  int64_t tasks;  // all of these
  // Sequences all of one length, and what a row sees then (Mask::low, high): forward_even.cuh.
  bool dense;
  int low, high;
  unsigned* next;  // tasks that blocks have begun, where they do one after another
  // kGeneral only: keys lie by thread, because there is a bias; whose runs of keys are aligned.
  bool by_thread, bias_aligned;
  ScoreSteps steps;  // kGeneral only
  ScoreScale scale;
};

// All but what features, partial results and kernels of their own need. `slices`: of out's columns.
inline ForwardGrid forward_grid(const AttnParams& p, const Plan& plan, int slices) {
  ForwardGrid grid = {};
  grid.slots = slot_count(p.seq_q, p.batch, p.seqlen_q, plan.group, plan.block_m);
  grid.heads = p.heads_q / plan.group;
  if (grid.slots == 0 || grid.heads == 0) return grid;
  grid.run = static_cast<int>(ceil_div(grid.slots, int64_t{p.batch}));
  const bool causal = p.mask.window_right >= 0 && p.mask.window_left < 0;
  grid.late = causal ? grid.run / 2 : 0;
  grid.lines = static_cast<int>(ceil_div(grid.slots, int64_t{grid.run})) * grid.heads;
  grid.splits = plan.num_splits, grid.slices = slices;
  grid.tasks = int64_t{grid.lines} * grid.run * grid.splits * grid.slices;
  grid.block_m = plan.block_m, grid.block_n = plan.block_n, grid.group = plan.group;
  grid.by_early = Divisor(grid.run - grid.late), grid.by_lines = Divisor(grid.lines);
  grid.by_heads = Divisor(grid.heads), grid.by_group = Divisor(p.group_size());
  grid.scale = ScoreScale(p.softmax_scale);
  return grid;
}

// What one block does: rows [begin, end) of `rows`; none when begin < 0 or begin >= end.
struct ForwardTask {
  int batch = 0, split = 0, slice = 0, begin = 0, end = 0;
  PackedRows rows;

  // x: number of the block.
  __device__ ForwardTask(const AttnParams& p, const ForwardGrid& grid, unsigned x) : rows(1, 0) {
    if (grid.slices > 1) slice = x % grid.slices, x /= grid.slices;
    if (grid.splits > 1) split = x % grid.splits, x /= grid.splits;
    // Run and head as one number, and the slot's place in its run.
    const unsigned early = grid.run - grid.late, lines = grid.lines;
    unsigned line = grid.by_early(x);
    int place = grid.run - 1 - (x - line * early);
    if (line >= lines) {
      x -= lines * early;
      const unsigned from_end = grid.by_lines(x);
      line = x - from_end * lines;
      place = grid.late - 1 - from_end;
    }
    const int run = grid.by_heads(line);
    rows = PackedRows(grid.group, line - run * grid.heads);
    TileSlot found = {run, place};
    if (p.seq_q.cu_seqlens != nullptr) {
      const int64_t slot = int64_t{run} * grid.run + place;
      begin = -1;
      if (slot >= grid.slots) return;
      found = find_slot(p.seq_q, p.batch, p.seqlen_q, grid.group, grid.block_m, slot);
    }
    batch = found.batch;
    begin = found.tile * grid.block_m;
  }

  // The sequence's length cuts the tile. False when nothing is left.
  __device__ bool cut(const SeqInfo& seq, int block_m) {
    const int64_t length = rows.rows(seq.q_len);
    if (begin < 0 || begin >= length) return false;
    end = static_cast<int>(min_of(int64_t{begin} + block_m, length));
    return true;
  }
};

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

template <class Element, class Tile>
constexpr int forward_smem_bytes() {
  return forward_tile_bytes<Tile>(sizeof(Element)) +
         static_cast<int>(sizeof(ForwardState<Element, Tile>));
}

// sm_75 has room for one block's shared memory: no use in keeping registers for more.
template <class Tile>
constexpr int blocks_per_sm() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  return 1;
#else
  return Tile::kBlocksPerSm;
#endif
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
          finish_row(p, row.head, task.split == 0, m[b][h] * grid.scale.unit, l[b][h]);
      const int64_t at = state.seq.lse_offset(p, row.head, row.position);
      const bool first = live && threadIdx.x % 4 == 0 && column0 == 0;
      if (grid.partial.out != nullptr) {
        const int64_t slot = task.split * grid.partial.rows + at;
        float* to = grid.partial.out + slot * partial_columns(p) + column0;
        store_partial(out[b], h, end.factor, to, live ? dim : 0);
        if (first) grid.partial.sums[slot] = make_float2(end.m, end.l);
      } else {
        stage_row<Element, Tile::kBlockM>(out[b], h, end.factor, staging, warp_row + 16 * b);
        if (first) static_cast<float*>(p.lse)[at] = lse_of(end.m, end.l);
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
  constexpr int kWarpRows = forward_warp_rows<Tile>();
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

// 2. Steps to the next tile of the walk; from the next barrier on state.tiles[stage] says which it
// is. All threads keep the position, kWalked when there is no further tile.
constexpr int kWalked = -1;

template <class Element, class Tile>
__device__ __forceinline__ bool next_tile(
    ForwardState<Element, Tile>& state, KvTiles walk, int& position, KvTile& tile, int stage) {
  walk.walk.resume(position);
  if (!walk.next(tile)) {
    position = kWalked;
    return false;
  }
  position = walk.walk.position();
  if (threadIdx.x == 0) state.tiles[stage] = tile;
  return true;
}

// Keys or values of tile n -> shared memory, values from `column0` on. Asynchronous.
template <class Tile, class Element, class Order = KeysInOrder>
__device__ __forceinline__ void load_k(const AttnParams& p,
                                       const ForwardGrid& grid,
                                       const KeySide<Element>& keys,
                                       int n,
                                       uint32_t smem,
                                       Order order = {}) {
  const int key = n * grid.block_n;
  const KeyRows<Element> rows = {p, p.k, keys.k, keys.batch, keys.first, keys.end};
  load_tile<Tile::kBlockN, Tile::kHeadDim, Tile::kWarps * 32>(smem, rows, key, key + grid.block_n,
                                                              p.head_dim, keys.k_whole, order);
}
template <class Tile, class Element, class Order = KeysInOrder>
__device__ __forceinline__ void load_v(const AttnParams& p,
                                       const ForwardGrid& grid,
                                       const KeySide<Element>& keys,
                                       int column0,
                                       int n,
                                       uint32_t smem,
                                       Order order = {}) {
  const int key = n * grid.block_n;
  const KeyRows<Element> rows = {p, p.v, keys.v + column0, keys.batch, keys.first, keys.end};
  load_tile<Tile::kBlockN, Tile::kHeadDimV, Tile::kWarps * 32>(
      smem, rows, key, key + grid.block_n, p.head_dim_v - column0, keys.v_whole, order);
}

// The key tiles of a block.
__device__ __forceinline__ KvTiles key_walk(const AttnParams& p,
                                            const ForwardGrid& grid,
                                            const SeqInfo& seq,
                                            const ForwardTask& task) {
  return KvTiles(p, seq, task.batch, task.rows.head_first, task.rows.position(task.begin),
                 task.rows.position_end(task.end), grid.block_n, task.split, grid.splits);
}

}  // namespace flash_attn::sm80
