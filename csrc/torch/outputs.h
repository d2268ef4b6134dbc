// SPDX-License-Identifier: BSD-3-Clause
// What the forward and backward operators give back, and what the backward is given: shapes,
// allocation and the pointers in AttnParams, the same on both devices.
#pragma once

#include "torch/signatures.h"

namespace flash_attn {

// Bits of backward's `needs`.
enum Needs : int64_t { kQ = 1, kK = 2, kV = 4, kBias = 8, kSlopes = 16, kSinks = 32 };

// Whether there is a query row at all. Without one there is nothing to run.
inline bool has_queries(const AttnParams& p) {
  return p.batch > 0 && p.seqlen_q > 0 && p.heads_q > 0;
}

// (batch, heads_q, seqlen_q), packed (heads_q, total_q).
std::vector<int64_t> lse_sizes(const OpInputs& in);

// out and lse, and in `p` where they lie.
ForwardResult allocate_outputs(const OpInputs& in, AttnParams& p);

// The gradients of a call: those that are wanted in the shape of their inputs, the others (0,).
struct GradientTensors {
  Tensor dq, dk, dv, dbias, dslopes, dsinks;
  Tensor delta;  // of the call alone

  BackwardResult results() const { return {dq, dk, dv, dbias, dslopes, dsinks}; }
};

// Checks what only the backward pass is given against the inputs, then allocates; `problem` gets
// the pointers of all that the kernels read and write.
GradientTensors prepare_backward(const OpInputs& in, const BackwardInputs& given, Problem& problem);

}  // namespace flash_attn
