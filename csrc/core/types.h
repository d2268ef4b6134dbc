// SPDX-License-Identifier: BSD-3-Clause
// Words that every layer shares: the host+device marker, element types, small integer helpers.
// No torch, no CUDA runtime: the planner, the CPU kernels and the CUDA kernels all include this.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define FA_HD __host__ __device__ __forceinline__
#else
#define FA_HD inline
#endif

namespace flash_attn {

enum class DType : uint8_t { kF64, kF32, kF16, kBF16 };

FA_HD int dtype_bytes(DType t) {
  return t == DType::kF64 ? 8 : t == DType::kF32 ? 4 : 2;
}

// Both for non-negative a and positive b.
template <class T>
FA_HD constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}
// The exponent of a power of two.
FA_HD int exponent_of(uint32_t power) {
#if defined(__CUDA_ARCH__)
  return __ffs(static_cast<int>(power)) - 1;
#else
  int e = 0;
  while (power >>= 1)
    ++e;
  return e;
#endif
}

// a / b for non-negative a and positive b. Division is a long computation on GPUs, of 64-bit
// numbers a subroutine, and nearly all divisors here are powers of two.
FA_HD int quotient(int a, int b) {
  return (b & (b - 1)) == 0 ? a >> exponent_of(static_cast<uint32_t>(b)) : a / b;
}
FA_HD int64_t quotient(int64_t a, int b) {
  if ((b & (b - 1)) == 0) return a >> exponent_of(static_cast<uint32_t>(b));
  if ((a >> 32) == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}
template <class T>
FA_HD constexpr T round_up(T a, T b) {
  return ceil_div(a, b) * b;
}

template <class T>
FA_HD constexpr T min_of(T a, T b) {
  return b < a ? b : a;
}
template <class T>
FA_HD constexpr T max_of(T a, T b) {
  return a < b ? b : a;
}

// "No limit" of a window side.
constexpr int kUnlimited = -1;

}  // namespace flash_attn
