// SPDX-License-Identifier: BSD-3-Clause
// Tensors -> AppendParams and RotaryParams (core/cache.h), for both devices. Shapes, dtypes and
// devices are checked here; what stands in lengths, tables and indices is not read.
#pragma once

#include "core/cache.h"
#include "torch/checks.h"

namespace flash_attn {

// The operators' arguments, by the names of schema.cpp.
struct AppendInputs {
  const Tensor &k_cache, &v_cache, &k, &v;
  const OptTensor &cos, &sin;
  const Tensor& cache_seqlens;
  const OptTensor &cache_batch_idx, &block_table;
  bool interleaved;
};

struct RotaryInputs {
  const Tensor &x, &cos, &sin, &offsets;
  bool interleaved, per_row;
};

// `kept` keeps copies alive that the pointers of the result need.
AppendParams fill_append(const AppendInputs& in, std::vector<Tensor>& kept);
// Everything but out.
RotaryParams fill_rotary(const RotaryInputs& in, std::vector<Tensor>& kept);
// The memory of out, named in p.
Tensor allocate_rotated(RotaryParams& p, const Tensor& x);

}  // namespace flash_attn
