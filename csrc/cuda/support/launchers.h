// SPDX-License-Identifier: BSD-3-Clause
// The small kernels that operators start themselves, by functions of plain parameters: what
// csrc/torch sees of csrc/cuda beside the kernel table. `stream` is a cudaStream_t of the current
// device; the result is a cudaError_t. Defined in cuda/inst/support.cu.
#pragma once

#include "core/cache.h"

namespace flash_attn {

// Rows of a packed tensor that belong to no sequence: those from cu_seqlens[batch] on.
struct Tail {
  void* rows = nullptr;          // contiguous; zeroed. Null: nothing
  int64_t row_bytes = 0;         // even
  float* lse = nullptr;          // (heads, total), becomes -inf. Null: nothing
  const int32_t* end = nullptr;  // cu_seqlens + batch; null: every row
  int64_t total = 0;
  int heads = 0;
};

struct Tails {
  Tail tail[3];
};

int launch_fill_tails(const Tails& tails, void* stream);

// dtype f16, bf16 or f32. Slots and entries that do not exist are passed over.
int launch_append_kv(const AppendParams& params, void* stream);
int launch_rotary(const RotaryParams& params, void* stream);

}  // namespace flash_attn
