// SPDX-License-Identifier: BSD-3-Clause
#include "torch/checks.h"

#include <algorithm>
#include <cmath>

#include "core/seqlen.h"

namespace flash_attn {

namespace {

int64_t last(const Tensor& t) {
  return t.size(t.dim() - 1);
}

// Stride of dimension d; 0 where it has one element.
int64_t step(const Tensor& t, int64_t d) {
  return t.size(d) == 1 ? 0 : t.stride(d);
}

bool packed_k(const OpInputs& in) {
  return in.cu_seqlens_k && !in.block_table;
}

int64_t batch_of(const OpInputs& in) {
  return in.cu_seqlens_q ? in.cu_seqlens_q->size(0) - 1 : in.q.size(0);
}

void check_rank(const Tensor& t, const char* name, int64_t rank) {
  if (t.dim() != rank) {
    raise("ValueError",
          message(name, " must have ", rank, " dimensions, got shape ", shape_text(t.sizes())));
  }
  for (int64_t size : t.sizes()) {
    if (size > INT32_MAX) {
      raise("ValueError", message(name, " must have fewer than 2^31 of each dimension, got shape ",
                                  shape_text(t.sizes())));
    }
  }
}

void check_qkv(const OpInputs& in) {
  dtype_of(in.q, "q");
  if (in.k.scalar_type() != in.q.scalar_type() || in.v.scalar_type() != in.q.scalar_type()) {
    raise("TypeError",
          message("q, k and v must have one dtype, got ", dtype_name(in.q.scalar_type()), ", ",
                  dtype_name(in.k.scalar_type()), " and ", dtype_name(in.v.scalar_type())));
  }
  check_rank(in.q, "q", in.cu_seqlens_q ? 3 : 4);
  check_rank(in.k, "k", packed_k(in) ? 3 : 4);
  check_rank(in.v, "v", in.k.dim());
  check_device(in.k, "k", in.q);
  check_device(in.v, "v", in.q);
  std::vector<int64_t> v_sizes = sizes_of(in.k);
  v_sizes.back() = last(in.v);
  check_shape(in.v, "v", v_sizes);
  if (last(in.q) != last(in.k) || last(in.q) < 1 || last(in.v) < 1) {
    raise("ValueError",
          message("q and k must have one head_dim of at least 1, and v one of at least 1, got ",
                  last(in.q), ", ", last(in.k), " and ", last(in.v)));
  }
  const int64_t heads = in.q.size(in.q.dim() - 2), heads_k = in.k.size(in.k.dim() - 2);
  if (heads_k == 0 ? heads != 0 : heads % heads_k != 0) {
    raise("ValueError", message("num_heads must be a multiple of num_heads_k, got ", heads, " and ",
                                heads_k, " (q.shape[-2], k.shape[-2])"));
  }
}

void check_lengths(const OpInputs& in) {
  const int64_t batch = batch_of(in);
  for (const auto& [tensor, name] :
       {std::pair<const OptTensor&, const char*>(in.cu_seqlens_q, "cu_seqlens_q"),
        {in.cu_seqlens_k, "cu_seqlens_k"}}) {
    if (!tensor) continue;
    if (tensor->dim() != 1 || tensor->size(0) < 1) {
      raise("ValueError",
            message(name, " must have shape (batch + 1,), got ", shape_text(tensor->sizes())));
    }
    check_per_batch(*tensor, name, batch + 1, in.q);
  }
  if (in.seqused_k) check_per_batch(*in.seqused_k, "seqused_k", batch, in.q);
  if (in.leftpad_k) check_per_batch(*in.leftpad_k, "leftpad_k", batch, in.q);
  if (in.cache_batch_idx) check_per_batch(*in.cache_batch_idx, "cache_batch_idx", batch, in.q);
  if (in.block_table) {
    if (in.cache_batch_idx)
      raise("ValueError", "block_table and cache_batch_idx exclude each other, got both");
    if (in.block_table->dim() != 2 || in.block_table->size(0) != batch) {
      raise("ValueError", message("block_table must have shape (batch, max_pages), (", batch,
                                  ", …), got ", shape_text(in.block_table->sizes())));
    }
    check_dtype(*in.block_table, "block_table", ScalarType::Int);
    check_device(*in.block_table, "block_table", in.q);
    if (in.k.size(1) < 1)
      raise("ValueError", "k must have pages of at least one slot, got a page size of 0");
  } else if (!in.cu_seqlens_k && !in.cache_batch_idx && in.k.size(0) != batch) {
    raise("ValueError",
          message("q and k must have one batch size, got ", batch, " and ", in.k.size(0)));
  }
}

void check_bias(const OpInputs& in) {
  const Tensor& bias = *in.bias;
  const int64_t batch = batch_of(in), heads = in.q.size(in.q.dim() - 2);
  const ScalarType type = bias.scalar_type();
  const bool narrow = in.q.element_size() == 2;
  if (type != ScalarType::Bool && type != in.q.scalar_type() &&
      !(narrow && type == ScalarType::Float)) {
    raise("TypeError", message("attn_bias must be bool, ", dtype_name(in.q.scalar_type()),
                               narrow ? " or float32" : "", ", got ", dtype_name(type)));
  }
  check_device(bias, "attn_bias", in.q);
  check_rank(bias, "attn_bias", 4);
  const bool ragged = in.seqused_k || in.leftpad_k || in.block_table || in.cu_seqlens_k;
  const auto fits = [&](int d, int64_t size) { return bias.size(d) == 1 || bias.size(d) == size; };
  const bool right = fits(0, batch) && fits(1, heads) &&
                     (in.cu_seqlens_q || fits(2, in.q.size(1))) &&
                     (ragged || fits(3, in.k.size(1)));
  if (!right) {
    raise("ValueError",
          message("attn_bias must be broadcastable to (batch, num_heads, seqlen_q, seqlen_k), got ",
                  shape_text(bias.sizes()), " for batch ", batch, ", ", heads, " heads, q ",
                  shape_text(in.q.sizes()), " and k ", shape_text(in.k.sizes())));
  }
}

void check_list(const OpInputs& in,
                const OptTensor& counts,
                const OptTensor& index,
                const char* name) {
  if (!counts || !index) {
    raise("ValueError",
          message("block_mask must come with counts and indices, got one of them (", name, ")"));
  }
  check_rank(*counts, "block_mask's counts", 3);
  check_rank(*index, "block_mask's indices", 4);
  for (const Tensor* t : {&*counts, &*index}) {
    check_dtype(*t, "block_mask", ScalarType::Int);
    check_device(*t, "block_mask", in.q);
  }
  std::vector<int64_t> sizes = sizes_of(*counts);
  sizes.push_back(last(*index));
  check_shape(*index, "block_mask's indices", sizes);
  const int64_t batch = batch_of(in), heads = in.q.size(in.q.dim() - 2);
  if ((sizes[0] != 1 && sizes[0] != batch) || (sizes[1] != 1 && sizes[1] != heads)) {
    raise("ValueError", message("block_mask must be of batch 1 or ", batch, " and heads 1 or ",
                                heads, ", got ", shape_text(counts->sizes())));
  }
}

// The bit tiles, and the lists of their numbers beside the lists of blocks.
void check_bits(const OpInputs& in) {
  if (!in.block_bits && !in.block_bits_index && !in.block_bits_index_t) return;
  if (!in.block_bits || !in.block_bits_index ||
      in.block_bits_index_t.has_value() != in.block_index_t.has_value()) {
    raise("ValueError",
          "block_mask's bits must come with an index beside each list of blocks, got some of them");
  }
  const auto check = [&](const Tensor& t, const char* name, const std::vector<int64_t>& sizes) {
    check_dtype(t, name, ScalarType::Int);
    check_device(t, name, in.q);
    check_shape(t, name, sizes);
  };
  check(*in.block_bits_index, "block_mask's bits_index", sizes_of(*in.block_index));
  if (in.block_bits_index_t)
    check(*in.block_bits_index_t, "block_mask's bits_index_t", sizes_of(*in.block_index_t));
  check_rank(*in.block_bits, "block_mask's bits", 3);
  check(*in.block_bits, "block_mask's bits",
        {in.block_bits->size(0), in.block_q, ceil_div<int64_t>(in.block_k, 32)});
}

void check_block_mask(const OpInputs& in) {
  constexpr int64_t kLongest = int64_t{1} << 30;  // LONGEST in flash_attn/masks.py
  if (in.block_q < 1 || in.block_k < 1 || in.block_q > kLongest || in.block_k > kLongest) {
    raise("ValueError", message("block_mask's block size must lie in 1 to 2^30, got ", in.block_q,
                                " and ", in.block_k));
  }
  check_list(in, in.block_counts, in.block_index, "forward lists");
  if (in.block_counts_t || in.block_index_t)
    check_list(in, in.block_counts_t, in.block_index_t, "transposed lists");
  check_bits(in);
  const auto expect = [](const char* name, int64_t length, int64_t block, int64_t got) {
    if (got != ceil_div(length, block)) {
      raise("ValueError",
            message("block_mask must have ", ceil_div(length, block), " block ", name, " for ",
                    length, " positions in blocks of ", block, ", got ", got));
    }
  };
  if (!in.cu_seqlens_q) expect("rows", in.q.size(1), in.block_q, in.block_counts->size(2));
  if (in.block_counts_t && !in.cu_seqlens_k && !in.block_table && !in.seqused_k) {
    expect("columns", in.k.size(1), in.block_k, in.block_counts_t->size(2));
  }
}

// Neither overflows nor vanishes in the arithmetic: kernels multiply by log2(e) and divide by a
// softcap.
void check_held(const OpInputs& in, const char* name, double number) {
  const bool wide = in.q.scalar_type() == ScalarType::Double;
  const int least = wide ? -1022 : -126, most = wide ? 1023 : 127;
  const double size = std::abs(number);
  if (number != 0 && !(size >= std::ldexp(1.0, least) && size <= std::ldexp(1.0, most))) {
    raise("ValueError", message(name, " must be 0 or of magnitude 2^", least, " to 2^", most,
                                " for ", dtype_name(in.q.scalar_type()), " inputs, got ", number));
  }
}

void check_numbers(const OpInputs& in) {
  check_held(in, "softmax_scale", in.softmax_scale);
  check_held(in, "softcap", in.softcap);
  if (in.softcap < 0) {
    raise("ValueError", message("softcap must be a number >= 0 (0 is off), got ", in.softcap));
  }
  if (!(in.dropout_p >= 0 && in.dropout_p < 1)) {
    raise("ValueError",
          message("dropout_p must be a number with 0 <= dropout_p < 1, got ", in.dropout_p));
  }
  if (in.window_left < -1 || in.window_right < -1) {
    raise("ValueError", message("window_size must hold ints >= 0, or -1 for unlimited, got (",
                                in.window_left, ", ", in.window_right, ")"));
  }
}

void check_scores(const OpInputs& in) {
  const int64_t batch = batch_of(in), heads = in.q.size(in.q.dim() - 2);
  if (in.bias) check_bias(in);
  if (in.alibi_slopes) {
    const Tensor& slopes = *in.alibi_slopes;
    check_dtype(slopes, "alibi_slopes", ScalarType::Float);
    check_device(slopes, "alibi_slopes", in.q);
    check_shape(
        slopes, "alibi_slopes",
        slopes.dim() == 2 ? std::vector<int64_t>{batch, heads} : std::vector<int64_t>{heads});
  }
  if (in.sinks) {
    check_dtype(*in.sinks, "learnable_sink", scalar_type(accumulator_type(dtype_of(in.q, "q"))));
    check_device(*in.sinks, "learnable_sink", in.q);
    check_shape(*in.sinks, "learnable_sink", {heads});
  }
  if (in.block_counts || in.block_index || in.block_bits) check_block_mask(in);
  if (in.philox) {
    check_dtype(*in.philox, "philox", ScalarType::Long);
    check_device(*in.philox, "philox", in.q);
    check_shape(*in.philox, "philox", {2});
  } else if (in.dropout_p > 0) {
    raise("ValueError", "philox must hold a seed and an offset when dropout_p > 0, got None");
  }
}

}  // namespace

void check_shape(const Tensor& t, const char* name, const std::vector<int64_t>& sizes) {
  if (sizes_of(t) != sizes) {
    raise("ValueError",
          message(name, " must have shape ", shape_text(sizes), ", got ", shape_text(t.sizes())));
  }
}

void check_dtype(const Tensor& t, const char* name, ScalarType type) {
  if (t.scalar_type() != type) {
    raise("TypeError",
          message(name, " must be ", dtype_name(type), ", got ", dtype_name(t.scalar_type())));
  }
}

void check_device(const Tensor& t, const char* name, const Tensor& like) {
  if (t.is_cpu() != like.is_cpu() || t.get_device_index() != like.get_device_index()) {
    raise("ValueError", message(name, " must be on the device of q"));
  }
}

void check_per_batch(const Tensor& t, const char* name, int64_t batch, const Tensor& like) {
  check_dtype(t, name, ScalarType::Int);
  check_device(t, name, like);
  check_shape(t, name, {batch});
}

void check_inputs(const OpInputs& in) {
  check_numbers(in);
  check_qkv(in);
  check_lengths(in);
  check_scores(in);
}

TensorRef tensor_ref(const Tensor& t) {
  if (t.dim() == 3) return {t.data_ptr(), 0, step(t, 0), step(t, 1)};
  return {t.data_ptr(), step(t, 0), step(t, 1), step(t, 2)};
}

Tensor with_unit_stride(const Tensor& t, std::vector<Tensor>& kept) {
  if (last(t) == 1 || t.stride(t.dim() - 1) == 1) return t;
  kept.push_back(torch::stable::contiguous(t));
  return kept.back();
}

Tensor as_contiguous(const Tensor& t, std::vector<Tensor>& kept) {
  if (t.is_contiguous()) return t;
  kept.push_back(torch::stable::contiguous(t));
  return kept.back();
}

const int32_t* int_data(const Tensor& t) {
  static const int32_t kNone = 0;
  return t.numel() == 0 ? &kNone : static_cast<const int32_t*>(t.data_ptr());
}

}  // namespace flash_attn
