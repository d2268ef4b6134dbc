// SPDX-License-Identifier: BSD-3-Clause
// dbias. A block owns a tile of the bias' own elements and goes through what broadcasts to them
// (batch, heads, tiles of rows or columns) in a fixed order, recomputing P and dP; dbias is written
// once.
#pragma once

#include "cuda/launch.h"
#include "cuda/sm80/backward_ordered_block.cuh"

namespace flash_attn::sm80 {

// The grid, along x: column tiles, row tiles, heads, batches of the bias; 1 where it broadcasts.
struct BiasGrid {
  int columns, rows, heads;
  int own, keys;  // of a tile
};

// The part [begin, end) of a dimension of `size` that element `own` of the bias stands for.
struct Extent {
  int begin, end;
  __device__ Extent(bool broadcast, int own, int step, int size)
      : begin(broadcast ? 0 : own * step), end(broadcast ? size : min(begin + step, size)) {}
};

// A tile of the problem that a block works on.
struct BiasStep {
  SeqInfo seq;
  TilePlace tile;
};

// A block's way through what broadcasts to its tile of the bias: batch by batch, head by head. One
// thread's.
struct BiasWalk {
  Extent batches, heads, queries, keys;
  int batch, head, query, key;  // of the tile to come
  SeqInfo seq;                  // of `batch`
  TileRange range;              // what rows from `query` on see of it, in tiles of keys

  __device__ BiasWalk(const AttnParams& p, const BiasGrid& grid, uint32_t block)
      : batches(p.grad.dbias_batch == 0, block / grid.columns / grid.rows / grid.heads, 1, p.batch),
        heads(p.grad.dbias_head == 0, block / grid.columns / grid.rows % grid.heads, 1, p.heads_q),
        queries(p.grad.dbias_row == 0, block / grid.columns % grid.rows, grid.own, p.seqlen_q),
        keys(p.grad.dbias_col == 0, block % grid.columns, grid.keys, p.seqlen_k),
        batch(batches.begin),
        head(heads.begin),
        query(queries.begin),
        key(keys.begin),
        seq(p, batch),
        range(visible(p, grid)) {}

  __device__ __forceinline__ TileRange visible(const AttnParams& p, const BiasGrid& grid) const {
    return Mask(p.mask, seq).kv_tiles(query, min(query + grid.own, seq.q_len), grid.keys);
  }

  // Past `key`: the next tile of the order, whether or not it exists.
  __device__ __forceinline__ void step(const AttnParams& p, const BiasGrid& grid) {
    key += grid.keys;
    if (key < min(keys.end, seq.k_len)) return;
    key = keys.begin;
    query += grid.own;
    const bool rows_left = query < min(queries.end, seq.q_len);
    if (!rows_left) {
      query = queries.begin;
      if (++head == heads.end) {
        head = heads.begin;
        if (++batch < batches.end) seq = SeqInfo(p, batch);
      }
    }
    if (queries.end - queries.begin > grid.own || head == heads.begin) range = visible(p, grid);
  }

  // Whether the tile exists and something of it is visible. With a block list its line is searched.
  __device__ __forceinline__ bool find(const AttnParams& p,
                                       const BiasGrid& grid,
                                       TilePlace& tile) const {
    const int n = key / grid.keys;
    if (query >= seq.q_len || key >= seq.k_len || n < range.begin || n >= range.end) return false;
    const Mask mask(p.mask, seq);
    tile = {batch,
            head,
            query,
            key,
            min(query + grid.own, seq.q_len),
            min(key + grid.keys, seq.k_len),
            seq.k_len - seq.q_len,
            mask.low,
            mask.high,
            -1,
            n >= range.full_begin && n < range.full_end};
    if (p.mask.blocks.index == nullptr) return true;
    const BlockLine line = block_line(p.mask.blocks, batch, head, query / p.mask.block_q);
    for (int entry = 0; entry < line.count; ++entry) {
      if (line.index[entry] != key / p.mask.block_k) continue;
      if (line.bits != nullptr) tile.bits = line.bits[entry];
      tile.full = tile.full && tile.bits < 0;
      return true;
    }
    return false;
  }

  // `whole`: keys of a whole tile of the kernel's.
  __device__ __forceinline__ void next(const AttnParams& p,
                                       const BiasGrid& grid,
                                       int whole,
                                       BiasStep& to) {
    bool found = false;
    while (!found && batch < batches.end) {
      found = find(p, grid, to.tile);
      if (found) to.seq = seq;
      step(p, grid);
    }
    if (!found) to.tile.head = -1;
    to.tile.full = to.tile.full && to.tile.key_end - to.tile.key == whole;
  }
};

// kStages of Q, dO, K, V, then the state.
template <class Tile, int kStageCount>
struct BiasTile : Tile {
  static constexpr int kBiasStages = kStageCount;
  static constexpr int kKeyBytes = Tile::kBytes * Tile::kBiasKeys * Tile::kHeadDim;
  static constexpr int kStageBytes = 2 * Tile::kOwnBytes + 2 * kKeyBytes;

