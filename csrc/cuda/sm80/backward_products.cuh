// SPDX-License-Identifier: BSD-3-Clause
// The products of the backward pass, for one warp. Every fragment of B serves all row blocks of the
// warp. Addresses are those of tile/operand.cuh, lane included.
#pragma once

#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/tile/operand.cuh"

namespace flash_attn::sm80 {

template <int kRowBlocks, int kColumnBlocks>
__device__ __forceinline__ void zero(float (&c)[kRowBlocks][kColumnBlocks][4]) {
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
    for (int n = 0; n < kColumnBlocks; ++n)
      c[r][n][0] = c[r][n][1] = c[r][n][2] = c[r][n][3] = 0;
  }
}

struct Nothing {
  __device__ __forceinline__ void operator()(int) const {}
};

// c (16 rows a block, kColumns) += A B^T. A: rows of a tile of kARows; B: kColumns rows of a tile
// of kBRows; kDim columns of both. each(k) is called between the steps, for what else is to be
// issued meanwhile.
template <class Element,
          int kDim,
          int kARows,
          int kBRows,
          int kRowBlocks,
          int kColumnBlocks,
          class Each>
__device__ __forceinline__ void multiply_rows(float (&c)[kRowBlocks][kColumnBlocks][4],
                                              uint32_t a_rows,
                                              uint32_t b_columns,
                                              const Each& each) {
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    uint32_t a[kRowBlocks][4];
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r)
      ptx::load_matrix_x4(a[r], operand_at<kARows>(a_rows, k) + r * kRowBlockBytes);
#pragma unroll
    for (int n = 0; n < kColumnBlocks / 2; ++n) {
      uint32_t b[4];
      ptx::load_matrix_x4(b, operand_at<kBRows>(b_columns, k) + n * kRowBlockBytes);
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r) {
        ptx::mma_16x8x16(Element(), c[r][2 * n], a[r], b[0], b[1]);
        ptx::mma_16x8x16(Element(), c[r][2 * n + 1], a[r], b[2], b[3]);
      }
    }
    each(k);
  }
}

// c (16 rows a block, columns of every kColumnStep-th 16) += A B. A: 16 columns in registers. B: 16
// rows of a tile of kBRows, at b_rows with the first 16 columns chosen.
template <class Element, int kBRows, int kColumnStep, int kRowBlocks, int kColumnBlocks>
__device__ __forceinline__ void multiply_add_step(float (&c)[kRowBlocks][kColumnBlocks][4],
                                                  const uint32_t (&a)[kRowBlocks][4],
                                                  uint32_t b_rows) {
#pragma unroll
  for (int n = 0; n < kColumnBlocks / 2; ++n) {
    uint32_t b[4];
    ptx::load_matrix_x4_trans(b, operand_at<kBRows>(b_rows, kColumnStep * n));
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
      ptx::mma_16x8x16(Element(), c[r][2 * n], a[r], b[0], b[1]);
      ptx::mma_16x8x16(Element(), c[r][2 * n + 1], a[r], b[2], b[3]);
    }
  }
}

// dQ: c (16 queries a block, columns of every kColumnStep-th 16) += dS K over kKeys keys of tiles
// of kTileKeys. ds_columns: of dS^T (keys, queries) at the first query; k_rows: of K (keys, dim).
// each(k): as in multiply_rows.
template <class Element,
          int kTileKeys,
          int kKeys,
          int kColumnStep,
          int kRowBlocks,
          int kColumnBlocks,
          class Each = Nothing>
__device__ __forceinline__ void multiply_keys(float (&c)[kRowBlocks][kColumnBlocks][4],
                                              uint32_t ds_columns,
                                              uint32_t k_rows,
                                              const Each& each = {}) {
#pragma unroll
  for (int k = 0; k < kKeys / 16; ++k) {
    uint32_t a[kRowBlocks][4];
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r)
      ptx::load_matrix_x4_trans(a[r], operand_at<0>(ds_columns, r) + k * kRowBlockBytes);
    multiply_add_step<Element, kTileKeys, kColumnStep>(c, a, k_rows + k * kRowBlockBytes);
    each(k);
  }
}

}  // namespace flash_attn::sm80
