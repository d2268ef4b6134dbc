// SPDX-License-Identifier: BSD-3-Clause
// wgmma: products of 64 rows by kN columns, 16 deep, by the four warps of a warpgroup, asynchronous
// (sm_90a). The accumulator fragment of each warp is that of mma_16x8x16, eight columns after
// eight: rows 16 * warp + lane / 4 and + 8.
//
// Accumulators and A registers must not be touched between the issue and the wait, which the
// compiler cannot see: hold() them after the wait and before the next fence.
#pragma once

#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace flash_attn::ptx {

// Where an operand lies in shared memory: panels of 128 bytes a row with the 128-byte swizzle.
// `leading` bytes between panels of columns that are not summed over; groups of eight rows lie 1024
// bytes apart.
__device__ __forceinline__ uint64_t wgmma_operand(uint32_t address, uint32_t leading = 16) {
  return uint64_t{(address & 0x3ffffu) >> 4} | uint64_t{leading >> 4} << 16 |
         uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

// The operand `bytes` further on. Only the low half changes: no carry leaves the address.
__device__ __forceinline__ uint64_t wgmma_operand_at(uint64_t operand, uint32_t bytes) {
  const uint32_t low = static_cast<uint32_t>(operand) + (bytes >> 4);
  return (operand & 0xffffffff00000000u) | low;
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until all but the last kPending groups are complete.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of these registers.
template <int kCount>
__device__ __forceinline__ void hold(float* x) {
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    asm volatile("" : "+f"(x[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void hold(uint32_t* x) {
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    asm volatile("" : "+r"(x[i])::"memory");
}

// clang-format off
#define FA_8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
                   "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define FA_32(d, i) FA_8(d, i), FA_8(d, i + 8), FA_8(d, i + 16), FA_8(d, i + 24)
#define FA_NAMES_64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FA_ACC_64(d) FA_32(d, 0)
#define FA_NAMES_128 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FA_ACC_128(d) FA_32(d, 0), FA_32(d, 32)
#define FA_SS_64(type)                                                               \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0;\n"                                  \
               "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" FA_NAMES_64 \
               "}, %32, %33, p, 1, 1, 0, %35;}"                                         \
               : FA_ACC_64(d) : "l"(a), "l"(b), "r"(int{accumulate}), "n"(kTransposed))
#define FA_RS_64(type)                                                               \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0;\n"                                  \
               "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" FA_NAMES_64 \
               "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;}"                 \
               : FA_ACC_64(d)                                                         \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{accumulate}), \
                 "n"(kTransposed))
#define FA_SS_128(type)                                                               \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0;\n"                                  \
               "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" FA_NAMES_128 \
               "}, %64, %65, p, 1, 1, 0, %67;}"                                         \
               : FA_ACC_128(d) : "l"(a), "l"(b), "r"(int{accumulate}), "n"(kTransposed))
#define FA_RS_128(type)                                                               \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %69, 0;\n"                                  \
               "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" FA_NAMES_128 \
               "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70;}"                 \
               : FA_ACC_128(d)                                                         \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{accumulate}), \
                 "n"(kTransposed))
// clang-format on

// d (64, kN) = A B, or d += A B. A in shared memory, or in registers as operands of mma_16x8x16.
// kTransposed: B's rows are those that are summed over (V), else its columns are (K).
template <int kN, int kTransposed, class Element>
__device__ __forceinline__ void wgmma(Element, float* d, uint64_t a, uint64_t b, bool accumulate) {
  static_assert(kN == 64 || kN == 128);
  if constexpr (kN == 64 && std::is_same_v<Element, __nv_bfloat16>) FA_SS_64("bf16");
  if constexpr (kN == 64 && std::is_same_v<Element, __half>) FA_SS_64("f16");
  if constexpr (kN == 128 && std::is_same_v<Element, __nv_bfloat16>) FA_SS_128("bf16");
  if constexpr (kN == 128 && std::is_same_v<Element, __half>) FA_SS_128("f16");
}
template <int kN, int kTransposed, class Element>
__device__ __forceinline__ void wgmma(
    Element, float* d, const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  static_assert(kN == 64 || kN == 128);
  if constexpr (kN == 64 && std::is_same_v<Element, __nv_bfloat16>) FA_RS_64("bf16");
  if constexpr (kN == 64 && std::is_same_v<Element, __half>) FA_RS_64("f16");
  if constexpr (kN == 128 && std::is_same_v<Element, __nv_bfloat16>) FA_RS_128("bf16");
  if constexpr (kN == 128 && std::is_same_v<Element, __half>) FA_RS_128("f16");
}

#undef FA_8
#undef FA_32
#undef FA_NAMES_64
#undef FA_ACC_64
#undef FA_SS_64
#undef FA_RS_64
#undef FA_NAMES_128
#undef FA_ACC_128
#undef FA_SS_128
#undef FA_RS_128

// setmaxnreg: gives registers of this warpgroup back, or takes more of them.
template <int kCount>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace flash_attn::ptx
