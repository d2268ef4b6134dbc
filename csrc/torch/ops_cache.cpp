// SPDX-License-Identifier: BSD-3-Clause
// The CPU's operators around the KV cache: appending keys and values, and rotary embedding.
// Everything that can be wrong is found before the first element is written.
#include <algorithm>

#include "cpu/append.h"
#include "cpu/rotary.h"
#include "torch/cache_params.h"
#include "torch/ops_cpu.h"

namespace flash_attn {

namespace {

// Positions [first, first + count) of sequence `batch` stand in the tables.
void check_positions(
    const RotaryTables& tables, const char* name, int64_t batch, int64_t first, int64_t count) {
  if (count > 0 && (first < 0 || first + count > tables.positions)) {
    raise("ValueError",
          message("rotary_cos and rotary_sin hold positions 0 to ", tables.positions - 1, ", got ",
                  first, " to ", first + count - 1, " (", name, "[", batch, "])"));
  }
}

// Where the new rows go: every slot and page of a sequence that has pages exists.
void check_slots(const AppendParams& p) {
  const bool paged = p.pages.table != nullptr;
  const int64_t capacity = paged ? int64_t{p.pages.page_size} * p.pages.max_pages : p.capacity;
  if (p.cache_batch_idx != nullptr) {
    check_entries(p.cache_batch_idx, p.batch, p.entries);
    std::vector<int32_t> entries(p.cache_batch_idx, p.cache_batch_idx + p.batch);
    std::sort(entries.begin(), entries.end());
    const auto twice = std::adjacent_find(entries.begin(), entries.end());
    if (twice != entries.end()) {
      raise("ValueError", message("cache_batch_idx must name each cache entry once when keys are "
                                  "appended, got ",
                                  *twice, " twice"));
    }
  }
  for (int b = 0; b < p.batch; ++b) {
    if (is_padding(p.pages, b)) continue;
    const int64_t first = p.cache_seqlens[b], end = first + p.seqlen_new;
    if (first < 0 || end > capacity) {
      raise("ValueError", message("cache_seqlens[", b, "] + seqlen_new must lie in 0 to ", capacity,
                                  " (the capacity of k_cache), got ", int_text(p.cache_seqlens[b]),
                                  " + ", p.seqlen_new));
    }
    if (paged) check_pages(p.pages, b, end);
    if (p.rotary.cos != nullptr) {
      check_positions(p.rotary, "cache_seqlens", b, first, p.seqlen_new);
    }
  }
}

void append_kv(const Tensor& k_cache,
               const Tensor& v_cache,
               const Tensor& k,
               const Tensor& v,
               const OptTensor& cos,
               const OptTensor& sin,
               const Tensor& cache_seqlens,
               const OptTensor& cache_batch_idx,
               const OptTensor& block_table,
               bool interleaved) {
  std::vector<Tensor> kept;
  const AppendParams p = fill_append(
      {k_cache, v_cache, k, v, cos, sin, cache_seqlens, cache_batch_idx, block_table, interleaved},
      kept);
  check_slots(p);
  if (k.numel() > 0) cpu::append_kv(p, torch_threads(), torch_parallel_for);
}

Tensor rotary(const Tensor& x,
              const Tensor& cos,
              const Tensor& sin,
              const Tensor& offsets,
              bool interleaved,
              bool per_row) {
  std::vector<Tensor> kept;
  RotaryParams p = fill_rotary({x, cos, sin, offsets, interleaved, per_row}, kept);
  for (int b = 0; b < p.batch; ++b) {
    check_positions(p.tables, "offsets", b, p.offsets[b],
                    per_row ? p.seqlen : std::min(p.seqlen, 1));
  }
  const Tensor out = allocate_rotated(p, x);
  if (x.numel() > 0) cpu::rotary(p, torch_threads(), torch_parallel_for);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_attn, CPU, m) {
  m.impl("append_kv", TORCH_BOX(&append_kv));
  m.impl("rotary", TORCH_BOX(&rotary));
}

}  // namespace flash_attn
