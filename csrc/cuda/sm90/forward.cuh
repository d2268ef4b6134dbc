// SPDX-License-Identifier: BSD-3-Clause
// Forward attention with wgmma and the copy engine, for Hopper (sm_90a).
//
// A block takes block_m packed rows of one key head, and of the keys that the mask leaves one
// split. Its last warp produces, the others consume:
//
//   producer, one warp                 consumers, a warpgroup of 64 rows each
//   for each key tile:                 1 Q to shared memory
//     wait until its stage is empty    2 wait for K;  S = Q K^T
//     which tile it is; K on its way   3 out += P V of the tile before, at the same time
//     wait; V on its way               4 S is there: K's stage is empty;  mask; m, l and P
//                                      5 out is there: V's stage is empty;  out to the new m
//                                      6 after the last: out += P V;  sink, out / l and lse
//
// Shared memory: Q (kBlockM, head_dim), later out | K, kStages of (kBlockN, head_dim) | V |
// ForwardState | barriers: K full, K empty, V full, V empty, kStages each | tiles | their pages |
// of kGeneral, the bias of each warp (bias_boxes.cuh).
#pragma once

#include "cuda/launch.h"
#include "cuda/sm90/forward_consumer.cuh"
#include "cuda/sm90/key_boxes.cuh"
#include "cuda/sm90/persistent.cuh"
#include "cuda/support/combine.cuh"
#include "plan/plan.h"

