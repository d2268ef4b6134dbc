// SPDX-License-Identifier: BSD-3-Clause
// dbias. A block owns a tile of the bias' own elements and goes through what broadcasts to them
// (batch, heads, tiles of rows or columns) in a fixed order, recomputing P and dP; dbias is written
// once.
#pragma once

#include "cuda/launch.h"
#include "cuda/sm80/backward_ordered_block.cuh"

namespace flash_attn::sm80 {

// The room of the walked tiles, in one stage.
template <class Tile>
struct OrderedBiasTile : OrderedTile<typename Tile::Element, typename Tile::N> {
  static constexpr int kKeys = min_of(Tile::kWalk * Tile::kStages, 128 / Tile::kBytes);
};

// The grid, along x: column tiles, row tiles, heads, batches of the bias; 1 where it broadcasts.
struct BiasGrid {
  int columns, rows, heads;
  int own, keys;  // of a tile
};

// A tile of the problem that a block works on.
struct BiasStep {
  int batch, head, query, key;
};

// Whether (query, key) begins a tile that something is visible in, and what step to take there.
// With a block list its line is searched for the tile's block.
__device__ __forceinline__ bool find_tile(const AttnParams& p,
                                          const SeqInfo& seq,
                                          const BiasGrid& grid,
                                          const BiasStep& at,
                                          WalkStep& step) {
  const int end = min(at.query + grid.own, seq.q_len), n = at.key / grid.keys;
  const TileRange range = Mask(p.mask, seq).kv_tiles(at.query, end, grid.keys);
  if (n < range.begin || n >= range.end) return false;
  step = {at.head, at.key, min(at.key + grid.keys, seq.k_len), -1,
          n >= range.full_begin && n < range.full_end};
  if (p.mask.blocks.index == nullptr) return true;
  const BlockLine line = block_line(p.mask.blocks, at.batch, at.head, at.query / p.mask.block_q);
  for (int entry = 0; entry < line.count; ++entry) {
    if (line.index[entry] != at.key / p.mask.block_k) continue;
    if (line.bits != nullptr) step.bits = line.bits[entry];
    step.full = step.full && step.bits < 0;
    return true;
  }
  return false;
}

// sums (kOwn, kKeys) += dS of one tile. All threads; the tiles in shared memory are free.
template <class Tile>
__device__ __forceinline__ void add_score_gradients(OrderedBlock<Tile, QueriesDown>& block,
                                                    float (&sums)[1][Tile::kKeys / 8][4],
                                                    const WalkStep& step) {
  constexpr int kKeys = Tile::kKeys, kDim = Tile::kHeadDim;
  const auto& state = block.state;
  const uint32_t k = block.walk_tile(0, 0), v = k + Tile::kBytes * kKeys * kDim;
  block.load_own(true);
  block.template load_keys<kKeys>(k, v, state.head_k, step.begin, step.end);
  ptx::copy_async_commit();
  block.fetch_own(step.head);
  ptx::copy_async_wait<0>();
  __syncthreads();
  float s[1][kKeys / 8][4], dp[1][kKeys / 8][4];
  block.template multiply_rows<kKeys>(s, 0, k);
  block.template multiply_rows<kKeys>(dp, 1, v);
  block.gradients(s, dp, step, 0, [&](int n, const float(&ds)[8], int, int) {
#pragma unroll
    for (int e = 0; e < 8; ++e)
      sums[0][2 * n + e / 4][e % 4] += ds[e];
  });
  __syncthreads();
}

// The block's sums -> dbias, summed over the rows or columns of the tile where it broadcasts.
template <class Tile>
__device__ __forceinline__ void write_bias(const AttnParams& p,
                                           const float (&sums)[1][Tile::kKeys / 8][4],
                                           const OrderedBlock<Tile, QueriesDown>& block,
                                           float* to,
                                           int rows,
                                           int columns) {
  constexpr int kPitch = Tile::kKeys + 1;
  const Gradients& grad = p.grad;
  float* tile = reinterpret_cast<float*>(block.smem);
  if (block.dim_warp == 0) {
#pragma unroll
    for (int n = 0; n < Tile::kKeys / 8; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int row = block.own_warp * 16 + fragment_row(c), column = 8 * n + fragment_column(c);
        tile[row * kPitch + column] = sums[0][n][c];
      }
    }
  }
  __syncthreads();
  // Sums of what a broadcasting bias has once, each by one thread.
  const bool all_rows = grad.dbias_row == 0, all_columns = grad.dbias_col == 0;
  const int down = all_rows ? 1 : min(rows, Tile::kOwn);
  const int across = all_columns ? 1 : min(columns, Tile::kKeys);
  for (int at = threadIdx.x; at < down * across; at += Tile::kThreads) {
    const int row = at / across, column = at % across;
    double sum = 0;
    for (int r = row; r < (all_rows ? Tile::kOwn : row + 1); ++r) {
      for (int c = column; c < (all_columns ? Tile::kKeys : column + 1); ++c)
        sum += tile[r * kPitch + c];
    }
    to[row * grad.dbias_row + column * grad.dbias_col] = static_cast<float>(sum);
  }
}

