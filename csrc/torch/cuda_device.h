// SPDX-License-Identifier: BSD-3-Clause
// What the CUDA operators share: the device as the planner sees it, and launches that are checked.
#pragma once

#include "plan/plan.h"
#include "torch/compat.h"

namespace flash_attn {

// The device, which must be the current one, as far as FLASH_ATTN_CUDA_LIMITS allows:
// "<capability * 10>:<bytes of shared memory of a block>", by which tests reach the rows that
// smaller GPUs take.
DeviceInfo device_info(int device);

// Throws where `code`, a cudaError_t, is no success. `name`: the kernel that was launched on
// `device`.
void check_launch(int code, const char* name, int device);

// Bytes of a tensor become zero, on `stream`.
void zero_async(const Tensor& t, void* stream);

// What `backend=` calls a family number of schema.cpp; null for any.
const char* family_name(int64_t family);

}  // namespace flash_attn
