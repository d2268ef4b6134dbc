// SPDX-License-Identifier: BSD-3-Clause
// The products of a warp whose operands are fp32, on tensor cores that multiply tf32: x = high +
// low with 11 bits each, and low * high + high * low + high * high loses 2^-22 of a product.
//
// k may be permuted alike in A and B. Thread t of a quad takes the neighbours 2t and 2t + 1 of
// eight for the k = t and t + 4 of mma (ptx/mma.cuh): where k are columns of a tile, both come by
// one load of 8 bytes, and an accumulator (columns 2t, 2t + 1) is an A operand as it stands.
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/tile/swizzle.cuh"

namespace flash_attn::sm80 {

// This lane's offset in a tile: row g, columns 2t and 2t + 1. A operands and B whose n are rows.
__device__ __forceinline__ uint32_t pair_lane() {
  const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  return g * 128 + ((t / 2) ^ g) * 16 + t % 2 * 8;
}
// The same of row 2t, column g: B whose k are rows; next_row() is row 2t + 1.
__device__ __forceinline__ uint32_t column_pair_lane() {
  const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  return 2 * t * 128 + ((g / 4) ^ (2 * t)) * 16 + g % 4 * 4;
}
__device__ __forceinline__ uint32_t next_row(uint32_t even_row) {
  return (even_row ^ 16) + 128;
}

// N numbers as high and low tf32. High is rounded to nearest, by integers since conversions take
// four times as long; low is exact in 12 bits, of which mma reads 11.
template <int N>
struct Split {
  uint32_t high[N], low[N];

  __device__ __forceinline__ void set(int n, float x) {
    high[n] = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
    low[n] = __float_as_uint(x - __uint_as_float(high[n]));
  }
};

// c (16 x 8) += a * b of eight k, the small products first. Tensor cores truncate: an ordinary
// addition keeps that from becoming a bias over many steps.
__device__ __forceinline__ void multiply_step(float (&c)[4], const Split<4>& a, const Split<2>& b) {
  float sum[4] = {};
  ptx::mma_16x8x8(sum, a.low, b.high[0], b.high[1]);
  ptx::mma_16x8x8(sum, a.high, b.low[0], b.low[1]);
  ptx::mma_16x8x8(sum, a.high, b.high[0], b.high[1]);
#pragma unroll
  for (int e = 0; e < 4; ++e)
    c[e] += sum[e];
}

// c (16 * kRowBlocks, 8 * kColumns) = A B^T over kDim columns. a: pair_lane of the warp's first row
// in a tile of kARows; b: pair_lane of the first of 8 * kColumns rows in a tile of kBRows.
template <int kDim, int kARows, int kBRows, int kRowBlocks, int kColumns>
__device__ __forceinline__ void warp_multiply_rows(float (&c)[kRowBlocks][kColumns][4],
                                                   uint32_t a,
                                                   uint32_t b) {
  constexpr int kPanelSteps = 4;
  a = here(a);
  b = here(b);
  static_assert(kDim % (8 * kPanelSteps) == 0);
#pragma unroll
  for (int e = 0; e < kRowBlocks * kColumns * 4; ++e)
    c[e / 4 / kColumns][e / 4 % kColumns][e % 4] = 0;
#pragma unroll 1
  for (int panel = 0; panel < kDim / 8 / kPanelSteps; ++panel) {
#pragma unroll
    for (int k = 0; k < kPanelSteps; ++k) {
      Split<4> rows[kRowBlocks];
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float2 pair = ptx::load_shared_8(fragment_at<kARows>(a, 16 * r + 8 * h, k));
          rows[r].set(h, pair.x);
          rows[r].set(h + 2, pair.y);
        }
      }
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        const float2 pair = ptx::load_shared_8(fragment_at<kBRows>(b, 8 * n, k));
        Split<2> columns;
        columns.set(0, pair.x);
        columns.set(1, pair.y);
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r)
          multiply_step(c[r][n], rows[r], columns);
      }
    }
    a += kARows * 128;
    b += kBRows * 128;
  }
}

// c (16 * kRowBlocks, 8 * kColumns) += A B over 8 * kSteps rows of B. a: accumulators, whose
// columns are B's rows; b: column_pair_lane of the first of them in a tile of kBRows, with the
// first of the columns chosen.
template <int kBRows, int kRowBlocks, int kColumns, int kSteps>
__device__ __forceinline__ void warp_multiply_add(float (&c)[kRowBlocks][kColumns][4],
                                                  const float (&a)[kRowBlocks][kSteps][4],
                                                  uint32_t b) {
  b = here(b);
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    Split<4> rows[kRowBlocks];
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        rows[r].set(e, a[r][k][e % 2 * 2 + e / 2]);
    }
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      const uint32_t at = fragment_at<kBRows>(b, 8 * k, n);
      Split<2> columns;
      columns.set(0, ptx::load_shared_4(at));
      columns.set(1, ptx::load_shared_4(next_row(at)));
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r)
        multiply_step(c[r][n], rows[r], columns);
    }
  }
}

}  // namespace flash_attn::sm80
