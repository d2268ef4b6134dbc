// SPDX-License-Identifier: BSD-3-Clause
// The products of a warp whose operands are fp32, on tensor cores that multiply bf16: a number is
// exactly the sum of three with 8 bits each, and of their nine products the six largest lose 2^-24
// of a product at most. They take as long as the three of two tf32 parts, which lose 2^-22.
#pragma once

#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/tile/fragment.cuh"
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

// Registers of operands, pairs of neighbouring k, as bf16 parts, the largest first.
template <int N>
struct Parts {
  uint32_t part[3][N];

  __device__ __forceinline__ void set(int n, float x, float y) {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const uint32_t pair = part[i][n] = pack_pair(bf16(), x, y);
      x -= __uint_as_float(pair << 16);
      y -= __uint_as_float(pair & 0xffff0000u);
    }
  }
};

// c (16 x 8) += a * b of sixteen k, or of eight, the small products first. Tensor cores truncate:
// an ordinary addition keeps that from becoming a bias over many steps. kTurned: in the order that
// gives the bits of the transposed product.
template <bool kTurned, int N>
__device__ __forceinline__ void multiply_step(float (&c)[4],
                                              const Parts<2 * N>& a,
                                              const Parts<N>& b) {
  float sum[4] = {};
  const auto add = [&](int i, int j) {
    const uint32_t(&rows)[2 * N] = a.part[kTurned ? j : i];
    const uint32_t(&columns)[N] = b.part[kTurned ? i : j];
    if constexpr (N == 2) {
      ptx::mma_16x8x16(bf16(), sum, rows, columns[0], columns[1]);
    } else {
      ptx::mma_16x8x8(bf16(), sum, rows, columns[0]);
    }
  };
  add(1, 1);
  add(2, 0);
  add(0, 2);
  add(1, 0);
  add(0, 1);
  add(0, 0);
#pragma unroll
  for (int e = 0; e < 4; ++e)
    c[e] += sum[e];
}

// c (16 * kRowBlocks, 8 * kColumns) = A B^T over kDim columns. a: pair_lane of the warp's first row
// in a tile of kARows; b: pair_lane of the first of 8 * kColumns rows in a tile of kBRows. kTurned:
// A are keys; scores are the same, to the bit, as where they are queries.
template <int kDim, int kARows, int kBRows, bool kTurned = false, int kRowBlocks, int kColumns>
__device__ __forceinline__ void warp_multiply_rows(float (&c)[kRowBlocks][kColumns][4],
                                                   uint32_t a,
                                                   uint32_t b) {
  a = here(a);
  b = here(b);
  static_assert(kDim % kPanelOf<float> == 0);
#pragma unroll
  for (int e = 0; e < kRowBlocks * kColumns * 4; ++e)
    c[e / 4 / kColumns][e / 4 % kColumns][e % 4] = 0;
#pragma unroll 1
  for (int panel = 0; panel < kDim / kPanelOf<float>; ++panel) {
#pragma unroll
    for (int k = 0; k < kPanelOf<float> / 8; k += 2) {
      Parts<4> rows[kRowBlocks];
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t at = fragment_at<kARows>(a, 16 * r + i % 2 * 8, k + i / 2);
          const float2 pair = ptx::load_shared_8(at);
          rows[r].set(i, pair.x, pair.y);
        }
      }
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        Parts<2> columns;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float2 pair = ptx::load_shared_8(fragment_at<kBRows>(b, 8 * n, k + i));
          columns.set(i, pair.x, pair.y);
        }
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r)
          multiply_step<kTurned>(c[r][n], rows[r], columns);
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
  constexpr int kEach = kSteps % 2 == 0 ? 2 : 1;  // steps at once
  b = here(b);
#pragma unroll
  for (int k = 0; k < kSteps; k += kEach) {
    Parts<2 * kEach> rows[kRowBlocks];
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
      for (int i = 0; i < 2 * kEach; ++i) {
        const float(&from)[4] = a[r][k + i / 2];
        rows[r].set(i, from[i % 2 * 2], from[i % 2 * 2 + 1]);
      }
    }
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      Parts<kEach> columns;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const uint32_t at = fragment_at<kBRows>(b, 8 * (k + i), n);
        columns.set(i, ptx::load_shared_4(at), ptx::load_shared_4(next_row(at)));
      }
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r)
        multiply_step<false>(c[r][n], rows[r], columns);
    }
  }
}

}  // namespace flash_attn::sm80
