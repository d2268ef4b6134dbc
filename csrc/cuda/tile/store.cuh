// SPDX-License-Identifier: BSD-3-Clause
// The end of a warp's rows: sink, division by l, and out and lse to global memory, or a partial
// result (fp32, one slot a split) that support/combine.cuh merges.
#pragma once

#include "cuda/ptx/shared.cuh"
#include "cuda/tile/load.cuh"
#include "cuda/tile/masking.cuh"
#include "cuda/tile/softmax.cuh"

namespace flash_attn {

// Partial results of splits in the workspace: out (splits, rows, partial_columns), then of each row
// (splits, rows) m and l, apart since their lse would lose log l where m is huge. A row is an
// element of lse.
struct PartialResult {
  float* out = nullptr;  // null: there is one split
  float2* sums = nullptr;
  int64_t rows = 0;
};

// Even, so that pairs of columns are aligned.
FA_HD int partial_columns(const AttnParams& p) {
  return round_up(p.head_dim_v, 2);
}

// Elements of lse.
FA_HD int64_t lse_rows(const AttnParams& p) {
  const bool packed = p.seq_q.cu_seqlens != nullptr;
  return (packed ? p.seq_q.total : int64_t{p.batch} * p.seqlen_q) * p.heads_q;
}

// Bytes of the partial results in the workspace; none where there is one split.
inline int64_t partial_bytes(const AttnParams& p, int num_splits) {
  return num_splits > 1 ? num_splits * lse_rows(p) * (partial_columns(p) + 2) * int64_t{4} : 0;
}

// Where they lie in it.
inline PartialResult partial_result(const AttnParams& p, int num_splits, void* workspace) {
  if (num_splits <= 1) return {};
  const int64_t rows = lse_rows(p);
  float* out = static_cast<float*>(workspace);
  return {out, reinterpret_cast<float2*>(out + rows * num_splits * partial_columns(p)), rows};
}

struct RowEnd {
  float m, l;
  float rest;    // Softmax::lse_rest
  float factor;  // of the accumulators
};

__device__ __forceinline__ float lse_of(float m, float l, float rest = 0) {
  return l == 0 ? -INFINITY : m + fmaf(ptx::log2_approx(l), 0.6931471805599453f, rest);
}

// A row whose softmax has m and l, in natural units. The sink is one more logit without a value; it
// belongs to one split.
template <class Element>
__device__ __forceinline__ RowEnd finish_row(
    const AttnParams& p, const ScoreScale& scale, int head, bool with_sink, float m, float l) {
  float factor = static_cast<float>(p.dropout.scale);
  float rest = Softmax<Element, 1>::lse_rest(m, scale);
  m *= scale.unit;
  if (p.sinks.ptr != nullptr && with_sink) {
    const float sink = static_cast<const float*>(p.sinks.ptr)[head];
    const float most = fmaxf(m, sink);
    if (most != -INFINITY) {
      const float old = ptx::exp2_approx((m - most) * kLog2e);
      l = l * old + ptx::exp2_approx((sink - most) * kLog2e);
      factor *= old;
      if (m < most) rest = 0;
      m = most;
    }
  }
  return {m, l, rest, l == 0 ? 0.0f : factor * ptx::reciprocal_approx(l)};
}

// This thread's columns below `dim` of row h of a 16-row block -> a partial row.
template <int kColumns>
__device__ __forceinline__ void store_partial(
    const float (&out)[kColumns][4], int h, float factor, float* row, int dim) {
  row += fragment_column(0);
  dim -= fragment_column(0);
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
    const float2 pair = make_float2(out[n][2 * h] * factor, out[n][2 * h + 1] * factor);
    if (8 * n < dim) *reinterpret_cast<float2*>(row + 8 * n) = pair;
  }
}

// The same -> row `row` + 8 * h + lane / 4 of a swizzled tile with kRows rows, in Elements.
template <class Element, int kRows, int kColumns>
__device__ __forceinline__ void stage_row(
    const float (&out)[kColumns][4], int h, float factor, uint8_t* tile, int row) {
  const uint32_t line = threadIdx.x % 32 / 4;  // its number swizzles, steps of 8 rows do not
  if constexpr (sizeof(Element) == 4) {
    const uint32_t t = threadIdx.x % 4, swizzled = (t / 2 ^ line) * 16 + t % 2 * 8;
    const uint32_t first = smem_address(tile) + (row + line) * 128 + swizzled;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      ptx::store_shared_8((first ^ (n % 4 * 32)) + (n / 4 * kRows + 8 * h) * 128,
                          out[n][2 * h] * factor, out[n][2 * h + 1] * factor);
    }
    return;
  } else {
    const uint32_t first = smem_address(tile) + row * 128 + line * 144 + fragment_column(0) * 2;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      const uint32_t pair =
          pack_pair(Element(), out[n][2 * h] * factor, out[n][2 * h + 1] * factor);
      asm volatile(
          "st.shared.u32 [%0], %1;" ::"r"((first ^ (n % 8 * 16)) + (n / 8 * kRows + 8 * h) * 128),
          "r"(pair)
          : "memory");
    }
  }
}

// Rows [0, kRows) of a swizzled tile with kTileRows rows -> global memory, by one warp. Rows of
// `out` from `begin` on, columns [0, dim) of them.
template <int kTileRows, int kRows, int kDim, class Rows>
__device__ __forceinline__ void store_rows(const uint8_t* tile,
                                           int row_in_tile,
                                           const Rows& out,
                                           int begin,
                                           int limit,
                                           int dim,
                                           bool whole_chunks) {
  using Element = std::remove_const_t<std::remove_pointer_t<decltype(out.base)>>;
  constexpr int kEach = kChunkOf<Element>, kChunks = kDim / kEach;
  const int chunks = whole_chunks ? dim / kEach : 0;  // of 16 bytes at once
#pragma unroll 4
  for (int c = threadIdx.x % 32; c < kRows * kChunks; c += 32) {
    const int row = c / kChunks, chunk = c % kChunks;
    if (begin + row >= limit || chunk >= chunks) continue;
    Element* to = const_cast<Element*>(out(begin + row)) + chunk * kEach;
    *reinterpret_cast<uint4*>(to) =
        *reinterpret_cast<const uint4*>(tile + tile_offset<kTileRows>(row_in_tile + row, chunk));
  }
  const int first = chunks * kEach, rest = dim - first;  // element by element
  if (rest <= 0) return;
#pragma unroll 1
  for (int c = threadIdx.x % 32; c < kRows * rest; c += 32) {
    const int row = c / rest, column = first + c % rest;
    if (begin + row >= limit) continue;
    const uint32_t at = tile_offset<kTileRows>(row_in_tile + row, column / kEach) +
                        column % kEach * static_cast<uint32_t>(sizeof(Element));
    const_cast<Element*>(out(begin + row))[column] = *reinterpret_cast<const Element*>(tile + at);
  }
}

}  // namespace flash_attn
