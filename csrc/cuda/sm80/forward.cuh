// SPDX-License-Identifier: BSD-3-Clause
// Forward attention with mma.sync and cp.async, for every GPU from sm_75 up.
//
// A block takes block_m packed rows of one key head, and of the keys that the mask leaves one
// split:
//
//   1 Q, first K and V on their way
//   2 for each key tile:  wait; all threads past the last tile;  next K and V on their way
//   3   S = Q K^T;  features (kGeneral);  mask on partial tiles
//   4   online softmax: m, l, P;  dropout (kGeneral)
//   5   out += P V
//   6 sink, out / l and lse; or a partial result
//   7 only if the keys are split: support/combine.cuh merges
//
// Shared memory: Q (kBlockM, head_dim) | K, two stages (kBlockN, head_dim) | V, two (kBlockN,
// head_dim_v) | ForwardState. Q's place takes out at the end.
#pragma once

#include "core/slots.h"
#include "core/tiles.h"
#include "cuda/launch.h"
#include "cuda/sm80/gemm.cuh"
#include "cuda/sm80/tile_config.h"
#include "cuda/support/combine.cuh"
#include "cuda/tile/score.cuh"
#include "cuda/tile/store.cuh"
#include "plan/kernel_list.h"
#include "plan/plan.h"

namespace flash_attn::sm80 {

// The grid, along x: for each run of `run` slots (core/slots.h; of a dense problem the tiles of a
// sequence), for each head, its tiles from the last to the first (under causal the longest come
// first), its splits, the slices of out's columns. Blocks side by side share keys.
struct ForwardGrid {
  int64_t slots;
  int run, heads, splits, slices;
  int block_m, block_n, group;
  PartialResult partial;
  // kPlain scales inside the exponential; kGeneral's scores are in natural units already.
  ScoreScale scale;
};

// What one block does: rows [begin, end) of `rows`; none when begin >= end.
struct ForwardTask {
  int batch = 0, split = 0, slice = 0, begin = 0, end = 0;
  PackedRows rows;

