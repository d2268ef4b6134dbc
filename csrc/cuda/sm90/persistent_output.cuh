// SPDX-License-Identifier: BSD-3-Clause
// The end of a task of the persistent kernel: out and lse from registers to global memory, by each
// warp for its own rows.
#pragma once

#include <cstdint>

#include "cuda/ptx/store.cuh"
#include "cuda/sm90/persistent_state.cuh"
#include "cuda/tile/store.cuh"

namespace flash_attn::sm90 {

// Thread t of the four that share a row holds x[i] = (row i, column t) of a 4 x 4 matrix -> x[i] =
// (row t, column i). All lanes.
__device__ __forceinline__ void transpose_quad(uint32_t (&x)[4]) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool upper = threadIdx.x & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i + step], step);
      (upper ? x[i] : x[i + step]) = other;
    }
  }
}

// Row h of the fragment, its columns before `dim` -> `row`, 16 bytes a thread: the threads of a row
// exchange pairs for runs of eight columns. All lanes.
template <class Element, int kColumns>
__device__ __forceinline__ void store_chunks(
    const float (&out)[kColumns][4], int h, float factor, Element* row, int dim) {
  const int own = threadIdx.x % 4;
  static_assert(kColumns % 4 == 0);
#pragma unroll
  for (int n = 0; n < kColumns; n += 4) {
    uint32_t x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      x[i] = pack_pair(Element(), out[n + i][2 * h] * factor, out[n + i][2 * h + 1] * factor);
    transpose_quad(x);
    const int column = 8 * (n + own);
    if (column < dim) ptx::store_global_16(row + column, x);
  }
}

// Steps between rows and heads of out, and between heads of lse, in elements: few instructions make
// an offset of two 32-bit factors (has_small_steps).
struct OutSteps {
  uint32_t row, head, lse_head;
  __device__ __forceinline__ explicit OutSteps(const AttnParams& p)
      : row(static_cast<uint32_t>(p.out.row)),
        head(static_cast<uint32_t>(p.out.head)),
        lse_head(p.seq_q.cu_seqlens != nullptr ? static_cast<uint32_t>(p.seq_q.total)
                                               : p.seqlen_q) {}
  __device__ __forceinline__ static uint64_t times(int count, uint32_t step) {
    return uint64_t{static_cast<uint32_t>(count)} * step;
  }
};
inline bool has_small_steps(const AttnParams& p) {
  const auto small = [](int64_t step) { return step >= 0 && step <= UINT32_MAX; };
  return small(p.out.row) && small(p.out.head) && small(p.seq_q.total);
}

// The rows of one warp, from `warp_row` of the tile on. l: whole sums. Rows of out begin at
// multiples of 16 bytes.
template <class Element, class Tile, int kColumns>
__device__ __forceinline__ void store_task(const AttnParams& p,
                                           const ForwardGrid& grid,
                                           const TaskState<Tile>& state,
                                           int warp_row,
                                           const float (&m)[2],
                                           const float (&l)[2],
                                           const float (&out)[kColumns][4]) {
  const WarpRows warp = state.warp_rows(warp_row);
  const OutSteps steps(p);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const RowPlace row = warp(0, h);
    const bool live = warp.first + fragment_row(2 * h) < state.task.end;
    const RowEnd end = finish_row<Element>(p, grid.scale, row.head, true, m[h], l[h]);
    if (live && threadIdx.x % 4 == 0) {
      state.lse[steps.times(row.head, steps.lse_head) + row.position] =
          lse_of(end.m, end.l, end.rest);
    }
    Element* to = static_cast<Element*>(state.out) + steps.times(row.position, steps.row) +
                  steps.times(row.head, steps.head);
    store_chunks(out, h, end.factor, to, live ? p.head_dim_v : 0);
  }
}

}  // namespace flash_attn::sm90
