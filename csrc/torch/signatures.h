// SPDX-License-Identifier: BSD-3-Clause
// The long argument lists of schema.cpp, written once for both devices: what torch calls gathers
// its arguments into OpInputs and hands them to `kRun`, the operator of ops_cpu.cpp or
// ops_cuda.cpp.
#pragma once

#include <tuple>

#include "torch/checks.h"

namespace flash_attn {

using ForwardResult = std::tuple<Tensor, Tensor>;  // out, lse
using BackwardResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// What only the backward pass is given.
struct BackwardInputs {
  const Tensor& dout;
  const OptTensor& dlse;
  const Tensor &out, &lse;
  bool deterministic;
  int64_t needs;
};

template <ForwardResult (*kRun)(const OpInputs&, int64_t family)>
ForwardResult forward_operator(const Tensor& q,
                               const Tensor& k,
                               const Tensor& v,
                               const OptTensor& cu_seqlens_q,
                               const OptTensor& cu_seqlens_k,
                               const OptTensor& seqused_k,
                               const OptTensor& leftpad_k,
                               const OptTensor& cache_batch_idx,
                               const OptTensor& block_table,
                               const OptTensor& bias,
                               const OptTensor& alibi_slopes,
                               const OptTensor& sinks,
                               const OptTensor& block_counts,
                               const OptTensor& block_index,
                               const OptTensor& block_counts_t,
                               const OptTensor& block_index_t,
                               const OptTensor& block_bits_index,
                               const OptTensor& block_bits_index_t,
                               const OptTensor& block_bits,
                               const OptTensor& philox,
                               double softmax_scale,
                               double softcap,
                               double dropout_p,
                               int64_t window_left,
                               int64_t window_right,
                               int64_t block_q,
                               int64_t block_k,
                               bool,  // deterministic: for the autograd of the operator
                               int64_t family) {
  return kRun({q,
               k,
               v,
               cu_seqlens_q,
               cu_seqlens_k,
               seqused_k,
               leftpad_k,
               cache_batch_idx,
               block_table,
               bias,
               alibi_slopes,
               sinks,
               block_counts,
               block_index,
               block_counts_t,
               block_index_t,
               block_bits_index,
               block_bits_index_t,
               block_bits,
               philox,
               softmax_scale,
               softcap,
               dropout_p,
               window_left,
               window_right,
               block_q,
               block_k},
              family);
}

template <BackwardResult (*kRun)(const OpInputs&, const BackwardInputs&, int64_t family)>
BackwardResult backward_operator(const Tensor& dout,
                                 const OptTensor& dlse,
                                 const Tensor& q,
                                 const Tensor& k,
                                 const Tensor& v,
                                 const Tensor& out,
                                 const Tensor& lse,
                                 const OptTensor& cu_seqlens_q,
                                 const OptTensor& cu_seqlens_k,
                                 const OptTensor& seqused_k,
                                 const OptTensor& bias,
                                 const OptTensor& alibi_slopes,
                                 const OptTensor& sinks,
                                 const OptTensor& block_counts,
                                 const OptTensor& block_index,
                                 const OptTensor& block_counts_t,
                                 const OptTensor& block_index_t,
                                 const OptTensor& block_bits_index,
                                 const OptTensor& block_bits_index_t,
                                 const OptTensor& block_bits,
                                 const OptTensor& philox,
                                 double softmax_scale,
                                 double softcap,
                                 double dropout_p,
                                 int64_t window_left,
                                 int64_t window_right,
                                 int64_t block_q,
                                 int64_t block_k,
                                 bool deterministic,
                                 int64_t needs,
                                 int64_t family) {
  const OptTensor none;  // a cache has no backward pass
  return kRun({q,
               k,
               v,
               cu_seqlens_q,
               cu_seqlens_k,
               seqused_k,
               none,
               none,
               none,
               bias,
               alibi_slopes,
               sinks,
               block_counts,
               block_index,
               block_counts_t,
               block_index_t,
               block_bits_index,
               block_bits_index_t,
               block_bits,
               philox,
               softmax_scale,
               softcap,
               dropout_p,
               window_left,
               window_right,
               block_q,
               block_k},
              {dout, dlse, out, lse, deterministic, needs}, family);
}

}  // namespace flash_attn
