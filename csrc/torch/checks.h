// SPDX-License-Identifier: BSD-3-Clause
// From tensors to one AttnParams. Shapes and dtypes are checked again here (Python has done it with
// the same words); what lies inside the integer tensors is read only on the CPU, where reading
// costs nothing, and before anything is computed or written.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "core/params.h"
#include "torch/compat.h"

namespace flash_attn {

using OptTensor = std::optional<Tensor>;

// What forward and backward have in common, by the names of schema.cpp.
struct OpInputs {
  const Tensor &q, &k, &v;
  const OptTensor &cu_seqlens_q, &cu_seqlens_k, &seqused_k, &leftpad_k, &cache_batch_idx;
  const OptTensor& block_table;
  const OptTensor &bias, &alibi_slopes, &sinks;
  const OptTensor &block_counts, &block_index, &block_counts_t, &block_index_t;
  const OptTensor &block_bits_index, &block_bits_index_t, &block_bits;
  const OptTensor& philox;
  double softmax_scale, softcap, dropout_p;
  int64_t window_left, window_right, block_q, block_k;
};

struct Problem {
  AttnParams params;
  std::vector<Tensor> kept;  // copies that the pointers in params need
};

// Throws with a marker (compat.h) where shapes, dtypes, devices or numbers do not fit.
void check_inputs(const OpInputs& in);

// Everything but the outputs. Calls check_inputs; on the CPU checks lengths, pages and block lists
// as well, and takes the longest lengths as seqlen_q and seqlen_k.
Problem fill_params(const OpInputs& in);

inline std::vector<int64_t> sizes_of(const Tensor& t) {
  const auto sizes = t.sizes();
  return std::vector<int64_t>(sizes.begin(), sizes.end());
}

// Strides of (batch, row, head, dim), packed (row, head, dim); 0 for dimensions of size 1, whose
// strides mean nothing. The last dimension is contiguous.
TensorRef tensor_ref(const Tensor& t);

// `t`, or a contiguous copy where its last dimension is not contiguous; `kept` keeps the copy
// alive.
Tensor with_unit_stride(const Tensor& t, std::vector<Tensor>& kept);
Tensor as_contiguous(const Tensor& t, std::vector<Tensor>& kept);

// Data of an int32 tensor, never null: a null pointer means an absent feature, an empty tensor does
// not.
const int32_t* int_data(const Tensor& t);

// An element of an integer tensor, for messages. Values come cut to int32 (flash_attn/_checks.py),
// so its ends stand for all beyond.
std::string int_text(int32_t value);

void check_shape(const Tensor& t, const char* name, const std::vector<int64_t>& sizes);
void check_dtype(const Tensor& t, const char* name, ScalarType type);
void check_device(const Tensor& t, const char* name, const Tensor& like);
// (batch,) int32 on the device of `like`.
void check_per_batch(const Tensor& t, const char* name, int64_t batch, const Tensor& like);

// Pages that hold slots [0, length) of sequence `batch` exist, or are -1: ValueError otherwise.
void check_pages(const Pages& pages, int batch, int64_t length);
// Whether a sequence has no page at all: it is padding, whatever its length says.
bool is_padding(const Pages& pages, int batch);
// Entries of cache_batch_idx exist.
void check_entries(const int32_t* index, int64_t batch, int64_t entries);

}  // namespace flash_attn
