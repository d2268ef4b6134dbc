// SPDX-License-Identifier: BSD-3-Clause
// Stores to global memory, "Data Movement and Conversion Instructions: st". One instruction a
// function.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

namespace flash_attn::ptx {

// st.global.v4.b32. `to` is a multiple of 16.
__device__ __forceinline__ void store_global_16(void* to, const uint32_t (&value)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(value[0]), "r"(value[1]),
               "r"(value[2]), "r"(value[3])
               : "memory");
}

}  // namespace flash_attn::ptx
