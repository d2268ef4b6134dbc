// SPDX-License-Identifier: BSD-3-Clause
#include "torch/cache_params.h"

namespace flash_attn {

namespace {

void check_rank(const Tensor& t, const char* name) {
  if (t.dim() != 4) {
    raise("ValueError",
          message(name, " must have 4 dimensions, got shape ", shape_text(t.sizes())));
  }
  for (int64_t size : t.sizes()) {
    if (size > INT32_MAX) {
      raise("ValueError", message(name, " must have fewer than 2^31 of each dimension, got shape ",
                                  shape_text(t.sizes())));
    }
  }
}

// cos, sin (positions, rotary_dim / 2), of any floating dtype, for rows of head_dim elements.
RotaryTables rotary_tables(const Tensor& cos,
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
  RotaryTables tables;
  tables.dtype = dtype_of(cos, "rotary_cos");
  check_dtype(sin, "rotary_sin", cos.scalar_type());
  check_device(cos, "rotary_cos", x);
  check_device(sin, "rotary_sin", x);
  const Tensor c = with_unit_stride(cos, kept), s = with_unit_stride(sin, kept);
  tables.cos = c.data_ptr();
  tables.sin = s.data_ptr();
  tables.cos_row = c.stride(0);
  tables.sin_row = s.stride(0);
  tables.positions = cos.size(0);
  tables.half = static_cast<int>(cos.size(1));
  tables.interleaved = interleaved;
  return tables;
}

// New rows against the caches: shapes and dtypes.
void check_append(const AppendInputs& in) {
  const Tensor &k_cache = in.k_cache, &v_cache = in.v_cache, &k = in.k, &v = in.v;
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
}

// Which cache entries or pages serve the batch.
void fill_entries(AppendParams& p, const AppendInputs& in, std::vector<Tensor>& kept) {
  const Tensor& k_cache = in.k_cache;
  p.entries = static_cast<int>(k_cache.size(0));
  p.capacity = static_cast<int>(k_cache.size(1));
  if (in.cache_batch_idx && in.block_table) {
    raise("ValueError", "block_table and cache_batch_idx exclude each other, got both");
  }
  if (in.cache_batch_idx) {
    check_per_batch(*in.cache_batch_idx, "cache_batch_idx", p.batch, in.k);
    p.cache_batch_idx = int_data(as_contiguous(*in.cache_batch_idx, kept));
  } else if (in.block_table) {
    const Tensor& table = *in.block_table;
    check_dtype(table, "block_table", ScalarType::Int);
    check_device(table, "block_table", in.k);
    if (table.dim() != 2 || table.size(0) != p.batch || k_cache.size(1) < 1) {
      raise("ValueError",
            message("block_table must have shape (batch, max_pages), (", p.batch,
                    ", …), and pages at least one slot, got ", shape_text(table.sizes()),
                    " and k_cache ", shape_text(k_cache.sizes())));
    }
    p.pages = {int_data(as_contiguous(table, kept)), table.size(1), p.capacity,
               static_cast<int>(table.size(1)), p.entries};
  } else if (k_cache.size(0) != p.batch) {
    raise("ValueError", message("k_cache and k must have one batch size, got ", k_cache.size(0),
                                " and ", p.batch));
  }
}

}  // namespace

AppendParams fill_append(const AppendInputs& in, std::vector<Tensor>& kept) {
  check_append(in);
  const Tensor &k = in.k, &v = in.v;
  AppendParams p;
  p.dtype = dtype_of(k, "k");
  p.batch = static_cast<int>(k.size(0));
  p.seqlen_new = static_cast<int>(k.size(1));
  p.heads = static_cast<int>(k.size(2));
  p.head_dim = static_cast<int>(k.size(3));
  p.head_dim_v = static_cast<int>(v.size(3));
  p.k_cache = tensor_ref(in.k_cache);
  p.v_cache = tensor_ref(in.v_cache);
  p.k_stride = in.k_cache.stride(3);
  p.v_stride = in.v_cache.stride(3);
  p.k = tensor_ref(with_unit_stride(k, kept));
  p.v = tensor_ref(with_unit_stride(v, kept));
  check_per_batch(in.cache_seqlens, "cache_seqlens", p.batch, k);
  p.cache_seqlens = int_data(as_contiguous(in.cache_seqlens, kept));
  fill_entries(p, in, kept);
  if (in.cos.has_value() != in.sin.has_value()) {
    raise("ValueError", "rotary_cos and rotary_sin must come together, got one of them");
  }
  if (in.cos) p.rotary = rotary_tables(*in.cos, *in.sin, k, in.interleaved, kept);
  return p;
}

RotaryParams fill_rotary(const RotaryInputs& in, std::vector<Tensor>& kept) {
  const Tensor& x = in.x;
  check_rank(x, "x");
  RotaryParams p;
  p.dtype = dtype_of(x, "x");
  p.batch = static_cast<int>(x.size(0));
  p.seqlen = static_cast<int>(x.size(1));
  p.heads = static_cast<int>(x.size(2));
  p.head_dim = static_cast<int>(x.size(3));
  p.per_row = in.per_row;
  p.tables = rotary_tables(in.cos, in.sin, x, in.interleaved, kept);
  check_per_batch(in.offsets, "offsets", p.batch, x);
  p.offsets = int_data(as_contiguous(in.offsets, kept));
  p.x = tensor_ref(with_unit_stride(x, kept));
  return p;
}

Tensor allocate_rotated(RotaryParams& p, const Tensor& x) {
  const Tensor out = allocate(sizes_of(x), p.dtype, x, "rotated x");
  p.out = tensor_ref(out);
  return out;
}

}  // namespace flash_attn
