// SPDX-License-Identifier: BSD-3-Clause
// Writes new keys and values into a cache, contiguous or paged, the keys after rotary if asked for.
#pragma once

#include "cpu/rotary.h"

namespace flash_attn::cpu {

struct AppendParams {
  TensorRef k_cache, v_cache;  // (entries, capacity, heads, dim), paged (num_pages, page_size, …)
  int64_t k_stride = 1, v_stride = 1;  // of the caches' last dimension
  TensorRef k, v;                      // (batch, seqlen_new, heads, dim)
  int batch = 0, seqlen_new = 0, heads = 0, head_dim = 0, head_dim_v = 0;
  DType dtype = DType::kF32;
  const int32_t* cache_seqlens = nullptr;    // (batch,) slot of the first new key
  const int32_t* cache_batch_idx = nullptr;  // (batch,) entry that serves a batch; null: its own
  Pages pages;
  RotaryTables rotary;
};

// Slots and entries have been checked; a slot without a page is passed over.
void append_kv(const AppendParams& params, int workers, ParallelFor parallel_for);

}  // namespace flash_attn::cpu
