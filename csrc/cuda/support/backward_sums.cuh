// SPDX-License-Identifier: BSD-3-Clause
// Gradients with one element a head, dslopes and dsinks: sums in a fixed order, so that every call
// gives the same bits.
#pragma once

#include "core/slots.h"
#include "cuda/launch.h"
#include "cuda/tile/fragment.cuh"

namespace flash_attn {

constexpr int kSumThreads = 256;

// Of all threads of a block, in thread 0.
__device__ __forceinline__ double block_sum(double x) {
  __shared__ double parts[kSumThreads / 32];
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  if (threadIdx.x != 0) return 0;
  for (int warp = 1; warp < kSumThreads / 32; ++warp)
    x += parts[warp];
  return x;
}

// dslopes from parts (heads_q, slots), one a tile of `block` queries (core/slots.h). One block for
// each element.
static __global__ void __launch_bounds__(kSumThreads) slopes_kernel(
    const __grid_constant__ AttnParams p, const double* parts, int64_t slots, int block) {
  const int head = blockIdx.x % p.heads_q, batch = blockIdx.x / p.heads_q;
  int64_t begin = 0, end = slots;
  if (p.alibi.batch != 0) {
    const bool packed = p.seq_q.cu_seqlens != nullptr;
    const auto first = [&](int b) {
      if (b == p.batch) return slots;
      return packed ? first_slot(p.seq_q, b, 1, block) : slots / p.batch * b;
    };
    begin = first(batch), end = first(batch + 1);
  }
  double sum = 0;
  for (int64_t slot = begin + threadIdx.x; slot < end; slot += kSumThreads)
    sum += parts[head * slots + slot];
  sum = block_sum(sum);
  if (threadIdx.x == 0) static_cast<float*>(p.grad.dslopes)[blockIdx.x] = static_cast<float>(sum);
}

inline cudaError_t launch_slopes(
    const AttnParams& p, const double* parts, int64_t slots, int block, cudaStream_t stream) {
  const int64_t blocks = int64_t{p.alibi.batch != 0 ? p.batch : 1} * p.heads_q;
  return launch(slopes_kernel, blocks, kSumThreads, stream, p, parts, slots, block);
}

// dsink = -sum over rows of exp(sink - lse) * delta, the sink being one more key without a value.
// One block for each head.
static __global__ void __launch_bounds__(kSumThreads)
    sinks_kernel(const __grid_constant__ AttnParams p) {
  const int head = blockIdx.x;
  const float sink = static_cast<const float*>(p.sinks.ptr)[head];
  double sum = 0;
  for (int b = 0; b < p.batch; ++b) {
    const SeqInfo seq(p, b);
    const int64_t first = seq.lse_offset(p, head, 0);
    const float* lse = static_cast<const float*>(p.lse) + first;
    const float* delta = static_cast<const float*>(p.grad.delta) + first;
    for (int i = threadIdx.x; i < seq.q_len; i += kSumThreads) {
      if (lse[i] != -INFINITY) sum -= static_cast<double>(expf(sink - lse[i]) * delta[i]);
    }
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) static_cast<float*>(p.grad.dsinks)[head] = static_cast<float>(sum);
}

inline cudaError_t launch_sinks(const AttnParams& p, cudaStream_t stream) {
  return launch(sinks_kernel, p.heads_q, kSumThreads, stream, p);
}

}  // namespace flash_attn
