// SPDX-License-Identifier: BSD-3-Clause
// Merges the partial results of splits into out and lse, as core/merge.h does with lse = m + log l.
// The empty rule: a split whose sum is 0 has weight exactly 0 and its out is not read.
//
//   grid   one block takes kCombineRows rows of a sequence, a row being a (position, head): the
//          heads of a position lie side by side in out
//   warp   one row: weights by lane, then columns by lane, split by split
#pragma once

#include "core/rows.h"
#include "core/slots.h"
#include "cuda/launch.h"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/element.cuh"
#include "cuda/tile/store.cuh"

namespace flash_attn {

constexpr int kCombineRows = 4;  // and warps
constexpr int kMostSplits = 256;

template <class Element>
__global__ void __launch_bounds__(kCombineRows * 32)
    combine_kernel(const __grid_constant__ AttnParams p,
                   const __grid_constant__ PartialResult partial,
                   int splits) {
  __shared__ float weights[kCombineRows][kMostSplits];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const TileSlot slot =
      find_slot(p.seq_q, p.batch, p.seqlen_q, p.heads_q, kCombineRows, blockIdx.x);
  const SeqInfo seq(p, slot.batch);
  const PackedRows rows(p.heads_q, 0);
  const int64_t row = int64_t{slot.tile} * kCombineRows + warp;
  if (slot.tile < 0 || row >= rows.rows(seq.q_len)) return;
  const int i = rows.position(row), head = rows.head(row);
  const int64_t at = seq.lse_offset(p, head, i);

  float most = -INFINITY;
  for (int s = lane; s < splits; s += 32) {
    const float2 split = partial.sums[s * partial.rows + at];
    if (split.y != 0) most = fmaxf(most, split.x);
  }
  most = warp_max(most);
  float sum = 0;
  for (int s = lane; s < splits; s += 32) {
    const float2 split = partial.sums[s * partial.rows + at];
    const float weight =
        split.y == 0 ? 0.0f : split.y * ptx::exp2_approx((split.x - most) * kLog2e);
    weights[warp][s] = weight;
    sum += weight;
  }
  sum = warp_sum(sum);
  __syncwarp();
  const float inverse = sum == 0 ? 0.0f : 1 / sum;
  if (lane == 0) static_cast<float*>(p.lse)[at] = lse_of(most, sum);

  Element* out = static_cast<Element*>(p.out.ptr) + seq.q_offset(p.out, i, head);
  for (int c = lane; c < p.head_dim_v; c += 32) {
    float value = 0;
#pragma unroll 4
    for (int s = 0; s < splits; ++s) {
      const float weight = weights[warp][s];
      if (weight != 0)
        value += weight * partial.out[(s * partial.rows + at) * partial_columns(p) + c];
    }
    store_element(out + c, value * inverse);
  }
}

template <class Element>
cudaError_t launch_combine(const AttnParams& p,
                           const PartialResult& partial,
                           int splits,
                           cudaStream_t stream) {
  if (splits > kMostSplits) return cudaErrorInvalidConfiguration;
  const int64_t blocks = slot_count(p.seq_q, p.batch, p.seqlen_q, p.heads_q, kCombineRows);
  return launch(combine_kernel<Element>, blocks, kCombineRows * 32, stream, p, partial, splits);
}

}  // namespace flash_attn