// The part [begin, end) of a dimension of `size` that element `own` of the bias stands for.
struct Extent {
  int begin, end;
  __device__ Extent(bool broadcast, int own, int step, int size)
      : begin(broadcast ? 0 : own * step), end(broadcast ? size : min(begin + step, size)) {}
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    bias_kernel(const __grid_constant__ AttnParams p,
                const __grid_constant__ OrderedGrid rows,
                const __grid_constant__ BiasGrid grid) {
  extern __shared__ __align__(1024) uint8_t smem[];
  OrderedBlock<Tile, QueriesDown> block(p, rows, smem);
  const Gradients& grad = p.grad;
  int x = blockIdx.x;
  const int column_tile = x % grid.columns, row_tile = x / grid.columns % grid.rows;
  x /= grid.columns * grid.rows;
  const int own_head = x % grid.heads, own_batch = x / grid.heads;
  const Extent batches(grad.dbias_batch == 0, own_batch, 1, p.batch);
  const Extent heads(grad.dbias_head == 0, own_head, 1, p.heads_q);
  const Extent queries(grad.dbias_row == 0, row_tile, grid.own, p.seqlen_q);
  const Extent keys(grad.dbias_col == 0, column_tile, grid.keys, p.seqlen_k);

  if (threadIdx.x == 0) block.state.huge = rows.findings->huge_lse != 0;
  float sums[1][Tile::kKeys / 8][4] = {};
  BiasStep at;
  for (at.batch = batches.begin; at.batch < batches.end; ++at.batch) {
    const SeqInfo seq(p, at.batch);
    for (at.head = heads.begin; at.head < heads.end; ++at.head) {
      for (at.query = queries.begin; at.query < min(queries.end, seq.q_len); at.query += grid.own) {
        for (at.key = keys.begin; at.key < min(keys.end, seq.k_len); at.key += grid.keys) {
          WalkStep step;
          if (!find_tile(p, seq, grid, at, step)) continue;
          if (threadIdx.x == 0) {
            const int end = min(at.query + grid.own, seq.q_len);
            block.state.own(p, seq, at.batch, at.query, end, at.head);
          }
          step.full = step.full && step.end - step.begin == Tile::kKeys;
          __syncthreads();
          add_score_gradients(block, sums, step);
        }
      }
    }
  }
  float* to = static_cast<float*>(grad.dbias) + own_batch * grad.dbias_batch +
              own_head * grad.dbias_head + queries.begin * grad.dbias_row +
              keys.begin * grad.dbias_col;
  write_bias(p, sums, block, to, queries.end - queries.begin, keys.end - keys.begin);
}

template <class Tile>
cudaError_t launch_bias_gradient(const AttnParams& p,
                                 const OrderedGrid& queries,
                                 cudaStream_t stream) {
  using BiasTile = OrderedBiasTile<Tile>;
  const Gradients& grad = p.grad;
  BiasGrid grid = {};
  grid.own = queries.own;
  grid.keys = tile_within(p.mask.block_k, BiasTile::kKeys);
  grid.columns = grad.dbias_col == 0 ? 1 : ceil_div(p.seqlen_k, grid.keys);
  grid.rows = grad.dbias_row == 0 ? 1 : ceil_div(p.seqlen_q, grid.own);
  grid.heads = grad.dbias_head == 0 ? 1 : p.heads_q;
  const int64_t blocks =
      int64_t{grid.columns} * grid.rows * grid.heads * (grad.dbias_batch == 0 ? 1 : p.batch);
  return launch_shared(bias_kernel<BiasTile>, blocks, BiasTile::kThreads,
                       ordered_smem_bytes<BiasTile, QueriesDown>(), stream, p, queries, grid);
}

}  // namespace flash_attn::sm80
