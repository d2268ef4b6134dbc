// SPDX-License-Identifier: BSD-3-Clause
// Backward attention by small kernels one after the other, without atomics, so that every call
// gives the same bits. Each is left out when nobody wants what it makes.
//
//   1 delta = rowsum(out * dout) - dlse             support/backward_prepare.cuh
//   2 base and weight of every row                  weights_kernel
//   3 dK and dV: blocks own keys of a key head, go through the query heads that read it and through
//     their query tiles                             keys_kernel
//   4 dQ, parts of dslopes: blocks own queries      queries_kernel
//   5 dslopes, dsinks                               support/backward_sums.cuh
//   6 dbias                                         backward_ordered_bias.cuh
#pragma once

#include "cuda/launch.h"
#include "cuda/sm80/backward_ordered_bias.cuh"
#include "cuda/sm80/backward_ordered_block.cuh"
#include "cuda/support/backward_prepare.cuh"
#include "cuda/support/backward_sums.cuh"
#include "plan/kernel_list.h"
#include "plan/plan.h"

namespace flash_attn::sm80 {

// kOwn and kWalk rows of the two sides. kDimWarps warps share 16 own rows: each makes their scores,
// and its part of the columns of dK and dV, or of dQ. kApart: dK and dV are too many registers for
// one kernel. fp32 is at most 99 KiB, so that one set serves all GPUs from sm_80 on.
struct F32Backward64 {
  static constexpr int kHeadDim = 64, kOwn = 64, kWalk = 32, kDimWarps = 1, kStages = 2;
  static constexpr int kBlocksPerSm = 2;
  static constexpr bool kApart = false;
};
struct F32Backward128 : F32Backward64 {
  static constexpr int kHeadDim = 128, kStages = 1;
};
struct F32Backward256 : F32Backward64 {
  static constexpr int kHeadDim = 256, kOwn = 32, kWalk = 16, kDimWarps = 2, kStages = 1;
};

// 16 bits: within the 64 KiB of sm_75 but for 256, which has a row of its own there.
struct Ordered64 : F32Backward64 {
  static constexpr int kWalk = 64;
};
struct Ordered128 : F32Backward128 {};
struct Ordered192 : F32Backward128 {
  static constexpr int kHeadDim = 192, kWalk = 16;
  static constexpr bool kApart = true;
};
struct Ordered256 : Ordered192 {
  static constexpr int kHeadDim = 256, kWalk = 32;
};
struct Sm75Ordered256 : Ordered256 {
  static constexpr int kOwn = 32, kWalk = 16, kBlocksPerSm = 4;
};

// The tile of a block that owns queries: false when there is none. All threads.
template <class Tile>
__device__ __forceinline__ bool own_queries(const OrderedBlock<Tile, QueriesDown>& block,
                                            const AttnParams& p,
                                            const OrderedGrid& grid) {
  // The longest first under causal.
  const int64_t place = grid.slots - 1 - blockIdx.x % grid.slots;
  const int head = static_cast<int>(blockIdx.x / grid.slots);
  const TileSlot slot = find_slot(p.seq_q, p.batch, p.seqlen_q, 1, grid.own, place);
  const SeqInfo seq(p, slot.batch);
  const int64_t begin = int64_t{slot.tile} * grid.own;
  if (begin < 0 || begin >= seq.q_len) return false;
  if (threadIdx.x == 0) {
    const int first = static_cast<int>(begin), end = min(first + grid.own, seq.q_len);
    new (&block.state)
        OrderedState<Tile, QueriesDown>(p, seq, slot.batch, first, end, head, 1, grid.walk);
  }
  __syncthreads();
  return true;
}

// ---- 2

// From here on rounding lse costs the weights more than 2^-12.
constexpr float kLargeLse = 4096;

// m and 1 / l of the rows of a tile if some lse is that large, else what lse says.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    weights_kernel(const __grid_constant__ AttnParams p,
                   const __grid_constant__ OrderedGrid grid,
                   const __grid_constant__ ScoreScale scale) {
  extern __shared__ __align__(1024) uint8_t smem[];
  OrderedBlock<Tile, QueriesDown> block(p, grid, smem);
  if (!own_queries(block, p, grid)) return;
  const auto& state = block.state;
  const int head = state.head_end - 1;
  bool large = false;
  float own_lse[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int i = block.own_row() + fragment_row(2 * h);
    own_lse[h] = -INFINITY;
    if (i < state.end)
      own_lse[h] = static_cast<const float*>(p.lse)[state.seq.lse_offset(p, head, i)];
    large |= fabsf(own_lse[h]) > kLargeLse && own_lse[h] != -INFINITY;
  }
  large = __syncthreads_or(large);
  Softmax<1> softmax;
  if (large) {
    float none[1][1][4] = {};
    block.walk(false, [&](const WalkStep& step, int stage) {
      float s[1][Tile::kColumns][4];
      block.template multiply_rows<Tile::kWalk>(s, 0, block.walk_tile(0, stage));
      block.visible_scores(s, step);
      softmax.step(s, none, scale);
    });
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int i = block.own_row() + fragment_row(2 * h);
    RowWeight row = {own_lse[h] == -INFINITY ? INFINITY : own_lse[h], 1};
    const float l = row_reduce_sum(softmax.l[0][h]);
    if (large && l > 0) {
      const float sink =
          p.sinks.ptr != nullptr ? static_cast<const float*>(p.sinks.ptr)[head] : -INFINITY;
      row = {softmax.m[0][h], 1 / (l + expf(sink - softmax.m[0][h]))};
    }
    if (i < state.end && threadIdx.x % 4 == 0 && block.dim_warp == 0)
      grid.rows[state.seq.lse_offset(p, head, i)] = row;
  }
}

