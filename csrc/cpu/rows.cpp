// SPDX-License-Identifier: BSD-3-Clause
// The table of CPU kernels, newest instruction set first, and what this machine runs.
#include <cstdlib>
#include <cstring>

#include "cpu/isa.h"
#include "plan/kernel_list.h"

namespace flash_attn {
namespace cpu {

extern const KernelList kScalarKernels, kAvx2Kernels, kAvx512Kernels, kAvx512Bf16Kernels,
    kNeonKernels;

static uint32_t machine_isa() {
  uint32_t isa = kIsaScalar;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    isa |= kIsaAvx2;
  }
  if (isa && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    isa |= kIsaAvx512;
    if (__builtin_cpu_supports("avx512bf16")) isa |= kIsaAvx512Bf16;
  }
#elif defined(__aarch64__)
  isa |= kIsaNeon;
#endif
  return isa;
}

uint32_t detect_isa() {
  static const uint32_t machine = machine_isa();
  const char* cap = std::getenv("FLASH_ATTN_CPU_ISA");
  if (cap == nullptr) return machine;
  if (std::strcmp(cap, "scalar") == 0) return kIsaScalar;
  if (std::strcmp(cap, "avx2") == 0) return machine & kIsaAvx2;
  if (std::strcmp(cap, "avx512") == 0) return machine & (kIsaAvx2 | kIsaAvx512);
  return std::strcmp(cap, "avx512bf16") == 0 ? machine : kUnknownIsa;
}

}  // namespace cpu

static const KernelList* const kLists[] = {
#if defined(__x86_64__)
    &cpu::kAvx512Bf16Kernels,
    &cpu::kAvx512Kernels,
    &cpu::kAvx2Kernels,
#elif defined(__aarch64__)
    &cpu::kNeonKernels,
#endif
    &cpu::kScalarKernels,
};
extern const KernelTable kCpuTable;
const KernelTable kCpuTable = {kLists, sizeof(kLists) / sizeof(kLists[0]), cpu::detect_isa};

}  // namespace flash_attn