namespace flash_attn::sm90 {

struct ForwardMaps : KeyMaps {
  // kGeneral only.
  BiasMap bias;
  CapSeries cap;
  unsigned sharing;  // batches that read the same bias
};

// Blocks of batches that share a bias stand side by side, so that device memory gives it once: all
// but the late tiles (ForwardGrid).
__device__ __forceinline__ unsigned shared_task(const ForwardGrid& grid,
                                                unsigned batches,
                                                unsigned x) {
  const unsigned early = grid.lines * (grid.run - grid.late);
  if (batches <= 1 || x >= early) return x;
  return x % batches * (early / batches) + x / batches;
}

// ---- producer, one warp

// Boxes: WholeBoxes or KeyBoxes.
template <class Tile, class Boxes>
__device__ __forceinline__ void produce(const AttnParams& p,
                                        const ForwardGrid& grid,
                                        const KeyMaps& maps,
                                        const ForwardTask& task,
                                        const SeqInfo& seq,
                                        KvTiles walk,
                                        uint32_t smem,
                                        const Pipeline<Tile::kStages>& pipe,
                                        uint8_t* barriers,
                                        int* pages) {
  using T = ForwardSizes<Tile>;
  Boxes boxes(p, maps, pages, seq, task);
  Ring<Tile::kStages> ring;
  KvTile tile, after;
  bool more = walk.next(after);
  if (more) boxes.foresee(after.n);
  while (more) {
    tile = after;
    tile.full &= boxes.find(tile.n);
    ptx::mbarrier_wait(pipe.k_empty(ring.stage), ring.parity ^ 1);
    if (ptx::elect()) *pipe.tile(barriers, ring.stage) = tile;
    boxes.template ask<Tile::kHeadDim>(maps.k, p.k, smem + T::kK + ring.stage * T::kKBytes,
                                       pipe.k_full(ring.stage));
    more = walk.next(after);
    if (more) boxes.foresee(after.n);
    ptx::mbarrier_wait(pipe.v_empty(ring.stage), ring.parity ^ 1);
    boxes.template ask<Tile::kHeadDimV>(maps.v, p.v, smem + T::kV + ring.stage * T::kVBytes,
                                        pipe.v_full(ring.stage));
    ring.advance();
  }
  ptx::mbarrier_wait(pipe.k_empty(ring.stage), ring.parity ^ 1);
  if (!ptx::elect()) return;
  pipe.tile(barriers, ring.stage)->n = -1;
  ptx::mbarrier_arrive(pipe.k_full(ring.stage));
}

template <class Element, class Tile, Score kScore>
__global__ void __launch_bounds__(ForwardSizes<Tile>::kThreads, 1)
    forward_kernel(const __grid_constant__ AttnParams p,
                   const __grid_constant__ ForwardGrid grid,
                   const __grid_constant__ ForwardMaps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using T = ForwardSizes<Tile>;
  extern __shared__ __align__(1024) uint8_t smem[];
  ForwardState<Element, Tile>& state =
      *reinterpret_cast<ForwardState<Element, Tile>*>(smem + T::kState);
  uint8_t* barriers = smem + T::template barriers<Element>();
  const Pipeline<Tile::kStages> pipe = {smem_address(barriers)};

  ForwardTask task(
      p, grid, kScore == Score::kPlain ? blockIdx.x : shared_task(grid, maps.sharing, blockIdx.x));
  const SeqInfo seq(p, task.batch);
  if (!task.cut(seq, grid.block_m)) return;
  if (threadIdx.x < T::kConsumerThreads) {
    load_tile<Tile::kBlockM, Tile::kHeadDim, T::kConsumerThreads>(
        smem_address(smem), QueryRows<Element>(p.q, seq, task.rows), task.begin, task.end,
        p.head_dim, copies_whole_chunks<Element>(p.q, p.head_dim));
    ptx::copy_async_commit();
  }
  const KvTiles walk = key_walk(p, grid, seq, task);
  if (threadIdx.x == T::kConsumerThreads) pipe.init(Tile::kWarps);
  __syncthreads();

  if (threadIdx.x >= T::kConsumerThreads) {
    ptx::give_registers<T::kProducerRegisters>();
    if (threadIdx.x / 32 != Tile::kWarps) return;
    int* pages = reinterpret_cast<int*>(smem + T::template pages<Element>());
    if (maps.whole)
      produce<Tile, WholeBoxes<Tile>>(p, grid, maps, task, seq, walk, smem_address(smem), pipe,
                                      barriers, pages);
    else
      produce<Tile, KeyBoxes<Tile>>(p, grid, maps, task, seq, walk, smem_address(smem), pipe,
                                    barriers, pages);
  } else {
    ptx::take_registers<T::kConsumerRegisters>();
    fill_state(p, grid, state, task, seq, walk, KeySide<Element>(p, seq, task));
    ptx::copy_async_wait<0>();
    ptx::proxy_fence();
    ptx::barrier_sync(1, T::kConsumerThreads);
    const uint32_t group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    const auto features = [&] {
      if constexpr (kScore == Score::kGeneral) {
        return Features<Element, Tile>(p, grid, maps.cap, state, maps.bias,
                                       smem_address(smem) + T::template features<Element>());
      } else {
        return NoFeatures();
      }
    };
    Consumer<Element, Tile, kScore> self = {p,    grid,     state, smem_address(smem),
                                            pipe, barriers, group, features()};
    consume(self);
    self.features.finish();
    self.softmax.finish();
    ptx::barrier_sync(2 + threadIdx.x / 128, 128);
    store_result(p, grid, state, threadIdx.x / 32 * 16, self.softmax.m, self.softmax.l, self.out, 0,
                 smem);
  }
#else
  __trap();  // code without Hopper's own instructions counts as older (code_architecture)
#endif
}

// Keys that a row sees on average.
inline int mean_keys(const AttnParams& p) {
  int keys = p.seqlen_k;
  const int left = p.mask.window_left, right = p.mask.window_right;
  if (left < 0 && right >= 0) keys -= min_of(p.seqlen_q, p.seqlen_k) / 2;
  if (left >= 0 && left < keys) keys = min_of(keys, left + 1 + max_of(right, 0));
  return keys;
}

// Bytes of partial results, or of what blocks that stay count in.
inline int64_t forward_workspace(const AttnParams& p, int, int num_splits) {
  return num_splits > 1 ? partial_bytes(p, num_splits) : persistent_workspace(p);
}

template <class Element, class Tile, Score kScore>
int launch_forward(const AttnParams& p, const Plan& plan, void* workspace, void* stream) {
  using T = ForwardSizes<Tile>;
  ForwardGrid grid = forward_grid(p, plan.block_m, plan.block_n, plan.group, plan.num_splits, 1);
  if (grid.tasks == 0) return cudaSuccess;
  if (kScore == Score::kGeneral) {
    grid.steps = ScoreSteps(p);
    grid.scale = grid.steps.scale();
  }
  grid.partial = partial_result(p, plan.num_splits, workspace);
  ForwardMaps maps = {};
  if (!make_key_maps(&maps, p, Tile::kBlockN, plan.block_n)) return cudaErrorInvalidValue;
  if (kScore == Score::kGeneral) {
    maps.cap = CapSeries(grid.steps.inside, grid.scale.c);
    if (!make_bias_map(&maps.bias, p, plan.group)) return cudaErrorInvalidValue;
    const bool shared = p.bias.ptr != nullptr && p.bias.batch == 0 && p.bias.row != 0;
    if (shared && p.seq_q.cu_seqlens == nullptr && plan.num_splits == 1) maps.sharing = p.batch;
  }
  cudaStream_t on = static_cast<cudaStream_t>(stream);
  if constexpr (kScore == Score::kPlain) {
    const int blocks = maps.whole ? persistent_blocks<Element, Tile>(p, grid, mean_keys(p)) : 0;
    if (blocks > 0) return launch_persistent<Element, Tile>(p, grid, maps, blocks, workspace, on);
  }
  const cudaError_t error =
      launch_shared(forward_kernel<Element, Tile, kScore>, grid.tasks, T::kThreads,
                    T::template smem_bytes<Element, kScore>(), on, p, grid, maps);
  if (error != cudaSuccess || plan.num_splits == 1) return error;
  return launch_combine<Element>(p, grid.partial, plan.num_splits, on);
}

template <class Tile>
bool takes_forward(const AttnParams& p) {
  if (max_of(p.head_dim, p.head_dim_v) <= Tile::kSmallerDim) return false;
  if (!Tile::kDropout && p.dropout.philox != nullptr) return false;
  if constexpr (!Tile::kAnyBlocks) {
    const bool few = int64_t{p.seqlen_q} * p.group_size() <= 128;
    const bool cuts = p.mask.block_q % Tile::kBlockM != 0 || p.mask.block_k % Tile::kBlockN != 0;
    const bool small_boxes =
        p.pages.table != nullptr &&
        key_box_rows(p, Tile::kBlockN, Tile::kBlockN) < key_box_rows(p, 128, 128);
    const int least = p.mask.window_left >= 0 ? Tile::kShortWindow
                      : has_window(p)         ? Tile::kShortCausal
                                              : Tile::kShort;
    if (few || cuts || small_boxes || mean_keys(p) < least) return false;
  }
  return has_boxes(p);
}

// Whether sm80 is not faster (H200). It is with small mask blocks, of which tiles have too few
// keys, and pages, of which they have too many boxes. A block's start and end weigh more here: that
// counts where blocks follow each other and a row sees few keys on average. A bias that the copy
// engine cannot bring is read slowly.
template <class Tile>
bool pays_forward(const AttnParams& p) {
  const auto brings = [&](int group) { return bias_sides(p.bias, group).rows > 0; };
  const bool bias = p.bias.ptr != nullptr;
  if (bias && !(brings(1) && brings(p.group_size()))) return false;
  constexpr int kLeastBox = 4, kFewRows = 32, kMultiprocessors = 132, kLeastPaged = 256;
  const bool paged = p.pages.table != nullptr;
  const int width = tile_within(p.mask.block_k, Tile::kBlockN);
  if (Tile::kHeadDim <= 128 && 4 * width < 3 * Tile::kBlockN) return false;
  if (paged && key_box_rows(p, Tile::kBlockN, width) < kLeastBox) return false;
  const bool decodes = int64_t{p.seqlen_q} * p.group_size() <= kFewRows;
  if (decodes && int64_t{p.batch} * p.heads_k <= kMultiprocessors) return true;
  if (paged) return !decodes || p.seqlen_k >= kLeastPaged;
  if (decodes && p.group_size() == 1) return false;
  return mean_keys(p) >= Tile::kLeastKeys;
}

template <class Element, class Tile, Score kScore>
constexpr KernelRow forward_row(const char* name) {
  KernelRow row = {};
  row.name = name;
  row.family = "sm90";
  row.pass = Pass::kForward;
  row.arch = 90;
  row.arch_end = 100;
  row.dtype = ElementTraits<Element>::kDType;
  row.head_dim = Tile::kHeadDim;
  row.head_dim_v = Tile::kHeadDimV;
  row.score = kScore;
  row.block_m = Tile::kBlockM;
  row.block_n = Tile::kBlockN;
  row.smem_bytes = ForwardSizes<Tile>::template smem_bytes<Element, kScore>();
  row.shared_bytes = forward_workspace;
  row.cuda = launch_forward<Element, Tile, kScore>;
  row.takes = takes_forward<Tile>;
  row.pays = pays_forward<Tile>;
  row.wants = "keys whose rows begin at multiples of 16 bytes and do not repeat";
  return row;
}

}  // namespace flash_attn::sm90
