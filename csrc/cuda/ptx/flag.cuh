// SPDX-License-Identifier: BSD-3-Clause
// Flags in global memory by which blocks of one kernel hand over what they wrote, "Data Movement
// and Conversion Instructions: ld, st" and "Parallel Synchronization and Communication
// Instructions: atom". One instruction a function.
#pragma once

#include <cuda_runtime.h>

namespace flash_attn::ptx {

// ld.acquire: what was written before the release of the value that it sees is visible after it.
__device__ __forceinline__ int load_acquire(const int* flag) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

// st.release: after all that this thread wrote, or saw others write.
__device__ __forceinline__ void store_release(int* flag, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

// atom.add.acq_rel: both at once; the value before.
__device__ __forceinline__ int add_acquire_release(int* counter, int value) {
  int before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(value)
               : "memory");
  return before;
}

}  // namespace flash_attn::ptx
