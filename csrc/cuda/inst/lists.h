// SPDX-License-Identifier: BSD-3-Clause
// The lists that the .cu files of this folder define and rows.cpp puts into one table.
#pragma once

#include "plan/kernel_list.h"

namespace flash_attn {

extern const KernelList kSm90ForwardF16, kSm90ForwardBf16;
extern const KernelList kSm80ForwardF16, kSm80ForwardBf16, kSm80ForwardF32;
extern const KernelList kSm80BackwardF16, kSm80BackwardBf16, kSm80BackwardF32;
extern const KernelList kSupport;

int cuda_code();  // KernelTable::cuda_code

}  // namespace flash_attn
