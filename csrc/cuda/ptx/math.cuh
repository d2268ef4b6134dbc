// SPDX-License-Identifier: BSD-3-Clause
// Arithmetic that the language has no name for, and of the special-function unit. One instruction a
// function.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace flash_attn {

constexpr float kLog2e = 1.4426950408889634f;

}  // namespace flash_attn

namespace flash_attn::ptx {

// ex2.approx.ftz: 2^x, relative error 2^-22; 0 for -inf.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// rcp.approx.ftz: 1 / x, relative error 2^-23; 0 for inf.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// lg2.approx.ftz: log2 x, absolute error 2^-22.
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// fma.rn under a predicate: sum += a * b, or nothing, whatever they are.
__device__ __forceinline__ void add_product_if(bool wanted, float& sum, float a, float b) {
  asm("{ .reg .pred q;\n setp.ne.s32 q, %3, 0;\n @q fma.rn.f32 %0, %1, %2, %0; }"
      : "+f"(sum)
      : "f"(a), "f"(b), "r"(static_cast<int>(wanted)));
}

// selp under one bit of a word: x = -inf where it is 0. Several such in a row set their predicates
// by one instruction.
__device__ __forceinline__ void hide_unless(float& x, uint32_t word, uint32_t bit) {
  asm("{ .reg .pred q;\n .reg .b32 t;\n and.b32 t, %1, %2;\n setp.ne.b32 q, t, 0;\n"
      " selp.f32 %0, %0, 0fff800000, q; }"
      : "+f"(x)
      : "r"(word), "r"(bit));
}

// prmt.b32: bytes of two words, or the signs of bytes, by the four digits of `choice`.
__device__ __forceinline__ uint32_t bytes_of(uint32_t a, uint32_t b, uint32_t choice) {
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(choice));
  return r;
}

// min.NaN: the lesser, NaN if one is. sm_75 has no such instruction, but two that do.
__device__ __forceinline__ float min_or_nan(float x, float y) {
#if __CUDA_ARCH__ >= 800
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
  return r;
#else
  return x > y ? y : x;
#endif
}

// cvt.rn.relu (sm_80; elsewhere by hand): two numbers to 16 bits, the first in the low half; 0 for
// what is negative.
__device__ __forceinline__ uint32_t pack_positive(__half, float low, float high) {
#if __CUDA_ARCH__ >= 800
  uint32_t r;
  asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
#else
  const __half2 pair = __floats2half2_rn(fmaxf(low, 0.0f), fmaxf(high, 0.0f));
  return *reinterpret_cast<const uint32_t*>(&pair);
#endif
}
__device__ __forceinline__ uint32_t pack_positive(__nv_bfloat16, float low, float high) {
  uint32_t r = 0;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#endif
  return r;
}

}  // namespace flash_attn::ptx
