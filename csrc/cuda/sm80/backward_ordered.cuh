// SPDX-License-Identifier: BSD-3-Clause
// Backward kernels without atomics, so that every call gives the same bits; blocks own rows of one
// side (backward_ordered_block.cuh) and walk over the other.
//
//   weights_kernel   base and weight of every row, where some lse is huge
//   keys_kernel      dK and dV: blocks own keys of a key head, go through the query heads that read
//                    it and through their query tiles; fp32 alone, since 16 bits have
//                    backward_block.cuh
//   queries_kernel   dQ, parts of dslopes: blocks own queries
#pragma once

#include "cuda/sm80/backward_ordered_block.cuh"

namespace flash_attn::sm80 {

// kOwn and kWalk rows of the two sides, kBiasKeys of a tile of dbias. kDimWarps warps share 16 own
// rows: each makes their scores, and its part of the columns of dK and dV, or of dQ. In 99 KiB of
// shared memory, but for 192, which has no row for less than the 163 KiB of sm_80.
struct Ordered64 {
  static constexpr int kHeadDim = 64, kOwn = 64, kWalk = 64, kBiasKeys = 64, kDimWarps = 1;
  static constexpr int kStages = 2, kBlocksPerSm = 2;
};
// In the 64 KiB of sm_75 too.
struct Ordered128 : Ordered64 {
  static constexpr int kHeadDim = 128, kWalk = 32, kBiasKeys = 32, kStages = 1;
};
struct Ordered192 : Ordered128 {
  static constexpr int kHeadDim = 192;
};
struct Ordered256 : Ordered128 {
  static constexpr int kHeadDim = 256;
};
struct Sm75Ordered256 : Ordered256 {
  static constexpr int kOwn = 32, kWalk = 16, kBiasKeys = 16, kBlocksPerSm = 4;
};
struct F32Ordered64 : Ordered64 {
  static constexpr int kWalk = 32, kBiasKeys = 32;
};
struct F32Ordered128 : Ordered128 {
  static constexpr int kWalk = 16, kStages = 2;
};
struct F32Ordered256 : Ordered256 {
  static constexpr int kOwn = 32, kWalk = 16, kBiasKeys = 16, kDimWarps = 2;
};

// The tile number `index` of those that own queries: false when it does not exist. All threads.
template <class Tile>
__device__ __forceinline__ bool own_queries(const OrderedBlock<Tile, QueriesDown>& block,
                                            const AttnParams& p,
                                            const OrderedGrid& grid,
                                            uint32_t index) {
  // The longest first under causal.
  const int64_t place = grid.slots - 1 - index % grid.slots;
  const int head = static_cast<int>(index / grid.slots);
  const TileSlot slot = find_slot(p.seq_q, p.batch, p.seqlen_q, 1, grid.own, place);
  const SeqInfo seq(p, slot.batch);
  const int64_t begin = int64_t{slot.tile} * grid.own;
  if (begin < 0 || begin >= seq.q_len) return false;
  if (threadIdx.x == 0) {
    const int first = static_cast<int>(begin), end = min(first + grid.own, seq.q_len);
    new (&block.state)
        OrderedState<Tile, QueriesDown>(p, seq, slot.batch, first, end, head, 1, grid);
  }
  __syncthreads();
  return true;
}

// ---- weights

// m and 1 / l of the rows of a tile if some lse is huge, else what lse says. All threads.
template <class Tile>
__device__ __forceinline__ void find_weights(OrderedBlock<Tile, QueriesDown>& block,
                                             const AttnParams& p,
                                             const ScoreScale& scale) {
  const auto& state = block.state;
  const int head = state.head_end - 1;
  bool huge = false;
  float own_lse[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int i = block.own_row() + fragment_row(2 * h);
    own_lse[h] = -INFINITY;
    if (i < state.end)
      own_lse[h] = static_cast<const float*>(p.lse)[state.seq.lse_offset(p, head, i)];
    huge |= fabsf(own_lse[h]) > kHugeLse && own_lse[h] != -INFINITY;
  }
  huge = __syncthreads_or(huge);
  Softmax<float, 1> softmax;
  if (huge) {
    float none[1][1][4] = {};
    block.walk(false, [&](const TilePlace& step, int stage) {
      float s[1][Tile::kColumns][4];
      block.template multiply_rows<Tile::kWalk>(s, block.own_rows(block.own_tile(0)),
                                                block.walk_tile(0, stage));
      block.visible_scores(s, step);
      softmax.step(s, none, scale);
    });
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int i = block.own_row() + fragment_row(2 * h);
    RowWeight row = {own_lse[h] == -INFINITY ? INFINITY : own_lse[h], 1};
    const float l = row_reduce_sum(softmax.l[0][h]);
    if (huge && l > 0) {
      const float sink =
          p.sinks.ptr != nullptr ? static_cast<const float*>(p.sinks.ptr)[head] : -INFINITY;
      row = {softmax.m[0][h], 1 / (l + expf(sink - softmax.m[0][h]))};
    }
    if (i < state.end && threadIdx.x % 4 == 0 && block.dim_warp == 0)
      block.grid.rows[state.seq.lse_offset(p, head, i)] = row;
  }
}

// All tiles, by few blocks, since hardly any call has a huge lse.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    weights_kernel(const __grid_constant__ AttnParams p,
                   const __grid_constant__ OrderedGrid grid,
                   const __grid_constant__ ScoreScale scale) {
  if (grid.findings->huge_lse == 0) return;
  extern __shared__ __align__(1024) uint8_t smem[];
  OrderedBlock<Tile, QueriesDown> block(p, grid, smem);
  const int64_t tiles = grid.slots * p.heads_q;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    if (own_queries(block, p, grid, static_cast<uint32_t>(tile))) find_weights(block, p, scale);
    __syncthreads();
  }
}

