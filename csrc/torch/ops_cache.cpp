// SPDX-License-Identifier: BSD-3-Clause
// The CPU's operators around the KV cache: appending keys and values, and rotary embedding.
// Everything that can be wrong is found before the first element is written.
#include <algorithm>

#include "cpu/append.h"
#include "cpu/rotary.h"
#include "torch/checks.h"
#include "torch/ops_cpu.h"

namespace flash_attn {

namespace {

void check_rank(const Tensor& t, const char* name) {
  if (t.dim() != 4) {
    raise("ValueError",
          message(name, " must have 4 dimensions, got shape ", shape_text(t.sizes())));
  }
}

// cos, sin (positions, rotary_dim / 2), of any floating dtype, for rows of head_dim elements.
cpu::RotaryTables rotary_tables(const Tensor& cos,
                                const Tensor& sin,
                                const Tensor& x,
                                bool interleaved,
                                std::vector<Tensor>& kept) {
  const int64_t head_dim = x.size(3);
  if (cos.dim() != 2 || cos.size(1) < 1 || 2 * cos.size(1) > head_dim) {
    raise("ValueError",
          message("rotary_cos must have shape (positions, rotary_dim / 2) with rotary_dim from 2 "
                  "to head_dim ",
                  head_dim, ", got ", shape_text(cos.sizes())));
  }
  check_shape(sin, "rotary_sin", sizes_of(cos));
  cpu::RotaryTables tables;
  tables.dtype = dtype_of(cos, "rotary_cos");
  check_dtype(sin, "rotary_sin", cos.scalar_type());
  check_device(cos, "rotary_cos", x);
  check_device(sin, "rotary_sin", x);
  const Tensor c = with_unit_stride(cos, kept), s = with_unit_stride(sin, kept);
  tables.cos = c.data_ptr();
  tables.sin = s.data_ptr();
  tables.cos_row = c.stride(0);
  tables.sin_row = s.stride(0);
  tables.half = static_cast<int>(cos.size(1));
  tables.interleaved = interleaved;
  return tables;
}

// Positions [first, first + count) of sequence `batch` stand in the tables.
void check_positions(
    const Tensor& cos, const char* name, int64_t batch, int64_t first, int64_t count) {
  if (count > 0 && (first < 0 || first + count > cos.size(0))) {
    raise("ValueError",
          message("rotary_cos and rotary_sin hold positions 0 to ", cos.size(0) - 1, ", got ",
                  first, " to ", first + count - 1, " (", name, "[", batch, "])"));
  }
}

// New rows against the caches: shapes and dtypes.
void check_append(const Tensor& k_cache, const Tensor& v_cache, const Tensor& k, const Tensor& v) {
  check_rank(k_cache, "k_cache");
  check_rank(v_cache, "v_cache");
  check_rank(k, "k");
  check_rank(v, "v");
  dtype_of(k_cache, "k_cache");
  std::vector<int64_t> sizes = sizes_of(k_cache);
  sizes[3] = v_cache.size(3);
  check_shape(v_cache, "v_cache", sizes);
  check_shape(k, "k", {k.size(0), k.size(1), k_cache.size(2), k_cache.size(3)});
  check_shape(v, "v", {k.size(0), k.size(1), v_cache.size(2), v_cache.size(3)});
  const auto same = [&](const Tensor& t, const char* name) {
    check_dtype(t, name, k_cache.scalar_type());
    check_device(t, name, k_cache);
  };
  same(v_cache, "v_cache");
  same(k, "k");
  same(v, "v");
  for (const Tensor* t : {&k_cache, &k}) {
    for (int64_t size : t->sizes()) {
      if (size > INT32_MAX)
        raise("ValueError", "k and k_cache must have fewer than 2^31 of each dimension");
    }
  }
}

// Where the new rows go: every slot and page of a sequence that has pages exists.
void check_slots(const cpu::AppendParams& p, const Tensor& k_cache, const OptTensor& cos) {
  const bool paged = p.pages.table != nullptr;
  const int64_t capacity = paged ? int64_t{p.pages.page_size} * p.pages.max_pages : k_cache.size(1);
  if (p.cache_batch_idx != nullptr) {
    check_entries(p.cache_batch_idx, p.batch, k_cache.size(0));
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
    if (cos) check_positions(*cos, "cache_seqlens", b, first, p.seqlen_new);
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
  check_append(k_cache, v_cache, k, v);
  std::vector<Tensor> kept;
  cpu::AppendParams p;
  p.dtype = dtype_of(k, "k");
  p.batch = static_cast<int>(k.size(0));
  p.seqlen_new = static_cast<int>(k.size(1));
  p.heads = static_cast<int>(k.size(2));
  p.head_dim = static_cast<int>(k.size(3));
  p.head_dim_v = static_cast<int>(v.size(3));
  p.k_cache = tensor_ref(k_cache);
  p.v_cache = tensor_ref(v_cache);
  p.k_stride = k_cache.stride(3);
  p.v_stride = v_cache.stride(3);
  p.k = tensor_ref(with_unit_stride(k, kept));
  p.v = tensor_ref(with_unit_stride(v, kept));
  check_per_batch(cache_seqlens, "cache_seqlens", p.batch, k);
  p.cache_seqlens = int_data(as_contiguous(cache_seqlens, kept));
  if (cache_batch_idx && block_table) {
    raise("ValueError", "block_table and cache_batch_idx exclude each other, got both");
  }
  if (cache_batch_idx) {
    check_per_batch(*cache_batch_idx, "cache_batch_idx", p.batch, k);
    p.cache_batch_idx = int_data(as_contiguous(*cache_batch_idx, kept));
  } else if (block_table) {
    check_dtype(*block_table, "block_table", ScalarType::Int);
    check_device(*block_table, "block_table", k);
    if (block_table->dim() != 2 || block_table->size(0) != p.batch || k_cache.size(1) < 1) {
      raise("ValueError",
            message("block_table must have shape (batch, max_pages), (", p.batch,
                    ", …), and pages at least one slot, got ", shape_text(block_table->sizes()),
                    " and k_cache ", shape_text(k_cache.sizes())));
    }
    const Tensor table = as_contiguous(*block_table, kept);
    p.pages = {int_data(table), table.size(1), static_cast<int>(k_cache.size(1)),
               static_cast<int>(table.size(1)), static_cast<int>(k_cache.size(0))};
  } else if (k_cache.size(0) != p.batch) {
    raise("ValueError", message("k_cache and k must have one batch size, got ", k_cache.size(0),
                                " and ", p.batch));
  }
  if (cos.has_value() != sin.has_value()) {
    raise("ValueError", "rotary_cos and rotary_sin must come together, got one of them");
  }
  if (cos) p.rotary = rotary_tables(*cos, *sin, k, interleaved, kept);
  check_slots(p, k_cache, cos);
  if (k.numel() > 0) cpu::append_kv(p, torch_threads(), torch_parallel_for);
}

Tensor rotary(const Tensor& x,
              const Tensor& cos,
              const Tensor& sin,
              const Tensor& offsets,
              bool interleaved,
              bool per_row) {
  check_rank(x, "x");
  std::vector<Tensor> kept;
  cpu::RotaryParams p;
  p.dtype = dtype_of(x, "x");
  p.batch = static_cast<int>(x.size(0));
  p.seqlen = static_cast<int>(x.size(1));
  p.heads = static_cast<int>(x.size(2));
  p.head_dim = static_cast<int>(x.size(3));
  p.per_row = per_row;
  p.tables = rotary_tables(cos, sin, x, interleaved, kept);
  check_per_batch(offsets, "offsets", p.batch, x);
  p.offsets = int_data(as_contiguous(offsets, kept));
  for (int b = 0; b < p.batch; ++b)
    check_positions(cos, "offsets", b, p.offsets[b], per_row ? p.seqlen : std::min(p.seqlen, 1));
  const Tensor out = allocate(sizes_of(x), p.dtype, x, "rotated x");
  p.x = tensor_ref(with_unit_stride(x, kept));
  p.out = tensor_ref(out);
  if (x.numel() > 0) cpu::rotary(p, torch_threads(), torch_parallel_for);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_attn, CPU, m) {
  m.impl("append_kv", TORCH_BOX(&append_kv));
  m.impl("rotary", TORCH_BOX(&rotary));
}

}  // namespace flash_attn
