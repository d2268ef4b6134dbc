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

// Makes what a sum of weights, which is no negative number, is made of before what follows:
// arithmetic is moved behind a wait otherwise, and the wait hides nothing.
__device__ __forceinline__ void settle(float sum) {
  asm volatile(
      "{.reg .pred never; setp.lt.f32 never, %0, 0f00000000; @never st.shared.f32 [%1], %0;}" ::"f"(
          sum),
      "r"(0)
      : "memory");
}

// clang-format off
// The names of the first accumulators of an instruction, and themselves.
#define FA_NAMES_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FA_NAMES_40 FA_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FA_NAMES_48 FA_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FA_NAMES_56 FA_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define FA_NAMES_64 FA_NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define FA_8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
                "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define FA_SUMS_32 FA_8(0), FA_8(8), FA_8(16), FA_8(24)
#define FA_SUMS_40 FA_SUMS_32, FA_8(32)
#define FA_SUMS_48 FA_SUMS_40, FA_8(40)
#define FA_SUMS_56 FA_SUMS_48, FA_8(48)
#define FA_SUMS_64 FA_SUMS_56, FA_8(56)

// For kN == n, which has `sums` accumulators. The names of the other operands follow theirs.
#define FA_SS_OF(type, n, sums, at_a, at_b, at_add, at_transposed)                            \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " at_add ", 0;\n"                               \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type               \
               " {" FA_NAMES_##sums "}, " at_a ", " at_b ", p, 1, 1, 0, " at_transposed ";}"  \
               : FA_SUMS_##sums : "l"(a), "l"(b), "r"(int{accumulate}), "n"(kTransposed))
#define FA_RS_OF(type, n, sums, at_a, at_b, at_add, at_transposed)                            \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " at_add ", 0;\n"                               \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type               \
               " {" FA_NAMES_##sums "}, {" at_a "}, " at_b ", p, 1, 1, " at_transposed ";}"   \
               : FA_SUMS_##sums : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),         \
                 "r"(int{accumulate}), "n"(kTransposed))
#define FA_EITHER(FORM, n, ...)                                                               \
  if constexpr (kN == n && std::is_same_v<Element, __nv_bfloat16>) FORM("bf16", n, __VA_ARGS__); \
  if constexpr (kN == n && std::is_same_v<Element, __half>) FORM("f16", n, __VA_ARGS__)
// clang-format on

template <int kN>
constexpr bool kHasWgmma = kN == 64 || kN == 80 || kN == 96 || kN == 128;

// d (64, kN) = A B, or d += A B. A in shared memory, or in registers as operands of mma_16x8x16.
// kTransposed: B's rows are those that are summed over (V), else its columns are (K).
template <int kN, int kTransposed, class Element>
__device__ __forceinline__ void wgmma(Element, float* d, uint64_t a, uint64_t b, bool accumulate) {
  static_assert(kHasWgmma<kN>);
  FA_EITHER(FA_SS_OF, 64, 32, "%32", "%33", "%34", "%35");
  FA_EITHER(FA_SS_OF, 80, 40, "%40", "%41", "%42", "%43");
  FA_EITHER(FA_SS_OF, 96, 48, "%48", "%49", "%50", "%51");
  FA_EITHER(FA_SS_OF, 128, 64, "%64", "%65", "%66", "%67");
}
template <int kN, int kTransposed, class Element>
__device__ __forceinline__ void wgmma(
    Element, float* d, const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  static_assert(kN == 64 || kN == 128);
  FA_EITHER(FA_RS_OF, 64, 32, "%32, %33, %34, %35", "%36", "%37", "%38");
  FA_EITHER(FA_RS_OF, 128, 64, "%64, %65, %66, %67", "%68", "%69", "%70");
}

#undef FA_NAMES_32
#undef FA_NAMES_40
#undef FA_NAMES_48
#undef FA_NAMES_56
#undef FA_NAMES_64
#undef FA_8
#undef FA_SUMS_32
#undef FA_SUMS_40
#undef FA_SUMS_48
#undef FA_SUMS_56
#undef FA_SUMS_64
#undef FA_SS_OF
#undef FA_RS_OF
#undef FA_EITHER

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
