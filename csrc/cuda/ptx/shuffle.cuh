// SPDX-License-Identifier: BSD-3-Clause
// Exchange of registers inside a warp. One instruction a function.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

namespace flash_attn::ptx {

// shfl.sync.bfly, "Data Movement and Conversion Instructions: shfl.sync". The value of lane
// (own lane ^ mask). All 32 lanes must call.
__device__ __forceinline__ float shuffle_xor(float value, int mask) {
  float r;
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;"
               : "=f"(r)
               : "f"(value), "r"(mask));
  return r;
}

// mov from %tid.x, "Special Registers: %tid". threadIdx.x, asked for anew: what is computed from it
// stays where it is written, and does not wait in registers through the loop around.
__device__ __forceinline__ int thread_index() {
  int r;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(r));
  return r;
}

// redux.sync.or (sm_80; elsewhere nothing): a number that all lanes hold alike, so that what is
// made of it goes to uniform registers. All lanes of the warp.
__device__ __forceinline__ uint32_t uniform(uint32_t value) {
#if __CUDA_ARCH__ >= 800
  uint32_t r;
  asm volatile("redux.sync.or.b32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(value));
  return r;
#else
  return value;
#endif
}

}  // namespace flash_attn::ptx
