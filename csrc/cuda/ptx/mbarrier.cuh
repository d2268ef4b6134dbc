// SPDX-License-Identifier: BSD-3-Clause
// Barriers in shared memory that count arrivals and bytes of asynchronous copies. A phase ends when
// both are complete; waiting names the parity of the phase, which begins at 0.
#pragma once

#include <cstdint>

namespace flash_attn::ptx {

// mbarrier.init: `count` arrivals end a phase. By one thread, followed by mbarrier_init_fence.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// fence.mbarrier_init: makes the initialisations known to asynchronous copies.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// mbarrier.arrive
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// mbarrier.arrive.expect_tx: arrives, and the phase waits for `bytes` more.
__device__ __forceinline__ void mbarrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// mbarrier.try_wait.parity until the phase of this parity has ended.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}"
      :
      : "r"(barrier), "r"(parity)
      : "memory");
}

}  // namespace flash_attn::ptx
