// SPDX-License-Identifier: BSD-3-Clause
// dV and dK of a block of the backward kernel, from its accumulators to global memory.
#pragma once

#include "cuda/sm80/backward_loads.cuh"
#include "cuda/support/backward_finish.cuh"
#include "cuda/tile/store_rows.cuh"

namespace flash_attn::sm80 {

template <class Element, class Tile>
struct BackwardStore : BackwardLoads<Element, Tile> {
  using T = Tile;
  using Base = BackwardLoads<Element, Tile>;
  using Base::Base;
  using Base::dim_warp, Base::grid, Base::key_warp, Base::p, Base::smem, Base::state;

  // dV or dK, through the place of V or K.
  template <int kRole, int kColumnBlocks>
  __device__ __forceinline__ void write(const float (&acc)[T::kRowBlocks][kColumnBlocks][4]) const {
    constexpr int kDim = kRole == 0 ? T::kHeadDimV : T::kHeadDim;
    const TensorRef& t = kRole == 0 ? p.grad.dv : p.grad.dk;
    const int dim = kRole == 0 ? p.head_dim_v : p.head_dim;
    if (t.ptr == nullptr) return;
    const float factor =
        kRole == 0 ? static_cast<float>(p.dropout.scale) : static_cast<float>(p.softmax_scale);
    if (grid.splits > 1) {
      write_partial<kRole>(acc);
      return;
    }
    const uint32_t tile = smem + (kRole == 0 ? T::kKBytes : 0);
#pragma unroll
    for (int r = 0; r < T::kRowBlocks; ++r) {
#pragma unroll
      for (int n = 0; n < kColumnBlocks / 2; ++n) {
        float pair[2][4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          pair[0][c] = acc[r][2 * n][c] * factor;
          pair[1][c] = acc[r][2 * n + 1][c] * factor;
        }
        uint32_t a[4];
        to_operand<Element>(a, pair[0], pair[1]);
        const int column = n * T::kDimWarps + dim_warp;
        store_operand(
            tile + column / 4 * T::kBlockN * 128 + (key_warp * T::kWarpKeys + 16 * r) * 128,
            column % 4, a);
      }
    }
    // Warps of this role have written all of the tile's rows.
    ptx::barrier_sync(1 + kRole, T::kRoleWarps * 32);
    Element* to =
        static_cast<Element*>(t.ptr) + state.seq.k_offset(t, state.key_begin, state.head_k);
    const int rows = state.key_end - state.key_begin;
    const bool whole = T::kUsual || copies_whole_chunks<Element>(t);
    if constexpr (Base::kScore == Score::kPlain) {
      if (T::kUsual || (whole && dim % kChunk == 0)) {
        store_whole_rows<T::kBlockN, T::kBlockN, kDim, T::kRoleWarps * 32>(tile, to, t.row, rows,
                                                                           dim);
        return;
      }
    }
    store_tile_rows<T::kBlockN, T::kBlockN, kDim, T::kRoleWarps * 32>(tile, to, t.row, rows, dim,
                                                                      whole, Base::key_order());
  }

  // The sum of one slice of the query tiles.
  template <int kRole, int kColumnBlocks>
  __device__ __forceinline__ void write_partial(
      const float (&acc)[T::kRowBlocks][kColumnBlocks][4]) const {
    const int columns = round_up(kRole == 0 ? p.head_dim_v : p.head_dim, 16);
    float* partial = kRole == 0 ? grid.dv_partial : grid.dk_partial;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < T::kRowBlocks; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row_in_tile = key_warp * T::kWarpKeys + 16 * r + 8 * half + lane / 4;
        const int key = state.key_begin + Base::key_order().row_key(row_in_tile);
        if (key >= state.key_end) continue;
        const int64_t line = key_row(p, state.seq, state.head_k, key);
        float* to = partial + state.split * accumulator_size(key_rows(p), columns) +
                    accumulator_offset(line, 0, columns) + lane % 4 * 4;
#pragma unroll
        for (int n = 0; n < kColumnBlocks / 2; ++n) {
          const int column = (n * T::kDimWarps + dim_warp) * 16;
          const float(&left)[4] = acc[r][2 * n], (&right)[4] = acc[r][2 * n + 1];
          if (column < columns) {
            *reinterpret_cast<float4*>(to + column * kAccumulatorLines) = {
                left[2 * half], left[2 * half + 1], right[2 * half], right[2 * half + 1]};
          }
        }
      }
    }
  }
};

}  // namespace flash_attn::sm80