// ---- dK and dV

template <class Tile>
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
          p, seq, slot.batch, first, end, head_k * p.group_size(), p.group_size(), grid);
    }
  }
  __syncthreads();
  typename Block::Gradient dk = {}, dv = {};
  block.walk(true, [&](const TilePlace& step, int stage) {
    typename Block::Scores s, dp;
    block.template multiply_rows<Tile::kWalk>(s, block.own_rows(block.own_tile(0)),
                                              block.walk_tile(0, stage));
    block.template multiply_rows<Tile::kWalk>(dp, block.own_rows(block.own_tile(1)),
                                              block.walk_tile(1, stage));
    block.gradients(s, dp, step, stage, [](int, const float(&)[8], int, int) {});
    if (p.grad.dv.ptr != nullptr) block.multiply_add(dv, s, 1, stage);
    if (p.grad.dk.ptr != nullptr) block.multiply_add(dk, dp, 0, stage);
  });
  block.write(dk, 0, static_cast<float>(p.softmax_scale), p.grad.dk, p.head_dim);
  block.write(dv, 1, static_cast<float>(p.dropout.scale), p.grad.dv, p.head_dim_v);
}

// ---- dQ and dslopes

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
  const bool live = own_queries(block, p, grid, blockIdx.x);
  double slopes = 0;
  if (live) {
    auto& state = block.state;
    const int head = state.head_end - 1, distance = state.seq.k_len - state.seq.q_len;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int i = block.own_row() + fragment_row(2 * h);
      block.fetch(h, head, i, state.end);
      block.settle(h, head, i);
    }
    typename Block::Gradient dq = {};
    block.walk(true, [&](const TilePlace& step, int stage) {
      typename Block::Scores s, dp;
      block.template multiply_rows<Tile::kWalk>(s, block.own_rows(block.own_tile(0)),
                                                block.walk_tile(0, stage));
      block.template multiply_rows<Tile::kWalk>(dp, block.own_rows(block.own_tile(1)),
                                                block.walk_tile(1, stage));
      block.gradients(s, dp, step, stage, [&](int, const float(&ds)[8], int query, int key) {
        if (grid.slopes != nullptr) slopes += slope_gradient(ds, query + distance - key);
      });
      if (p.grad.dq.ptr != nullptr) block.multiply_add(dq, dp, 0, stage);
    });
    block.write(dq, 0, static_cast<float>(p.softmax_scale), p.grad.dq, p.head_dim);
  }
  if (grid.slopes == nullptr) return;
  slopes = warp_sum(slopes);
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

// ---- their grids

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

}  // namespace flash_attn::sm80
