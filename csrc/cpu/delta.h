// SPDX-License-Identifier: BSD-3-Clause
// delta = rowsum(out * dout) in fp32, with fp64 tensors fp64: the operator of that name. The
// backward pass has its own, fused with dlse.
#pragma once

#include "core/params.h"
#include "plan/kernel_list.h"

namespace flash_attn::cpu {

struct DeltaParams {
  TensorRef out, dout;    // (batch, seqlen, heads, head_dim)
  void* delta = nullptr;  // (batch, heads, seqlen), contiguous
  int64_t batch = 0, seqlen = 0, heads = 0, head_dim = 0;
  DType dtype = DType::kF32;
};

void delta(const DeltaParams& params, int workers, ParallelFor parallel_for);

}  // namespace flash_attn::cpu
