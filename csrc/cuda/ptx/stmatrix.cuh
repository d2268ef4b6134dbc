// SPDX-License-Identifier: BSD-3-Clause
// Matrix fragments -> shared memory, "Warp Level Matrix Multiply-Accumulate Instructions:
// stmatrix". One instruction a function.
#pragma once

#include <cstdint>

namespace flash_attn::ptx {

// stmatrix.m8n8.x4.b16 (sm_90), the inverse of ldmatrix: lane l gives the address of the 16-byte
// row l % 8 of matrix l / 8; r[m] holds of matrix m row lane / 4, columns 2 * (lane % 4) and + 1.
__device__ __forceinline__ void store_matrix_x4(uint32_t address, const uint32_t (&r)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
#endif
}

}  // namespace flash_attn::ptx
