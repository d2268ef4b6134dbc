// SPDX-License-Identifier: BSD-3-Clause
// What surrounds a KV cache, as plain data: rotary position embedding, and new keys and values that
// are written into a cache. Filled by csrc/torch/cache_params.cpp, read by csrc/cpu and
// csrc/cuda/support.
//
// Rotary: the first 2 * half elements of a row are `half` pairs; pair c at position t is turned by
// the angle whose cosine and sine are cos[t][c], sin[t][c]. Pairs are elements (c, c + half) or,
// interleaved, (2c, 2c + 1). Arithmetic in fp32, with fp64 rows fp64. A row at a position that the
// tables do not hold is not turned; on the CPU that has been refused before.
#pragma once

#include "core/params.h"

namespace flash_attn {

struct RotaryTables {
  const void *cos = nullptr, *sin = nullptr;  // (positions, half); null: no rotation
  int64_t cos_row = 0, sin_row = 0;           // strides
  int64_t positions = 0;
  int half = 0;
  DType dtype = DType::kF32;  // of the tables
  uint8_t interleaved = 0;
};

struct RotaryParams {
  TensorRef x, out;  // (batch, seqlen, heads, head_dim)
  int batch = 0, seqlen = 0, heads = 0, head_dim = 0;
  DType dtype = DType::kF32;
  const int32_t* offsets = nullptr;  // (batch,)
  uint8_t per_row = 0;               // row i stands at offsets[b] + i, else at offsets[b]
  RotaryTables tables;
};

struct AppendParams {
  TensorRef k_cache, v_cache;  // (entries, capacity, heads, dim), paged (num_pages, page_size, …)
  int64_t k_stride = 1, v_stride = 1;  // of the caches' last dimension
  TensorRef k, v;                      // (batch, seqlen_new, heads, dim)
  int batch = 0, seqlen_new = 0, heads = 0, head_dim = 0, head_dim_v = 0;
  int entries = 0, capacity = 0;  // of a cache without pages
  DType dtype = DType::kF32;
  const int32_t* cache_seqlens = nullptr;    // (batch,) slot of the first new key
  const int32_t* cache_batch_idx = nullptr;  // (batch,) entry that serves a batch; null: its own
  Pages pages;
  RotaryTables rotary;
};

}  // namespace flash_attn
