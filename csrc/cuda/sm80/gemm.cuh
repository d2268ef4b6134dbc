// SPDX-License-Identifier: BSD-3-Clause
// The two products of the forward pass, for one warp. Every B fragment serves all row blocks of the
// warp, and is read from shared memory one step before its use.
//
// Addresses: a lane has one base in a tile for all its ldmatrix; a step of 16 columns flips bits 5
// and 6 of it (the swizzle), a step of 8 rows adds 1024 bytes, so that four registers and
// immediates reach the whole tile. Tiles begin at multiples of 1024 bytes.
#pragma once

#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/sm80/gemm_f32.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/swizzle.cuh"

namespace flash_attn::sm80 {

// This lane's offset for ldmatrix of 16 rows x 16 columns, the four matrices in the order rows 0-7,
// rows 8-15, then the same of columns 8-15: A operands, and V transposed.
__device__ __forceinline__ uint32_t row_lane() {
  const int lane = threadIdx.x % 32;
  return lane % 16 * 128 + ((lane / 16) ^ (lane % 8)) * 16;
}
// The same with columns before rows: K.
__device__ __forceinline__ uint32_t column_lane() {
  const int lane = threadIdx.x % 32;
  return (lane / 16 * 8 + lane % 8) * 128 + ((lane / 8 % 2) ^ (lane % 8)) * 16;
}
template <class Element>
__device__ __forceinline__ uint32_t query_lane() {
  return sizeof(Element) == 4 ? pair_lane() : row_lane();
}
template <class Element>
__device__ __forceinline__ uint32_t key_lane() {
  return sizeof(Element) == 4 ? pair_lane() : column_lane();
}
template <class Element>
__device__ __forceinline__ uint32_t value_lane() {
  return sizeof(Element) == 4 ? column_pair_lane() : row_lane();
}

// A operands of Q that a warp keeps: the first kSteps steps of 16 columns.
template <int kSteps, int kRowBlocks, int kQueryRows>
struct KeptQueries {
  uint32_t a[kSteps > 0 ? kSteps : 1][kRowBlocks][4];

  // q: row_lane of the warp's first row in a tile of kQueryRows.
  __device__ __forceinline__ explicit KeptQueries(uint32_t q) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int b = 0; b < kRowBlocks; ++b)
        ptx::load_matrix_x4(a[step][b], fragment_at<kQueryRows>(q, 16 * b, step));
    }
  }
};

// S (16 * kRowBlocks, kKeys) = Q K^T. q: row_lane of the warp's first row in a tile of kQueryRows,
// of which the first kKept steps are in `kept`; k: column_lane of the first key in a tile of
// kTileKeys x kDim. Fragments of K are read kAhead steps before their use.
template <class Element,
          int kDim,
          int kKeys,
          int kTileKeys,
          int kQueryRows,
          int kAhead = 1,
          int kRowBlocks,
          int kKept>
__device__ __forceinline__ void warp_matmul_qk(
    float (&s)[kRowBlocks][kKeys / 8][4],
    const KeptQueries<kKept, kRowBlocks, kQueryRows>& kept,
    uint32_t q,
    uint32_t k) {
  constexpr int kSteps = kDim / 16, kEach = kKeys / 16;
#pragma unroll
  for (int b = 0; b < kRowBlocks; ++b)
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
      s[b][n][0] = s[b][n][1] = s[b][n][2] = s[b][n][3] = 0;
  constexpr int kHeld = kAhead + 1;
  uint32_t a[2][kRowBlocks][4];
  uint32_t r[kHeld][4];  // keys 0-7 and 8-15, dims 0-7 and 8-15 of each
  const auto load_q = [&](int step) {
    if (step < kKept) return;
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b)
      ptx::load_matrix_x4(a[step % 2][b], fragment_at<kQueryRows>(q, 16 * b, step));
  };
  const auto load_k = [&](int at) {
    if (at < kSteps * kEach)
      ptx::load_matrix_x4(r[at % kHeld], fragment_at<kTileKeys>(k, at % kEach * 16, at / kEach));
  };
  load_q(0);
#pragma unroll
  for (int at = 0; at < kAhead; ++at)
    load_k(at);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      const int at = step * kEach + n;
      if (n == 0 && step + 1 < kSteps) load_q(step + 1);
      load_k(at + kAhead);
      const uint32_t(&keys)[4] = r[at % kHeld];
#pragma unroll
      for (int b = 0; b < kRowBlocks; ++b) {
        using Fragment = const uint32_t[4];
        Fragment& loaded = a[step % 2][b];
        Fragment& rows = step < kKept ? kept.a[step < kKept ? step : 0][b] : loaded;
        ptx::mma_16x8x16(Element(), s[b][2 * n], rows, keys[0], keys[1]);
        ptx::mma_16x8x16(Element(), s[b][2 * n + 1], rows, keys[2], keys[3]);
      }
    }
  }
}
// The same with nothing kept.
template <class Element,
          int kDim,
          int kKeys,
          int kTileKeys,
          int kQueryRows,
          int kAhead = 1,
          int kRowBlocks>
__device__ __forceinline__ void warp_matmul_qk(float (&s)[kRowBlocks][kKeys / 8][4],
                                               uint32_t q,
                                               uint32_t k) {
  const KeptQueries<0, kRowBlocks, kQueryRows> none(q);
  warp_matmul_qk<Element, kDim, kKeys, kTileKeys, kQueryRows, kAhead>(s, none, q, k);
}

// out (16 * kRowBlocks, kDim) += P V. `operand(a, step)` gives P of keys 16 * step … as A operands;
// v: row_lane of the first key and column in a tile of kTileKeys rows.
template <class Element, int kDim, int kKeys, int kTileKeys, int kRowBlocks, class Operand>
__device__ __forceinline__ void warp_matmul_pv(float (&out)[kRowBlocks][kDim / 8][4],
                                               const Operand& operand,
                                               uint32_t v) {
  constexpr int kSteps = kKeys / 16, kEach = kDim / 16;
  uint32_t r[2][4];  // keys 0-7 and 8-15 of dims 0-7, then of dims 8-15
  const auto load_v = [&](int at) {
    if (at < kSteps * kEach) {
      ptx::load_matrix_x4_trans(r[at % 2], fragment_at<kTileKeys>(v, at / kEach * 16, at % kEach));
    }
  };
  load_v(0);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t a[kRowBlocks][4];
    operand(a, step);
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      const int at = step * kEach + n;
      load_v(at + 1);
      const uint32_t(&values)[4] = r[at % 2];
#pragma unroll
      for (int b = 0; b < kRowBlocks; ++b) {
        ptx::mma_16x8x16(Element(), out[b][2 * n], a[b], values[0], values[1]);
        ptx::mma_16x8x16(Element(), out[b][2 * n + 1], a[b], values[2], values[3]);
      }
    }
  }
}

}  // namespace flash_attn::sm80
