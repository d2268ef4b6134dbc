// SPDX-License-Identifier: BSD-3-Clause
// Accumulator fragments of mma: which element a register is, and how probabilities become the next
// product's A operand without leaving their thread (ptx/mma.cuh has the layout).
#pragma once

#include "cuda/tile/element.cuh"

namespace flash_attn {

// Of c[4] in a 16 x 8 block: row and column inside the block.
__device__ __forceinline__ int fragment_row(int c) {
  return threadIdx.x % 32 / 4 + c / 2 * 8;
}
__device__ __forceinline__ int fragment_column(int c) {
  return threadIdx.x % 4 * 2 + c % 2;
}

__device__ __forceinline__ uint32_t pack_pair(f16, float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ uint32_t pack_pair(bf16, float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Two neighbouring columns of a row of shared memory.
template <class Element>
__device__ __forceinline__ void store_pair(void* to, float low, float high) {
  if constexpr (sizeof(Element) == 4) {
    *static_cast<float2*>(to) = make_float2(low, high);
  } else {
    *static_cast<uint32_t*>(to) = pack_pair(Element(), low, high);
  }
}

// Two neighbouring 16 x 8 accumulators -> A operand of 16 x 16.
template <class Element>
__device__ __forceinline__ void to_operand(uint32_t (&a)[4],
                                           const float (&left)[4],
                                           const float (&right)[4]) {
  a[0] = pack_pair(Element(), left[0], left[1]);
  a[1] = pack_pair(Element(), left[2], left[3]);
  a[2] = pack_pair(Element(), right[0], right[1]);
  a[3] = pack_pair(Element(), right[2], right[3]);
}

// Over the four threads that share a row.
__device__ __forceinline__ float row_reduce_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float row_reduce_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Over the warp, in every lane.
__device__ __forceinline__ float warp_max(float x) {
  for (int mask = 16; mask > 0; mask /= 2)
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, mask));
  return x;
}
template <class Number>
__device__ __forceinline__ Number warp_sum(Number x) {
  for (int mask = 16; mask > 0; mask /= 2)
    x += __shfl_xor_sync(0xffffffffu, x, mask);
  return x;
}

}  // namespace flash_attn
