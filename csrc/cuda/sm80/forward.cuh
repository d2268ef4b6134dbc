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
// Most problems never come here: forward_even.cuh takes them.
//
// Shared memory: Q (kBlockM, head_dim) | K, two stages (kBlockN, head_dim) | V, two (kBlockN,
// head_dim_v) | ForwardState. Q's place takes out at the end.
#pragma once

#include <type_traits>

#include "cuda/launch.h"
#include "cuda/sm80/forward_even_pair.cuh"
#include "cuda/sm80/forward_features.cuh"
#include "cuda/support/combine.cuh"
#include "plan/kernel_list.h"
#include "plan/plan.h"

namespace flash_attn::sm80 {

// 3. Features and mask of a warp's scores of the tile in `stage`, keys from `key` on.
template <Score kScore, class Order, class Element, class Tile, int kRowBlocks, int kColumns>
__device__ __forceinline__ void finish_scores(float (&s)[kRowBlocks][kColumns][4],
                                              const AttnParams& p,
                                              const ForwardGrid& grid,
                                              const ForwardState<Element, Tile>& state,
                                              const WarpRows& warp,
                                              int key,
                                              int stage) {
  if constexpr (kScore == Score::kGeneral) {
    if (grid.steps.any) {
      apply_features<Element, Order>(s, p, grid.steps, warp, state.seq, state.task.batch, key);
    }
  }
  const int bits = state.tiles[stage].bits;
  const bool whole = state.sees_all(threadIdx.x / 32, key, 8 * kColumns);
  if (bits < 0 && p.pages.table == nullptr && grid.block_n == 8 * kColumns) {
    if (!whole) apply_window<Order>(s, warp, key);
    return;
  }
  TileMask<ceil_div(kColumns, 4)> hidden(p.pages, state.task.batch, key, grid.block_n, bits);
  if (hidden.some(8 * kColumns) || !whole) apply_mask<Order>(s, p.mask, warp, hidden);
}

// 2 to 5 for as long as the tile after this one hides nothing and lies evenly in memory: nearly all
// tiles of nearly all problems, in as few instructions as they need. The full tile in `stage` has
// arrived; the one that is left there has not, and position is kWalked when none is left. False
// when the caller has to take the tile itself.
template <class Element, class Tile, int kRowBlocks>
__device__ __forceinline__ bool whole_tiles(const AttnParams& p,
                                            const ForwardGrid& grid,
                                            ForwardState<Element, Tile>& state,
                                            int& position,
                                            int& stage,
                                            const WarpOperands& at,
                                            uint32_t k_smem,
                                            float (&out)[kRowBlocks][Tile::kHeadDimV / 8][4],
                                            Softmax<Element, kRowBlocks>& softmax) {
  constexpr int kThreads = Tile::kWarps * 32, kBlockN = Tile::kBlockN;
  constexpr uint32_t kKBytes = sizeof(Element) * kBlockN * Tile::kHeadDim;
  constexpr uint32_t kVBytes = sizeof(Element) * kBlockN * Tile::kHeadDimV;
  const int column0 = state.task.slice * Tile::kHeadDimV, low = state.full_low;
  using Keys = WholeTiles<Element, kBlockN, Tile::kHeadDim, kThreads>;
  using Values = WholeTiles<Element, kBlockN, Tile::kHeadDimV, kThreads>;
  const KeptQueries<Tile::kKept, kRowBlocks, Tile::kBlockM> kept(at.q);
  bool any = false;
  while (true) {
    KvTile next = {position - 1, true, -1};
    int from = position - 1;  // its position
    bool more = true;
    if (from < low) {
      KvTiles walk = state.walk;
      walk.walk.resume(position);
      more = walk.next(next);
      if (more && !next.full) return any;
      from = more ? walk.walk.position() : kWalked;
    }
    if (any) {
      ptx::copy_async_wait<0>();
      __syncthreads();
    }
    if (more) {
      Keys(state.keys.k, p.k.row, p.head_dim)
          .load(k_smem + (stage ^ 1) * kKBytes, next.n * kBlockN);
      Values(state.keys.v + column0, p.v.row, p.head_dim_v - column0)
          .load(k_smem + 2 * kKBytes + (stage ^ 1) * kVBytes, next.n * kBlockN);
      ptx::copy_async_commit();
      if (threadIdx.x == 0) state.tiles[stage ^ 1] = next;
    }
    float s[kRowBlocks][kBlockN / 8][4];
    warp_matmul_qk<Element, Tile::kHeadDim, kBlockN, kBlockN, Tile::kBlockM, Tile::kAhead>(
        s, kept, at.q, at.k + stage * kKBytes);
    softmax.step(s, out, grid.scale);
    add_values<Element, Tile>(out, s, at.v + stage * kVBytes);
    position = from;
    stage ^= 1;
    any = true;
    if (!more) return true;
  }
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
  using ByThread = KeysByThread<kBlockN>;
  using Order = std::conditional_t<kScore == Score::kPlain, KeysInOrder, KeysEither<kBlockN>>;
  extern __shared__ __align__(1024) uint8_t smem[];
  ForwardState<Element, Tile>& state = *reinterpret_cast<ForwardState<Element, Tile>*>(
      smem + forward_tile_bytes<Tile>(sizeof(Element)));
  const uint32_t q_smem = smem_address(smem), k_smem = q_smem + sizeof(Element) * kBlockM * kDim;
  const uint32_t v_smem = k_smem + 2 * kKBytes;

  ForwardTask task(p, grid, blockIdx.x);
  const SeqInfo seq(p, task.batch);
  if (!task.cut(seq, grid.block_m)) return;
  load_tile<kBlockM, kDim, kThreads>(q_smem, QueryRows<Element>(p.q, seq, task.rows), task.begin,
                                     task.end, p.head_dim,
                                     copies_whole_chunks<Element>(p.q, p.head_dim));
  Order order;
  if constexpr (kScore == Score::kGeneral) order.by_thread = grid.by_thread;
  const KvTiles walk = key_walk(p, grid, seq, task);
  const KeySide<Element> keys(p, seq, task);
  int position = walk.walk.position();
  KvTile next;
  if (next_tile(state, walk, position, next, 0)) {
    load_k<Tile>(p, grid, keys, next.n, k_smem, order);
    ptx::copy_async_commit();
    load_v<Tile>(p, grid, keys, task.slice * kDimV, next.n, v_smem, order);
  }
  ptx::copy_async_commit();
  fill_state(p, grid, state, task, seq, walk, keys);

  const int warp_row = threadIdx.x / 32 * 16 * kRowBlocks;  // of the tile
  const WarpOperands at = {q_smem + warp_row * 128 + query_lane<Element>(),
                           k_smem + key_lane<Element>(), v_smem + value_lane<Element>()};
  float out[kRowBlocks][kDimV / 8][4] = {};
  Softmax<Element, kRowBlocks> softmax;

  bool first = true;  // V of the first tile comes after its K
  const auto wait_for_values = [] {
    ptx::copy_async_wait<1>();
    __syncthreads();
  };
  for (int stage = 0; position != kWalked; stage ^= 1) {
    if (first)
      ptx::copy_async_wait<1>();
    else
      ptx::copy_async_wait<0>();
    __syncthreads();
    if constexpr (sizeof(Element) == 2 && kThreads >= 64) {
      if (!first && state.even) {
        bool taken = state.tiles[stage].full;
        if constexpr (kScore == Score::kPlain) {
          taken = taken && whole_tiles<Element, Tile>(p, grid, state, position, stage, at, k_smem,
                                                      out, softmax);
        } else {
          taken = feature_tiles<Element, Tile>(p, grid, state, position, stage, at, warp_row,
                                               k_smem, out, softmax);
        }
        if (taken) {
          stage ^= 1;
          continue;
        }
      }
    }
    KvTile next;
    if (next_tile(state, state.walk, position, next, stage ^ 1)) {
      load_k<Tile>(p, grid, state.keys, next.n, k_smem + (stage ^ 1) * kKBytes, order);
      load_v<Tile>(p, grid, state.keys, state.task.slice * kDimV, next.n,
                   v_smem + (stage ^ 1) * kVBytes, order);
    }
    ptx::copy_async_commit();
    const int key = state.tiles[stage].n * grid.block_n;
    // Rows of this warp that see nothing of the tile: under causal, half of the last tiles.
    const bool sees = state.sees(threadIdx.x / 32, key, grid.block_n);
    if (!sees) {
      if (first) wait_for_values();
      first = false;
      continue;
    }
    const WarpRows warp = state.warp_rows(warp_row);
    float s[kRowBlocks][kColumns][4];
    if constexpr (sizeof(Element) == 4) {
      warp_multiply_rows<kDim, kBlockM, kBlockN>(s, at.q, at.k + stage * kKBytes);
    } else {
      warp_matmul_qk<Element, kDim, kBlockN, kBlockN, kBlockM, Tile::kAhead>(
          s, at.q, at.k + stage * kKBytes);
    }
    if (first) wait_for_values();
    first = false;
    if (kScore == Score::kGeneral && grid.by_thread) {
      finish_scores<kScore, ByThread>(s, p, grid, state, warp, key, stage);
    } else {
      finish_scores<kScore, KeysInOrder>(s, p, grid, state, warp, key, stage);
    }
    softmax.step(s, out, grid.scale);
    if constexpr (kScore == Score::kGeneral) {
      if (p.dropout.philox != nullptr && grid.by_thread) {
        apply_dropout<ByThread>(s, p, warp, state.task.batch, key);
      } else if (p.dropout.philox != nullptr) {
        apply_dropout<KeysInOrder>(s, p, warp, state.task.batch, key);
      }
    }
    add_values<Element, Tile>(out, s, at.v + stage * kVBytes);
  }
  ptx::copy_async_wait<0>();
  __syncthreads();
  softmax.finish();
  store_result(p, grid, state, warp_row, softmax.m, softmax.l, out,
               state.task.slice * Tile::kHeadDimV, smem);
}

// Bytes of partial results; of a counter of tasks (forward_even_pair.cuh).
template <class Tile>
int64_t forward_workspace(const AttnParams& p, int, int num_splits) {
  if (num_splits > 1) return partial_bytes(p, num_splits);
  return Tile::kPairs ? sizeof(unsigned) : 0;
}

// Even: the tile of forward_even.cuh.
template <class Element, class Tile, Score kScore, class Even>
int launch_forward(const AttnParams& p, const Plan& plan, void* workspace, void* stream) {
  ForwardGrid grid = forward_grid(p, plan.block_m, plan.block_n, plan.group, plan.num_splits,
                                  ceil_div(p.head_dim_v, Tile::kHeadDimV));
  if (grid.tasks == 0) return cudaSuccess;
  cudaStream_t on = static_cast<cudaStream_t>(stream);
  if constexpr (has_even<Element, Tile, kScore>()) {
    if (runs_even<Element, Even>(p, plan))
      return launch_even<Element, Even>(p, grid, static_cast<unsigned*>(workspace), on);
  }
  if (kScore == Score::kGeneral) {
    grid.by_thread = p.bias.ptr != nullptr;
    grid.bias_aligned = bias_is_aligned<Tile::kBlockN>(p.bias);
    grid.steps = ScoreSteps(p);
    grid.scale = grid.steps.scale();
  }
  grid.partial = partial_result(p, plan.num_splits, workspace);
  void (*kernel)(AttnParams, ForwardGrid);
  if constexpr (Tile::kPairs)
    kernel = forward_pair_kernel<Element, Tile>;
  else
    kernel = forward_kernel<Element, Tile, kScore>;
  const cudaError_t error = launch_shared(kernel, grid.tasks, Tile::kWarps * 32,
                                          forward_smem_bytes<Element, Tile>(), on, p, grid);
  if (error != cudaSuccess || plan.num_splits == 1) return error;
  return launch_combine<Element>(p, grid.partial, plan.num_splits, on);
}

// `arch`: the oldest it runs on, compute capability * 10.
template <class Element, class Tile, Score kScore, class Even = Tile>
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
  if constexpr (has_even<Element, Tile, kScore>()) {
    constexpr int kBytes = forward_even_bytes<Element, Even>();
    row.smem_bytes = max_of(row.smem_bytes, kBytes);
    if (!std::is_same<Even, Tile>::value) row.smem_room = Even::kBlocksPerSm * kBytes;
  }
  row.shared_bytes = forward_workspace<Tile>;
  row.cuda = launch_forward<Element, Tile, kScore, Even>;
  return row;
}

}  // namespace flash_attn::sm80