// ---- 3

// Either or both of dK and dV, where they are wanted.
template <class Tile, bool kMakesDk, bool kMakesDv>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    keys_kernel(const __grid_constant__ AttnParams p, const __grid_constant__ OrderedGrid grid) {
  extern __shared__ __align__(1024) uint8_t smem[];
  using Block = OrderedBlock<Tile, KeysDown>;
  Block block(p, grid, smem);
  {
    const TileSlot slot =
        find_slot(p.seq_k, p.batch, p.seqlen_k, 1, grid.own, blockIdx.x % grid.slots);
    const int head_k = static_cast<int>(blockIdx.x / grid.slots);
    const SeqInfo seq(p, slot.batch);
    const int64_t begin = int64_t{slot.tile} * grid.own;
    if (begin < 0 || begin >= seq.k_len) return;
    if (threadIdx.x == 0) {
      const int first = static_cast<int>(begin), end = min(first + grid.own, seq.k_len);
      new (&block.state) OrderedState<Tile, KeysDown>(
          p, seq, slot.batch, first, end, head_k * p.group_size(), p.group_size(), grid.walk);
    }
  }
  __syncthreads();
  const bool wants_dk = kMakesDk && p.grad.dk.ptr != nullptr;
  const bool wants_dv = kMakesDv && p.grad.dv.ptr != nullptr;
  typename Block::Gradient dk = {}, dv = {};
  block.walk(true, [&](const WalkStep& step, int stage) {
    typename Block::Scores s, dp = {};
    block.template multiply_rows<Tile::kWalk>(s, 0, block.walk_tile(0, stage));
    if (wants_dk) block.template multiply_rows<Tile::kWalk>(dp, 1, block.walk_tile(1, stage));
    block.gradients(s, dp, step, stage, [](int, const float(&)[8], int, int) {});
    if (wants_dv) block.multiply_add(dv, s, 1, stage);
    if (wants_dk) block.multiply_add(dk, dp, 0, stage);
  });
  if (wants_dk) block.write(dk, 0, static_cast<float>(p.softmax_scale), p.grad.dk, p.head_dim);
  if (wants_dv) block.write(dv, 1, static_cast<float>(p.dropout.scale), p.grad.dv, p.head_dim_v);
}

// ---- 4

// Minus the sum of ds * distance over a chunk: what it adds to the gradient of the slope.
__device__ __forceinline__ float slope_gradient(const float (&ds)[8], int away) {
  float sum = 0;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const int distance = abs(away + QueriesDown::query(e) - QueriesDown::key(e));
    sum = fmaf(-ds[e], static_cast<float>(distance), sum);
  }
  return sum;
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    queries_kernel(const __grid_constant__ AttnParams p, const __grid_constant__ OrderedGrid grid) {
  extern __shared__ __align__(1024) uint8_t smem[];
  using Block = OrderedBlock<Tile, QueriesDown>;
  Block block(p, grid, smem);
  const bool live = own_queries(block, p, grid);
  double slopes = 0;
  if (live) {
    auto& state = block.state;
    const int head = state.head_end - 1, distance = state.seq.k_len - state.seq.q_len;
#pragma unroll
    for (int h = 0; h < 2; ++h)
      block.fetch(h, head, block.own_row() + fragment_row(2 * h), state.end);
    typename Block::Gradient dq = {};
    block.walk(true, [&](const WalkStep& step, int stage) {
      typename Block::Scores s, dp;
      block.template multiply_rows<Tile::kWalk>(s, 0, block.walk_tile(0, stage));
      block.template multiply_rows<Tile::kWalk>(dp, 1, block.walk_tile(1, stage));
      block.gradients(s, dp, step, stage, [&](int, const float(&ds)[8], int query, int key) {
        if (grid.slopes != nullptr) slopes += slope_gradient(ds, query + distance - key);
      });
      if (p.grad.dq.ptr != nullptr) block.multiply_add(dq, dp, 0, stage);
    });
    block.write(dq, 0, static_cast<float>(p.softmax_scale), p.grad.dq, p.head_dim);
  }
  if (grid.slopes == nullptr) return;
  for (int mask = 16; mask > 0; mask /= 2)
    slopes += __shfl_xor_sync(0xffffffffu, slopes, mask);
  double* parts = block.state.parts;
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = slopes;
  __syncthreads();
  if (threadIdx.x != 0) return;
  // Of the warps that share rows one counts.
  for (int warp = 1; warp < Tile::kOwnWarps; ++warp)
    slopes += parts[warp];
  const int64_t head = blockIdx.x / grid.slots, place = grid.slots - 1 - blockIdx.x % grid.slots;
  grid.slopes[head * grid.slots + place] = slopes;
}

