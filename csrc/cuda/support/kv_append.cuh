// SPDX-License-Identifier: BSD-3-Clause
// Writes new keys and values into a cache, contiguous or paged, the keys after rotary if asked for.
// A slot past the capacity, without a page, or of a cache entry that does not exist is passed over.
#pragma once

#include "core/pages.h"
#include "cuda/support/rotary.cuh"

namespace flash_attn {

// Element offset of `slot` of a sequence in a cache; kNoRow where there is none.
__device__ __forceinline__ int64_t cache_offset(const AppendParams& p,
                                                const TensorRef& cache,
                                                int batch,
                                                int64_t slot) {
  if (slot < 0 || slot > INT32_MAX) return kNoRow;
  if (p.pages.table != nullptr) {
    const int64_t page = page_of(p.pages, batch, static_cast<int>(slot));
    return page == kNoRow ? kNoRow : page * cache.batch + slot % p.pages.page_size * cache.row;
  }
  const int entry = p.cache_batch_idx != nullptr ? p.cache_batch_idx[batch] : batch;
  if (slot >= p.capacity || entry < 0 || entry >= p.entries) return kNoRow;
  return entry * cache.batch + slot * cache.row;
}

// A warp a new row of a head, heads fastest.
template <class Element>
__global__ void __launch_bounds__(kRowThreads)
    append_kv_kernel(const __grid_constant__ AppendParams p) {
  const int64_t warp = global_warp();
  if (warp >= int64_t{p.batch} * p.seqlen_new * p.heads) return;
  const int64_t head = warp % p.heads, row = warp / p.heads, i = row % p.seqlen_new;
  const int batch = static_cast<int>(row / p.seqlen_new);
  const int64_t slot = int64_t{p.cache_seqlens[batch]} + i;
  const int64_t k_at = cache_offset(p, p.k_cache, batch, slot);
  if (k_at == kNoRow) return;
  const int64_t v_at = cache_offset(p, p.v_cache, batch, slot);
  const auto source = [&](const TensorRef& t) {
    return static_cast<const Element*>(t.ptr) + batch * t.batch + i * t.row + head * t.head;
  };
  warp_rotate_row(static_cast<Element*>(p.k_cache.ptr) + k_at + head * p.k_cache.head, p.k_stride,
                  source(p.k), p.head_dim, p.rotary, slot);
  warp_rotate_row(static_cast<Element*>(p.v_cache.ptr) + v_at + head * p.v_cache.head, p.v_stride,
                  source(p.v), p.head_dim_v, RotaryTables{}, slot);
}

int launch_append_kv(const AppendParams& p, void* stream) {
  const int64_t warps = int64_t{p.batch} * p.seqlen_new * p.heads;
  const auto start = [&](auto kernel) {
    return launch(kernel, ceil_div(warps, int64_t{kRowThreads / 32}), kRowThreads,
                  static_cast<cudaStream_t>(stream), p);
  };
  switch (p.dtype) {
    case DType::kF16: return start(append_kv_kernel<f16>);
    case DType::kBF16: return start(append_kv_kernel<bf16>);
    case DType::kF32: return start(append_kv_kernel<float>);
    case DType::kF64: break;
  }
  return cudaErrorNotSupported;
}

}  // namespace flash_attn
