// SPDX-License-Identifier: BSD-3-Clause
// Copies of boxes of a tensor that one thread asks for (sm_90 and newer).
#pragma once

#include <cstdint>

#include <cuda.h>

namespace flash_attn::ptx {

// elect.sync: true for one lane, always the same one. All lanes of the warp; the compiler then
// knows that one thread asks.
__device__ __forceinline__ bool elect() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(elected));
  return elected != 0;
}

// cp.async.bulk.tensor: the box of `map` at (column, row, head, batch) -> shared memory; its bytes
// count at `barrier`. What lies outside of the tensor is zero.
__device__ __forceinline__ void load_box(uint32_t to,
                                         const CUtensorMap* map,
                                         int column,
                                         int row,
                                         int head,
                                         int batch,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(barrier)
      : "memory");
}

// The same with five coordinates: (column, head, row, key head, batch), queries
// (sm90/tensor_map.h).
__device__ __forceinline__ void load_box(uint32_t to,
                                         const CUtensorMap* map,
                                         int column,
                                         int head,
                                         int row,
                                         int key_head,
                                         int batch,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to),
      "l"(map), "r"(column), "r"(head), "r"(row), "r"(key_head), "r"(batch), "r"(barrier)
      : "memory");
}

// prefetch.tensormap
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// fence.proxy.async: what this thread wrote to shared memory is there for wgmma and box copies,
// after a barrier.
__device__ __forceinline__ void proxy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace flash_attn::ptx
