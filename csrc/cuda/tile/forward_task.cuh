// SPDX-License-Identifier: BSD-3-Clause
// How the forward kernels' work is cut into tasks, and which a block has.
#pragma once

#include "core/divisor.h"
#include "core/rows.h"
#include "core/slots.h"
#include "cuda/tile/score.cuh"
#include "cuda/tile/store.cuh"

namespace flash_attn {

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
inline ForwardGrid forward_grid(
    const AttnParams& p, int block_m, int block_n, int group, int num_splits, int slices) {
  ForwardGrid grid = {};
  grid.slots = slot_count(p.seq_q, p.batch, p.seqlen_q, group, block_m);
  grid.heads = p.heads_q / group;
  if (grid.slots == 0 || grid.heads == 0) return grid;
  grid.run = static_cast<int>(ceil_div(grid.slots, int64_t{p.batch}));
  const bool causal = p.mask.window_right >= 0 && p.mask.window_left < 0;
  grid.late = causal ? grid.run / 2 : 0;
  grid.lines = static_cast<int>(ceil_div(grid.slots, int64_t{grid.run})) * grid.heads;
  grid.splits = num_splits, grid.slices = slices;
  grid.tasks = int64_t{grid.lines} * grid.run * grid.splits * grid.slices;
  grid.block_m = block_m, grid.block_n = block_n, grid.group = group;
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

}  // namespace flash_attn
