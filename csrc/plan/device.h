// SPDX-License-Identifier: BSD-3-Clause
// What the planner knows of a device. Plain numbers, so that tests can invent devices.
#pragma once

#include <cstdint>

namespace flash_attn {

// CPU instruction sets a row may need; bits of DeviceInfo::isa.
enum Isa : uint32_t {
  kIsaScalar = 0,
  kIsaAvx2 = 1,
  kIsaAvx512 = 2,
  kIsaAvx512Bf16 = 4,
  kIsaNeon = 8
};

struct DeviceInfo {
  // Compute capability * 10 (80, 90, …) of the code that runs there: the GPU's, or less where the
  // library holds older code for it (KernelTable::cuda_code). 0 is the CPU.
  int arch = 0;
  int sm_count = 1;        // multiprocessors; threads on the CPU
  int smem_per_block = 0;  // bytes a block may ask for
  int64_t l2_bytes = 0;
  uint32_t isa = kIsaScalar;  // CPU only
  bool any_speed = false;     // rows are taken where another is faster, too; for tests
};

}  // namespace flash_attn
