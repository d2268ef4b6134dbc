// SPDX-License-Identifier: BSD-3-Clause
// Which instruction sets this machine runs; read by ops_cpu.cpp for DeviceInfo::isa.
#pragma once

#include <cstdint>

namespace flash_attn::cpu {

constexpr uint32_t kUnknownIsa = UINT32_MAX;

// Bits of plan/device.h's Isa. FLASH_ATTN_CPU_ISA=scalar|avx2|avx512|avx512bf16, read at each call,
// caps them, so that every row can be tested on one machine;
// another value gives kUnknownIsa.
uint32_t detect_isa();

}  // namespace flash_attn::cpu