// ---- the launcher

// The grid of blocks that own queries, or keys.
template <class Tile, class Layout>
OrderedGrid ordered_grid(const AttnParams& p) {
  constexpr bool kKeysDown = std::is_same_v<Layout, KeysDown>;
  const int own = kKeysDown ? p.mask.block_k : p.mask.block_q;
  const int walk = kKeysDown ? p.mask.block_q : p.mask.block_k;
  OrderedGrid grid = {};
  grid.own = tile_within(own, Tile::kOwn);
  grid.walk = tile_within(walk, Tile::kWalk);
  grid.slots = kKeysDown ? slot_count(p.seq_k, p.batch, p.seqlen_k, 1, grid.own)
                         : slot_count(p.seq_q, p.batch, p.seqlen_q, 1, grid.own);
  return grid;
}

// RowWeights, then the parts of dslopes.
template <class Tile>
int64_t ordered_workspace(const AttnParams& p, int, int) {
  const int64_t slots = ordered_grid<Tile, QueriesDown>(p).slots;
  const int64_t slopes = p.grad.dslopes != nullptr ? slots * p.heads_q : 0;
  return lse_rows(p) * int64_t{sizeof(RowWeight)} + slopes * int64_t{sizeof(double)};
}

template <class Tile>
cudaError_t launch_keys(const AttnParams& p, const OrderedGrid& grid, cudaStream_t stream) {
  const bool dk = p.grad.dk.ptr != nullptr, dv = p.grad.dv.ptr != nullptr;
  const auto start = [&](auto* kernel) {
    return launch_shared(kernel, grid.slots * p.heads_k, Tile::kThreads,
                         ordered_smem_bytes<Tile, KeysDown>(), stream, p, grid);
  };
  if constexpr (!Tile::kApart) {
    return dk || dv ? start(keys_kernel<Tile, true, true>) : cudaSuccess;
  } else {
    const cudaError_t error = dk ? start(keys_kernel<Tile, true, false>) : cudaSuccess;
    return error == cudaSuccess && dv ? start(keys_kernel<Tile, false, true>) : error;
  }
}

template <class Tile>
int launch_backward_ordered(const AttnParams& p, const Plan& plan, void* workspace, void* stream) {
  constexpr int kQueriesBytes = ordered_smem_bytes<Tile, QueriesDown>();
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  OrderedGrid keys = ordered_grid<Tile, KeysDown>(p), queries = ordered_grid<Tile, QueriesDown>(p);
  if (queries.slots == 0 || p.heads_q == 0) return cudaSuccess;
  keys.rows = queries.rows = static_cast<RowWeight*>(workspace);
  if (p.grad.dslopes != nullptr)
    queries.slopes = reinterpret_cast<double*>(queries.rows + lse_rows(p));
  const int64_t query_blocks = queries.slots * p.heads_q;

  int error = launch_delta<typename Tile::Element>(p, plan, workspace, stream);
  if (error == cudaSuccess) {
    error = launch_shared(weights_kernel<Tile>, query_blocks, Tile::kThreads, kQueriesBytes, on, p,
                          queries, ScoreScale(1.0));
  }
  if (error == cudaSuccess) error = launch_keys<Tile>(p, keys, on);
  if (error == cudaSuccess && (p.grad.dq.ptr != nullptr || p.grad.dslopes != nullptr)) {
    error = launch_shared(queries_kernel<Tile>, query_blocks, Tile::kThreads, kQueriesBytes, on, p,
                          queries);
  }
  if (error == cudaSuccess && p.grad.dslopes != nullptr)
    error = launch_slopes(p, queries.slopes, queries.slots, queries.own, on);
  if (error == cudaSuccess && p.grad.dsinks != nullptr) error = launch_sinks(p, on);
  if (error == cudaSuccess && p.grad.dbias != nullptr)
    error = launch_bias_gradient<Tile>(p, queries, on);
  return error;
}

template <class Element, class Numbers>
constexpr KernelRow backward_ordered_row(const char* name, int arch) {
  using Tile = OrderedTile<Element, Numbers>;
  KernelRow row = {};
  row.name = name;
  row.family = "sm80";
  row.pass = Pass::kBackward;
  row.arch = arch;
  row.dtype = ElementTraits<Element>::kDType;
  row.head_dim = row.head_dim_v = Tile::kHeadDim;
  row.score = Score::kGeneral;
  row.block_m = Tile::kWalk;
  row.block_n = Tile::kOwn;
  row.smem_bytes =
      max_of(ordered_smem_bytes<Tile, KeysDown>(), ordered_smem_bytes<Tile, QueriesDown>());
  row.shared_bytes = ordered_workspace<Tile>;
  row.cuda = launch_backward_ordered<Tile>;
  return row;
}

}  // namespace flash_attn::sm80
