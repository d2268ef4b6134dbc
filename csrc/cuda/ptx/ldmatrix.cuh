// SPDX-License-Identifier: BSD-3-Clause
// Shared memory -> matrix fragments, "Warp Level Matrix Multiply-Accumulate Instructions:
// ldmatrix". One instruction a function.
#pragma once

#include <cstdint>

namespace flash_attn::ptx {

// ldmatrix.m8n8.x4.b16: lane l gives the 16-byte row l % 8 of matrix l / 8; r[m] holds of matrix m
// row lane / 4, columns 2 * (lane % 4) and + 1. Addresses are shared-memory addresses.
__device__ __forceinline__ void load_matrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// The same with each matrix transposed: r[m] holds column lane / 4, rows 2 * (lane % 4) and + 1.
__device__ __forceinline__ void load_matrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

}  // namespace flash_attn::ptx
