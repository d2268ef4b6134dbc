// SPDX-License-Identifier: BSD-3-Clause
// Barriers of some warps of a block, "Parallel Synchronization and Communication Instructions:
// barrier". One instruction a function. `id` 0 is that of __syncthreads.
#pragma once

#include <cuda_runtime.h>

namespace flash_attn::ptx {

// barrier.sync: `threads` threads wait for each other; what they wrote is visible to all of them.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// barrier.arrive: counts this warp among the `threads` of barrier `id` and goes on.
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// barrier.red.or.pred: the same, and whether some of them said yes.
__device__ __forceinline__ bool barrier_any(int id, int threads, bool yes) {
  int any;
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      "setp.ne.s32 p, %3, 0;\n"
      "barrier.red.or.pred q, %1, %2, p;\n"
      "selp.s32 %0, 1, 0, q;\n"
      "}"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<int>(yes))
      : "memory");
  return any != 0;
}

}  // namespace flash_attn::ptx