  struct State {
    BiasWalk walk;
    BiasStep steps[4];  // of step t: steps[t % 4]
    RowWeight rows[kBiasStages][Tile::kOwn];
    float delta[kBiasStages][Tile::kOwn];
  };
  static constexpr int kSmemBytes = kBiasStages * kStageBytes + static_cast<int>(sizeof(State));
};

template <class Tile>
struct BiasBlock {
  using State = typename Tile::State;
  static constexpr int kKeys = Tile::kBiasKeys;
  static_assert(Tile::kOwn <= Tile::kThreads);

  OrderedBlock<Tile, QueriesDown> block;
  const BiasGrid& grid;
  State& state;
  bool huge;
  float lse = 0, delta = 0;  // of one query of the next tile, on their way

  __device__ BiasBlock(const AttnParams& p,
                       const OrderedGrid& rows,
                       const BiasGrid& g,
                       uint8_t* smem)
      : block(p, rows, smem),
        grid(g),
        state(*reinterpret_cast<State*>(smem + Tile::kBiasStages * Tile::kStageBytes)),
        huge(rows.findings->huge_lse != 0) {}

  __device__ __forceinline__ uint32_t tiles(int stage) const {
    return smem_address(block.smem) + stage * Tile::kStageBytes;
  }

  __device__ __forceinline__ void load(const BiasStep& step, int stage) {
    const AttnParams& p = block.p;
    const TilePlace& tile = step.tile;
    const uint32_t q = tiles(stage), k = q + 2 * Tile::kOwnBytes;
    block.template load_queries<Tile::kOwn>(step.seq, q, q + Tile::kOwnBytes, tile.head, tile.query,
                                            tile.query_end);
    block.template load_keys<kKeys>(step.seq, k, k + Tile::kKeyBytes, tile.head / p.group_size(),
                                    tile.key, tile.key_end);
    ptx::copy_async_commit();
    const int i = tile.query + static_cast<int>(threadIdx.x);
    lse = -INFINITY;
    if (threadIdx.x >= Tile::kOwn || i >= tile.query_end) return;
    const int64_t at = step.seq.lse_offset(p, tile.head, i);
    lse = static_cast<const float*>(p.lse)[at];
    delta = static_cast<const float*>(p.grad.delta)[at];
  }

  // The row that load() has fetched for a tile, to shared memory.
  __device__ __forceinline__ void store_row(const BiasStep& step, int stage) {
    if (threadIdx.x >= Tile::kOwn) return;
    RowWeight row = {lse == -INFINITY ? INFINITY : lse, 1};
    if (huge && lse != -INFINITY && step.tile.head >= 0) {
      const int i = step.tile.query + static_cast<int>(threadIdx.x);
      row = block.grid.rows[step.seq.lse_offset(block.p, step.tile.head, i)];
    }
    state.rows[stage][threadIdx.x] = row;
    state.delta[stage][threadIdx.x] = delta;
  }

