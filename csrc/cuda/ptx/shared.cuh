// SPDX-License-Identifier: BSD-3-Clause
// Shared memory by its own addresses, "Data Movement and Conversion Instructions: ld, st". One
// instruction a function.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

namespace flash_attn::ptx {

// ld.shared.f32.
__device__ __forceinline__ float load_shared_4(uint32_t address) {
  float r;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(r) : "r"(address) : "memory");
  return r;
}

// ld.shared.v2.f32. `address` is a multiple of 8.
__device__ __forceinline__ float2 load_shared_8(uint32_t address) {
  float2 r;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(r.x), "=f"(r.y) : "r"(address) : "memory");
  return r;
}

// ld.shared.v4.b32. `address` is a multiple of 16.
__device__ __forceinline__ uint4 load_shared_16(uint32_t address) {
  uint4 r;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "r"(address)
               : "memory");
  return r;
}

// st.shared.b32.
__device__ __forceinline__ void store_shared_4(uint32_t address, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// st.shared.v4.b32. `address` is a multiple of 16.
__device__ __forceinline__ void store_shared_16(uint32_t address, uint4 value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

// st.shared.v2.f32. `address` is a multiple of 8.
__device__ __forceinline__ void store_shared_8(uint32_t address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

}  // namespace flash_attn::ptx
