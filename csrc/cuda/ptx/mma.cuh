// SPDX-License-Identifier: BSD-3-Clause
// The product of a warp, "Warp Level Matrix Multiply-Accumulate Instructions: mma". One instruction
// a function; on sm_75, which lacks the k16 shape, two.
//
// With g = lane / 4 and t = lane % 4, a thread holds of A (16 x 16) rows g, g + 8 and columns 2t,
// 2t + 1, 2t + 8, 2t + 9 (a[0]: row g; a[1]: row g + 8; a[2], a[3]: the same, columns + 8); of B
// (16 x 8) column g, rows as A's columns (b0, b1: rows + 8); of C (16 x 8) c[0], c[1]: row g,
// columns 2t, 2t + 1; c[2], c[3]: row g + 8.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace flash_attn::ptx {

// mma.sync.aligned.m16n8k16: c += a * b, fp16.
__device__ __forceinline__ void mma_16x8x16(
    __half, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(b0));
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

// The same with bf16: sm_80 and newer. The planner offers no bf16 row below.
__device__ __forceinline__ void mma_16x8x16(
    __nv_bfloat16, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  __trap();
#endif
}

// mma.sync.aligned.m16n8k8: the first eight k of the above.
__device__ __forceinline__ void mma_16x8x8(__nv_bfloat16,
                                           float (&c)[4],
                                           const uint32_t (&a)[2],
                                           uint32_t b) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
#else
  __trap();
#endif
}

}  // namespace flash_attn::ptx
