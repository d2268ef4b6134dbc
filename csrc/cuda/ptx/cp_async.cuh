// SPDX-License-Identifier: BSD-3-Clause
// Asynchronous copies global -> shared memory, "Data Movement and Conversion Instructions:
// cp.async". One instruction a function. sm_75 has none: there the copy is done on the spot and the
// waits are empty.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

namespace flash_attn::ptx {

// cp.async.cg 16 bytes, of which the first `bytes` (0 to 16, even) are read and the rest is zero.
// Both addresses are multiples of 16; with bytes == 0 `source` is not read.
__device__ __forceinline__ void copy_async_16(uint32_t smem, const void* source, int bytes) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(source), "r"(bytes)
               : "memory");
#else
  uint32_t word[4] = {0, 0, 0, 0};
  if (bytes == 16) {
    const uint4 all = *static_cast<const uint4*>(source);
    word[0] = all.x, word[1] = all.y, word[2] = all.z, word[3] = all.w;
  } else {
#pragma unroll
    for (int half = 0; half < 8; ++half) {
      if (2 * half >= bytes) break;
      const uint32_t value = static_cast<const uint16_t*>(source)[half];
      word[half / 2] |= value << (half % 2 * 16);
    }
  }
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(word[0]), "r"(word[1]),
               "r"(word[2]), "r"(word[3])
               : "memory");
#endif
}

// cp.async.commit_group: what this thread has issued since the last one is a group.
__device__ __forceinline__ void copy_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// cp.async.wait_group: at most kPending of this thread's newest groups are still under way.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

}  // namespace flash_attn::ptx
