// SPDX-License-Identifier: BSD-3-Clause
// Loads from global memory that bypass shared memory. One instruction a function.
#pragma once

#include <cuda_runtime.h>

namespace flash_attn::ptx {

// ld.global.nc, "Data Movement and Conversion Instructions: ld.global.nc". 16 bytes through the
// read-only path, not kept in L1: for data that a block reads once. `address` is 16-byte aligned.
__device__ __forceinline__ uint4 load_once_16(const void* address) {
  uint4 r;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
      : "l"(address));
  return r;
}

// prefetch.global.L2, "Data Movement and Conversion Instructions: prefetch".
__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

}  // namespace flash_attn::ptx