  __device__ ForwardTask(const AttnParams& p, const ForwardGrid& grid) : rows(1, 0) {
    unsigned x = blockIdx.x;
    if (grid.slices > 1) slice = x % grid.slices, x /= grid.slices;
    if (grid.splits > 1) split = x % grid.splits, x /= grid.splits;
    const int place = grid.run - 1 - x % grid.run;
    x /= grid.run;
    rows = PackedRows(grid.group, x % grid.heads);
    TileSlot found = {static_cast<int>(x / grid.heads), place};
    if (p.seq_q.cu_seqlens != nullptr) {
      const int64_t slot = int64_t{found.batch} * grid.run + place;
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

// What a block looks up in shared memory, since registers are few: once a tile or less often.
template <class Element, class Tile>
struct ForwardState {
  ForwardTask task;
  SeqInfo seq;
  KvTiles walk;
  const Element *k, *v;  // key_base
  bool k_whole, v_whole;
  KvTile tiles[2];  // in the stages
  WarpKeys warp_keys[Tile::kWarps];
  RowPlace rows[Tile::kBlockM];

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

// 6. The rows of one warp, row blocks of 16 from `warp_row` of the tile on.
template <class Element, class Tile, int kRowBlocks>
__device__ __forceinline__ void store_result(const AttnParams& p,
                                             const ForwardGrid& grid,
                                             const ForwardState<Element, Tile>& state,
                                             int warp_row,
                                             const Softmax<kRowBlocks>& softmax,
                                             float (&out)[kRowBlocks][Tile::kHeadDimV / 8][4],
                                             uint8_t* smem) {
  const ForwardTask& task = state.task;
  const WarpRows warp = state.warp_rows(warp_row);
  const int column0 = task.slice * Tile::kHeadDimV;
  const int dim = min(p.head_dim_v - column0, Tile::kHeadDimV);  // of this slice
#pragma unroll
  for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const RowPlace row = warp(b, h);
      const bool live = warp.first + 16 * b + fragment_row(2 * h) < task.end;
      const RowEnd end = finish_row(p, row.head, task.split == 0, softmax.m[b][h] * grid.scale.unit,
                                    row_reduce_sum(softmax.l[b][h]));
      const int64_t at = state.seq.lse_offset(p, row.head, row.position);
      float* lse = static_cast<float*>(p.lse) + at;
      if (grid.partial.out != nullptr) {
        const int64_t slot = task.split * grid.partial.rows + at;
        lse = grid.partial.lse + slot;
        float* to = grid.partial.out + slot * partial_columns(p) + column0;
        store_partial(out[b], h, end.factor, to, live ? dim : 0);
      } else {
        stage_row<Element, Tile::kBlockM>(out[b], h, end.factor, smem, warp_row + 16 * b);
      }
      if (live && threadIdx.x % 4 == 0 && task.slice == 0) *lse = end.lse;
    }
  }
  if (grid.partial.out != nullptr) return;
  __syncwarp();
  QueryRows<Element> out_rows(p.out, state.seq, task.rows);
  out_rows.base += column0;
  store_rows<Tile::kBlockM, 16 * kRowBlocks, Tile::kHeadDimV>(
      smem, warp_row, out_rows, warp.first, task.end, dim, copies_whole_chunks<Element>(p.out));
}

// Rows of the tile and the keys of each warp. Needs a barrier before they are read.
template <class Element, class Tile>
__device__ __forceinline__ void fill_rows(const AttnParams& p,
                                          ForwardState<Element, Tile>& state,
                                          const ForwardTask& task,
                                          const SeqInfo& seq) {
  constexpr int kWarpRows = Tile::kBlockM / Tile::kWarps;
  const Mask mask(p.mask, seq);
  for (int r = threadIdx.x; r < Tile::kBlockM; r += Tile::kWarps * 32) {
    const int row = min(task.begin + r, task.end - 1), i = task.rows.position(row);
    state.rows[r] = {i, task.rows.head(row), mask.first_key(i), mask.end_key(i)};
  }
  if (threadIdx.x % 32 == 0) {
    const int begin = task.begin + threadIdx.x / 32 * kWarpRows;
    const int first = task.rows.position(min(begin, task.end - 1));
    const int last = task.rows.position(min(begin + kWarpRows, task.end) - 1);
    const bool live = begin < task.end;
    state.warp_keys[threadIdx.x / 32] = {mask.first_key(first), live ? mask.end_key(last) : 0,
                                         mask.first_key(last), mask.end_key(first)};
  }
}

// 2. The next tile of the walk: its keys and values are on their way to stage 0 or 1, and from the
// next barrier on the state says which it is. All threads keep the position, kWalked at the end.
constexpr int kWalked = -1;

template <class Element, class Tile>
__device__ __forceinline__ void load_next(const AttnParams& p,
                                          const ForwardGrid& grid,
                                          ForwardState<Element, Tile>& state,
                                          int& position,
                                          uint32_t k_smem,
                                          int stage) {
  constexpr int kThreads = Tile::kWarps * 32, kBlockN = Tile::kBlockN;
  constexpr uint32_t kKBytes = sizeof(Element) * kBlockN * Tile::kHeadDim;
  constexpr uint32_t kVBytes = sizeof(Element) * kBlockN * Tile::kHeadDimV;
  KvTiles walk = state.walk;
  KvTile tile;
  walk.walk.resume(position);
  if (!walk.next(tile)) {
    position = kWalked;
    return;
  }
  position = walk.walk.position();
  if (threadIdx.x == 0) state.tiles[stage] = tile;
  const int key = tile.n * grid.block_n, limit = key + grid.block_n;
  const SeqInfo& seq = state.seq;
  const int batch = state.task.batch, column0 = state.task.slice * Tile::kHeadDimV;
  const KeyRows<Element> k_rows = {p, p.k, state.k, batch, seq.k_first, seq.k_len};
  load_tile<kBlockN, Tile::kHeadDim, kThreads>(k_smem + stage * kKBytes, k_rows, key, limit,
                                               p.head_dim, state.k_whole);
  const KeyRows<Element> v_rows = {p, p.v, state.v + column0, batch, seq.k_first, seq.k_len};
  load_tile<kBlockN, Tile::kHeadDimV, kThreads>(k_smem + 2 * kKBytes + stage * kVBytes, v_rows, key,
                                                limit, p.head_dim_v - column0, state.v_whole);
  ptx::copy_async_commit();
}

template <class Element, class Tile, Score kScore>
__global__ void __launch_bounds__(Tile::kWarps * 32, blocks_per_sm<Tile>())
    forward_kernel(const __grid_constant__ AttnParams p, const __grid_constant__ ForwardGrid grid) {
  constexpr int kThreads = Tile::kWarps * 32, kBlockM = Tile::kBlockM, kBlockN = Tile::kBlockN;
  constexpr int kDim = Tile::kHeadDim, kDimV = Tile::kHeadDimV;
  constexpr int kRowBlocks = kBlockM / (16 * Tile::kWarps), kColumns = kBlockN / 8;
  constexpr uint32_t kKBytes = sizeof(Element) * kBlockN * kDim;
  constexpr uint32_t kVBytes = sizeof(Element) * kBlockN * kDimV;
  static_assert(kDimV <= kDim, "out takes the place of Q");
  extern __shared__ __align__(1024) uint8_t smem[];
  ForwardState<Element, Tile>& state = *reinterpret_cast<ForwardState<Element, Tile>*>(
      smem + forward_tile_bytes<Tile>(sizeof(Element)));
  const uint32_t q_smem = smem_address(smem), k_smem = q_smem + sizeof(Element) * kBlockM * kDim;

  ForwardTask task(p, grid);
  const SeqInfo block_seq(p, task.batch);
  if (!task.cut(block_seq, grid.block_m)) return;
  if (threadIdx.x == 0) {
    const int head = task.rows.head_first, head_k = head / p.group_size();
    state.task = task;
    state.seq = block_seq;
    state.walk = KvTiles(p, block_seq, task.batch, head, task.rows.position(task.begin),
                         task.rows.position_end(task.end), grid.block_n, task.split, grid.splits);
    state.k = key_base<Element>(p, p.k, block_seq, head_k);
    state.v = key_base<Element>(p, p.v, block_seq, head_k);
    state.k_whole = copies_whole_chunks<Element>(p.k);
    state.v_whole = copies_whole_chunks<Element>(p.v);
  }
  load_tile<kBlockM, kDim, kThreads>(q_smem, QueryRows<Element>(p.q, block_seq, task.rows),
                                     task.begin, task.end, p.head_dim,
                                     copies_whole_chunks<Element>(p.q));
  ptx::copy_async_commit();
  fill_rows<Element, Tile>(p, state, task, block_seq);
  __syncthreads();
  int position = state.walk.walk.position();
  load_next<Element, Tile>(p, grid, state, position, k_smem, 0);

  const int warp_row = threadIdx.x / 32 * 16 * kRowBlocks;  // of the tile
  const uint32_t q_lane = q_smem + warp_row * 128 + row_lane();
  const uint32_t k_lane = k_smem + column_lane(), v_lane = k_smem + 2 * kKBytes + row_lane();
  float out[kRowBlocks][kDimV / 8][4] = {};
  Softmax<kRowBlocks> softmax;

  for (int stage = 0; position != kWalked; stage ^= 1) {
    ptx::copy_async_wait<0>();
    __syncthreads();
    load_next<Element, Tile>(p, grid, state, position, k_smem, stage ^ 1);
    const int key = state.tiles[stage].n * grid.block_n;
    // Rows of this warp that see nothing of the tile: under causal, half of the last tiles.
    const WarpKeys keys = state.warp_keys[threadIdx.x / 32];
    if (keys.some_end <= key || keys.some_begin >= key + grid.block_n) continue;
    [[maybe_unused]] BiasTile<kRowBlocks, kColumns> bias;
    if constexpr (kScore == Score::kGeneral) {
      if (p.bias.ptr != nullptr) {
        bias.load(p.bias, state.warp_rows(warp_row), state.task.batch, key, state.seq.k_len);
      }
    }
    float s[kRowBlocks][kColumns][4];
    warp_matmul_qk<Element, kDim, kBlockN, kBlockM, kRowBlocks>(s, q_lane,
                                                                k_lane + stage * kKBytes);
    const WarpRows warp = state.warp_rows(warp_row);
    if constexpr (kScore == Score::kGeneral)
      apply_features(s, p, warp, bias, state.seq.k_len - state.seq.q_len, state.task.batch, key);
    TileMask<ceil_div(kColumns, 4)> hidden(p.pages, state.task.batch, key, grid.block_n,
                                           state.tiles[stage].bits);
    if (hidden.some(8 * kColumns) || keys.all_begin > key || keys.all_end < key + kBlockN)
      apply_mask(s, p.mask, warp, hidden);
    softmax.step(s, out, grid.scale);
    if constexpr (kScore == Score::kGeneral) {
      if (p.dropout.philox != nullptr) apply_dropout(s, p, warp, state.task.batch, key);
    }
    warp_matmul_pv<Element, kDimV, kBlockN, kRowBlocks>(out, s, v_lane + stage * kVBytes);
  }
  ptx::copy_async_wait<0>();
  __syncthreads();
  store_result<Element, Tile>(p, grid, state, warp_row, softmax, out, smem);
}

// Bytes of partial results.
inline int64_t forward_workspace(const AttnParams& p, int, int num_splits) {
  return num_splits > 1 ? num_splits * lse_rows(p) * (partial_columns(p) + 1) * int64_t{4} : 0;
}

template <class Element, class Tile, Score kScore>
int launch_forward(const AttnParams& p, const Plan& plan, void* workspace, void* stream) {
  const int64_t slots = slot_count(p.seq_q, p.batch, p.seqlen_q, plan.group, plan.block_m);
  if (slots == 0 || p.heads_q == 0) return cudaSuccess;
  ForwardGrid grid = {slots,
                      static_cast<int>(ceil_div(slots, int64_t{p.batch})),
                      p.heads_q / plan.group,
                      plan.num_splits,
                      ceil_div(p.head_dim_v, Tile::kHeadDimV),
                      plan.block_m,
                      plan.block_n,
                      plan.group,
                      {},
                      ScoreScale(kScore == Score::kGeneral ? 1.0 : p.softmax_scale)};
  if (plan.num_splits > 1) {
    grid.partial.rows = lse_rows(p);
    grid.partial.out = static_cast<float*>(workspace);
    grid.partial.lse = grid.partial.out + grid.partial.rows * plan.num_splits * partial_columns(p);
  }
  const int64_t blocks =
      round_up(grid.slots, int64_t{grid.run}) * grid.heads * grid.splits * grid.slices;
  cudaStream_t on = static_cast<cudaStream_t>(stream);
  const cudaError_t error =
      launch_shared(forward_kernel<Element, Tile, kScore>, blocks, Tile::kWarps * 32,
                    forward_smem_bytes<Element, Tile>(), on, p, grid);
  if (error != cudaSuccess || plan.num_splits == 1) return error;
  return launch_combine<Element>(p, grid.partial, plan.num_splits, on);
}

// `arch`: the oldest it runs on, compute capability * 10.
template <class Element, class Tile, Score kScore>
constexpr KernelRow forward_row(const char* name, int arch) {
  KernelRow row = {};
  row.name = name;
  row.family = "sm80";
  row.pass = Pass::kForward;
  row.arch = arch;
  row.dtype = ElementTraits<Element>::kDType;
  row.head_dim = Tile::kHeadDim;
  row.head_dim_v = Tile::kHeadDimV * Tile::kSlices;
  row.score = kScore;
  row.block_m = Tile::kBlockM;
  row.block_n = Tile::kBlockN;
  row.smem_bytes = forward_smem_bytes<Element, Tile>();
  row.shared_bytes = forward_workspace;
  row.cuda = launch_forward<Element, Tile, kScore>;
  return row;
}

}  // namespace flash_attn::sm80
