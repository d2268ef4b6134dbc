// SPDX-License-Identifier: BSD-3-Clause
// The element types that CUDA kernels are instantiated for, their DType and their way to and from
// fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/types.h"

namespace flash_attn {

using f16 = __half;
using bf16 = __nv_bfloat16;

template <class Element>
struct ElementTraits;
template <>
struct ElementTraits<float> {
  static constexpr DType kDType = DType::kF32;
};
template <>
struct ElementTraits<f16> {
  static constexpr DType kDType = DType::kF16;
};
template <>
struct ElementTraits<bf16> {
  static constexpr DType kDType = DType::kBF16;
};

__device__ __forceinline__ float to_float(float x) {
  return x;
}
__device__ __forceinline__ float to_float(f16 x) {
  return __half2float(x);
}
__device__ __forceinline__ float to_float(bf16 x) {
  return __bfloat162float(x);
}

template <class Element>
__device__ __forceinline__ void store_element(Element* to, float x);
template <>
__device__ __forceinline__ void store_element(float* to, float x) {
  *to = x;
}
template <>
__device__ __forceinline__ void store_element(f16* to, float x) {
  *to = __float2half_rn(x);
}
template <>
__device__ __forceinline__ void store_element(bf16* to, float x) {
  *to = __float2bfloat16_rn(x);
}

}  // namespace flash_attn
