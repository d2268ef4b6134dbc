// SPDX-License-Identifier: BSD-3-Clause
// Additions in global memory whose result nobody waits for, "Parallel Synchronization and
// Communication Instructions: red".
#pragma once

#include <cuda_runtime.h>

namespace flash_attn::ptx {

// red.global.add.v4.f32 (sm_90; elsewhere four scalar ones): address[0 … 3] += the four values.
// `address` is a multiple of 16 bytes.
__device__ __forceinline__ void add_global_4(float* address, float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(a),
               "f"(b), "f"(c), "f"(d)
               : "memory");
#else
  const float value[4] = {a, b, c, d};
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(address + e), "f"(value[e])
                 : "memory");
  }
#endif
}

}  // namespace flash_attn::ptx