  // sums (kOwn, kKeys) += dS of a tile in shared memory.
  template <class AddBias>
  __device__ __forceinline__ void add(float (&sums)[1][kKeys / 8][4],
                                      const TilePlace& tile,
                                      int stage,
                                      const AddBias& bias) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = block.own_warp * 16 + fragment_row(2 * h);
      block.rows[h] = state.rows[stage][row];
      block.delta[h] = state.delta[stage][row];
    }
    const uint32_t q = tiles(stage), k = q + 2 * Tile::kOwnBytes;
    float s[1][kKeys / 8][4], dp[1][kKeys / 8][4];
    block.template multiply_rows<kKeys>(s, block.own_rows(q), k);
    block.template multiply_rows<kKeys>(dp, block.own_rows(q + Tile::kOwnBytes),
                                        k + Tile::kKeyBytes);
    block.gradients(s, dp, tile, 0, bias, [&](int n, const float(&ds)[8], int, int) {
#pragma unroll
      for (int e = 0; e < 8; ++e)
        sums[0][2 * n + e / 4][e % 4] += ds[e];
    });
  }

  // All tiles; their bias is the block's own, whatever broadcasts.
  __device__ __forceinline__ void run(float (&sums)[1][kKeys / 8][4]) {
    const AttnParams& p = block.p;
    if (threadIdx.x == 0) {
      new (&state.walk) BiasWalk(p, grid, blockIdx.x);
      for (int t = 0; t < 2; ++t)
        state.walk.next(p, grid, kKeys, state.steps[t]);
    }
    __syncthreads();
    float own_bias[kKeys / 16][8];
    const BiasWalk& walk = state.walk;
    const HeadFeatures all = {p, walk.batches.begin, walk.heads.begin, 0, p.seqlen_k, p.seqlen_q};
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      load_bias<QueriesDown>(own_bias[n], all, walk.queries.begin + 16 * block.own_warp,
                             walk.keys.begin + 16 * n);
    }
    const auto bias = [&](float(&x)[8], int n) {
#pragma unroll
      for (int e = 0; e < 8; ++e)
        x[e] = biased(x[e], own_bias[n][e]);
    };
    constexpr bool kAhead = Tile::kBiasStages == 2;
    if (state.steps[0].tile.head >= 0) load(state.steps[0], 0);
    for (int t = 0;; ++t) {
      const int stage = kAhead ? t % 2 : 0;
      store_row(state.steps[t % 4], stage);
      ptx::copy_async_wait<0>();
      __syncthreads();
      const TilePlace& tile = state.steps[t % 4].tile;
      if (tile.head < 0) return;
      const BiasStep& next = state.steps[(t + 1) % 4];
      if (kAhead && next.tile.head >= 0) load(next, stage ^ 1);
      if (threadIdx.x == 0) state.walk.next(p, grid, kKeys, state.steps[(t + 2) % 4]);
      if (block.sees(tile)) add(sums, tile, stage, bias);
      if (!kAhead) {
        __syncthreads();
        if (next.tile.head >= 0) load(next, 0);
      }
    }
  }
};

// The block's sums -> dbias, summed over the rows or columns of the tile where it broadcasts.
template <class Tile>
__device__ __forceinline__ void write_bias(const AttnParams& p,
                                           const float (&sums)[1][Tile::kBiasKeys / 8][4],
                                           const OrderedBlock<Tile, QueriesDown>& block,
                                           float* to,
                                           int rows,
                                           int columns) {
  constexpr int kPitch = Tile::kBiasKeys + 1;
  const Gradients& grad = p.grad;
  float* tile = reinterpret_cast<float*>(block.smem);
  if (block.dim_warp == 0) {
#pragma unroll
    for (int n = 0; n < Tile::kBiasKeys / 8; ++n) {
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
  const int across = all_columns ? 1 : min(columns, Tile::kBiasKeys);
  for (int at = threadIdx.x; at < down * across; at += Tile::kThreads) {
    const int row = at / across, column = at % across;
    double sum = 0;
    for (int r = row; r < (all_rows ? Tile::kOwn : row + 1); ++r) {
      for (int c = column; c < (all_columns ? Tile::kBiasKeys : column + 1); ++c)
        sum += tile[r * kPitch + c];
    }
    to[row * grad.dbias_row + column * grad.dbias_col] = static_cast<float>(sum);
  }
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    bias_kernel(const __grid_constant__ AttnParams p,
                const __grid_constant__ OrderedGrid rows,
                const __grid_constant__ BiasGrid grid) {
  extern __shared__ __align__(1024) uint8_t smem[];
  BiasBlock<Tile> bias(p, rows, grid, smem);
  float sums[1][Tile::kBiasKeys / 8][4] = {};
  bias.run(sums);
  const BiasWalk& walk = bias.state.walk;
  const Gradients& grad = p.grad;
  float* to = static_cast<float*>(grad.dbias) + walk.batches.begin * grad.dbias_batch +
              walk.heads.begin * grad.dbias_head + walk.queries.begin * grad.dbias_row +
              walk.keys.begin * grad.dbias_col;
  write_bias(p, sums, bias.block, to, walk.queries.end - walk.queries.begin,
             walk.keys.end - walk.keys.begin);
}

template <class Tile>
cudaError_t launch_bias_gradient(const AttnParams& p,
                                 const OrderedGrid& queries,
                                 cudaStream_t stream) {
  const Gradients& grad = p.grad;
  BiasGrid grid = {};
  grid.own = queries.own;
  grid.keys = tile_within(p.mask.block_k, Tile::kBiasKeys);
  grid.columns = grad.dbias_col == 0 ? 1 : ceil_div(p.seqlen_k, grid.keys);
  grid.rows = grad.dbias_row == 0 ? 1 : ceil_div(p.seqlen_q, grid.own);
  grid.heads = grad.dbias_head == 0 ? 1 : p.heads_q;
  const int64_t blocks =
      int64_t{grid.columns} * grid.rows * grid.heads * (grad.dbias_batch == 0 ? 1 : p.batch);
  return launch_shared(bias_kernel<Tile>, blocks, Tile::kThreads, Tile::kSmemBytes, stream, p,
                       queries, grid);
}

}  // namespace flash_attn::sm80
