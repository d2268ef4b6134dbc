// SPDX-License-Identifier: BSD-3-Clause
// dbias of every call that backward_plain_bias.cuh does not serve: with softcap, ALiBi or dropout,
// or of fp32. P and dP are recomputed by the code of the other kernels without atomics.
#pragma once

#include "cuda/sm80/backward_bias_walk.cuh"

namespace flash_attn::sm80 {

template <class Tile>
struct OrderedBias : BiasLoop<Tile> {
  static constexpr int kKeys = Tile::kBiasKeys;
  using BiasLoop<Tile>::block;
  using BiasLoop<Tile>::state;
  using BiasLoop<Tile>::BiasLoop;

  // sums (kOwn, kKeys) += dS of a tile in shared memory.
  template <class AddBias>
  __device__ __forceinline__ void add(float (&sums)[1][kKeys / 8][4],
                                      const TilePlace& tile,
                                      int stage,
                                      const AddBias& bias) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const BiasQuery& own = state.rows[stage][block.own_warp * 16 + fragment_row(2 * h)];
      block.rows[h] = {own.base, own.weight};
      block.delta[h] = own.delta;
    }
    const uint32_t q = this->tiles(stage), k = q + 2 * Tile::kOwnBytes;
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
    float own_bias[kKeys / 16][8];
    const auto begin = [&] {
      const BiasWalk& walk = state.walk;
      const AttnParams& p = block.p;
      const HeadFeatures all = {p, walk.batches.begin, walk.heads.begin, 0, p.seqlen_k, p.seqlen_q};
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        load_bias<QueriesDown>(own_bias[n], all, walk.queries.begin + 16 * block.own_warp,
                               walk.keys.begin + 16 * n);
      }
    };
    const auto bias = [&](float(&x)[8], int n) {
#pragma unroll
      for (int e = 0; e < 8; ++e)
        x[e] = biased(x[e], own_bias[n][e]);
    };
    BiasLoop<Tile>::run(begin, [&](const TilePlace& tile, int stage) {
      if (block.sees(tile)) add(sums, tile, stage, bias);
    });
  }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    ordered_bias_kernel(const __grid_constant__ AttnParams p,
                        const __grid_constant__ OrderedGrid rows,
                        const __grid_constant__ BiasGrid grid) {
  extern __shared__ __align__(1024) uint8_t smem[];
  OrderedBias<Tile> bias(p, rows, grid, smem);
  float sums[1][Tile::kBiasKeys / 8][4] = {};
  bias.run(sums);
  write_bias<Tile>(p.grad, sums, bias.state.walk, smem, 16 * bias.block.own_warp,
                   bias.block.dim_warp == 0);
}

}  // namespace flash_attn::sm80
