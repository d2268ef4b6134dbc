// SPDX-License-Identifier: BSD-3-Clause
// Operands of mma in swizzled tiles (tile/swizzle.cuh): addresses cheap enough to be computed once.
// A tile begins at a multiple of 1024 bytes (eight rows), so moving by 16 rows is an addition and
// moving by 16 columns an exclusive or, both with constants.
//
//   rows_operand     16 rows x 16 columns: A of its rows, or with .trans B whose k are the rows
//   columns_operand  the same with the middle matrices exchanged: B whose n are the rows, or with
//                    .trans A whose k are the rows
#pragma once

#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/swizzle.cuh"

namespace flash_attn {

constexpr uint32_t kRowBlockBytes = 16 * 2 * kPanelColumns;  // 16 rows of a panel

// The calling lane's part of the operand at `address`, whose columns may have been chosen already.
__device__ __forceinline__ uint32_t rows_operand(uint32_t address) {
  const uint32_t lane = threadIdx.x % 32;
  return address + lane % 16 * 128 ^ (lane / 16 ^ lane % 8) * 16;
}
__device__ __forceinline__ uint32_t columns_operand(uint32_t address) {
  const uint32_t lane = threadIdx.x % 32;
  return address + (lane % 8 + lane / 16 * 8) * 128 ^ (lane / 8 % 2 ^ lane % 8) * 16;
}

// Columns 16 * pair … of a tile of kRows rows.
template <int kRows>
__device__ __forceinline__ uint32_t operand_at(uint32_t address, int pair) {
  return (address ^ (pair % 4 * 32)) + pair / 4 * (kRows * 128);
}

// The A operand `a` (16 rows, columns 16 * pair …) -> a tile, whose rows begin at `address`.
__device__ __forceinline__ void store_operand(uint32_t address, int pair, const uint32_t (&a)[4]) {
#if __CUDA_ARCH__ >= 900
  ptx::store_matrix_x4(operand_at<0>(rows_operand(address), pair), a);
#else
  const uint32_t lane = threadIdx.x % 32, row = lane / 4;
  const uint32_t to = (operand_at<0>(address, pair) + row * 128 ^ row * 16) + lane % 4 * 4;
  ptx::store_shared_4(to, a[0]);
  ptx::store_shared_4(to + 8 * 128, a[1]);
  ptx::store_shared_4(to ^ 16, a[2]);
  ptx::store_shared_4((to ^ 16) + 8 * 128, a[3]);
#endif
}

// Eight elements, as two neighbouring accumulators hold them -> A operand.
template <class Element>
__device__ __forceinline__ void chunk_operand(uint32_t (&a)[4], const float (&x)[8]) {
#pragma unroll
  for (int pair = 0; pair < 4; ++pair)
    a[pair] = pack_pair(Element(), x[2 * pair], x[2 * pair + 1]);
}

__device__ __forceinline__ float2 unpack_pair(f16, uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}
__device__ __forceinline__ float2 unpack_pair(bf16, uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

}  // namespace flash_attn
