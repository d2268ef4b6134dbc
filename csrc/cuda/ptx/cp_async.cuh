// SPDX-License-Identifier: BSD-3-Clause
// Asynchronous copies global -> shared memory, "Data Movement and Conversion Instructions:
// cp.async". One instruction a function. sm_75 has none: there the copy is done on the spot and the
// waits are empty.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

namespace flash_attn::ptx {

// cp.async.cg 16 bytes; `bytes` is 16, or 0 for zeros, when `source` is not read. Both addresses
// are multiples of 16.
__device__ __forceinline__ void copy_async_16(uint32_t smem, const void* source, int bytes) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(source), "r"(bytes)
               : "memory");
#else
  const uint4 all = bytes != 0 ? *static_cast<const uint4*>(source) : make_uint4(0, 0, 0, 0);
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(all.x), "r"(all.y),
               "r"(all.z), "r"(all.w)
               : "memory");
#endif
}

// The same of all 16 bytes, or of none (zero then) when not `live`; nothing when not `wanted`. Both
// are predicates of the instruction: no branch parts what stands around it.
__device__ __forceinline__ void copy_async_16_if(bool wanted,
                                                 uint32_t smem,
                                                 const void* source,
                                                 bool live) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "{\n"
      ".reg .pred wanted, ignored;\n"
      "setp.ne.s32 wanted, %0, 0;\n"
      "setp.eq.s32 ignored, %3, 0;\n"
      "@wanted cp.async.cg.shared.global [%1], [%2], 16, ignored;\n"
      "}" ::"r"(static_cast<int>(wanted)),
      "r"(smem), "l"(source), "r"(static_cast<int>(live))
      : "memory");
#else
  if (wanted) copy_async_16(smem, source, live ? 16 : 0);
#endif
}

// cp.async.ca 4 bytes, or zero when not `live`. Both addresses are multiples of 4.
__device__ __forceinline__ void copy_async_4(uint32_t smem, const float* source, bool live) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "{\n"
      ".reg .pred ignored;\n"
      "setp.eq.s32 ignored, %2, 0;\n"
      "cp.async.ca.shared.global [%0], [%1], 4, ignored;\n"
      "}" ::"r"(smem),
      "l"(source), "r"(static_cast<int>(live))
      : "memory");
#else
  const float x = live ? *source : 0.0f;
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(smem), "f"(x) : "memory");
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
