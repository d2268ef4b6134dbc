// SPDX-License-Identifier: BSD-3-Clause
// The end of a warp's rows: sink, division by l, and out and lse to global memory, or a partial
// result (fp32, one slot a split) that support/combine.cuh merges.
#pragma once

#include "cuda/tile/load.cuh"
#include "cuda/tile/masking.cuh"
#include "cuda/tile/softmax.cuh"

namespace flash_attn {

// Partial results of splits in the workspace: out (splits, rows, head_dim_v), then lse (splits,
// rows); a row is an element of lse.
struct PartialResult {
  float* out = nullptr;  // null: there is one split
  float* lse = nullptr;
  int64_t rows = 0;
};

// Elements of lse.
FA_HD int64_t lse_rows(const AttnParams& p) {
  const bool packed = p.seq_q.cu_seqlens != nullptr;
  return (packed ? p.seq_q.total : int64_t{p.batch} * p.seqlen_q) * p.heads_q;
}

struct RowEnd {
  float lse;
  float factor;  // of the accumulators
};

// A row with maximum m (natural units) and sum l of the weights exp(s - m). The sink is one more
// logit without a value; it belongs to one split.
__device__ __forceinline__ RowEnd
finish_row(const AttnParams& p, int head, bool with_sink, float m, float l) {
  constexpr float kLog2e = 1.4426950408889634f;
  float factor = static_cast<float>(p.dropout.scale);
  if (p.sinks.ptr != nullptr && with_sink) {
    const float sink = static_cast<const float*>(p.sinks.ptr)[head];
    const float most = fmaxf(m, sink);
    if (most != -INFINITY) {
      const float old = ptx::exp2_approx((m - most) * kLog2e);
      l = l * old + ptx::exp2_approx((sink - most) * kLog2e);
      factor *= old;
      m = most;
    }
  }
  if (l == 0) return {-INFINITY, 0.0f};
  return {m + logf(l), factor / l};
}

// Two neighbouring columns of a partial row of `dim`.
__device__ __forceinline__ void store_partial(
    float* row, int column, int dim, float low, float high) {
  if (dim % 2 == 0 && column < dim) {
    *reinterpret_cast<float2*>(row + column) = make_float2(low, high);
    return;
  }
  if (column < dim) row[column] = low;
  if (column + 1 < dim) row[column + 1] = high;
}

// Rows [0, kRows) of a swizzled tile with kTileRows rows -> global memory, by one warp. Rows of
// `out` from `begin` on, columns [0, dim) of them.
template <int kTileRows, int kRows, int kDim, class Element>
__device__ __forceinline__ void store_rows(const uint8_t* tile,
                                           int row_in_tile,
                                           const QueryRows<Element>& out,
                                           int begin,
                                           int limit,
                                           int dim,
                                           bool whole_chunks) {
  constexpr int kChunks = kDim / kChunk;
#pragma unroll 4
  for (int c = threadIdx.x % 32; c < kRows * kChunks; c += 32) {
    const int row = c / kChunks, column = c % kChunks * kChunk;
    if (begin + row >= limit || column >= dim) continue;
    Element* to = const_cast<Element*>(out(begin + row)) + column;
    const uint4 value = *reinterpret_cast<const uint4*>(
        tile + tile_offset<kTileRows>(row_in_tile + row, c % kChunks));
    if (whole_chunks && column + kChunk <= dim) {
      *reinterpret_cast<uint4*>(to) = value;
    } else {
      const Element* each = reinterpret_cast<const Element*>(&value);
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        if (column + e < dim) to[e] = each[e];
      }
    }
  }
}

}  // namespace flash_attn
