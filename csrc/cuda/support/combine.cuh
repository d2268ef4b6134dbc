// SPDX-License-Identifier: BSD-3-Clause
// Merges the partial results of splits into out and lse, as core/merge.h does with lse = m + log l.
// The empty rule: a split whose sum is 0 has weight exactly 0 and its out is not read.
//
//   team   the warps that share a row, a row being a (position, head): one, or all of a block where
//          there are many splits and so few rows. Each computes the weights of all splits
//   warp   sums up every team-th split, four columns a lane
//   block  adds up a team's sums
#pragma once

#include "core/rows.h"
#include "core/slots.h"
#include "cuda/launch.h"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/element.cuh"
#include "cuda/tile/store.cuh"

namespace flash_attn {

constexpr int kCombineWarps = 8;
constexpr int kMostSplits = 256, kMostCombineColumns = 512;

// The weights of a row's splits -> shared memory, lse where it is wanted. Returns 1 / their sum.
// One warp.
__device__ __forceinline__ float split_weights(
    const PartialResult& partial, int splits, int64_t row, float* weights, float* lse) {
  const int lane = threadIdx.x % 32;
  float most = -INFINITY;
  for (int s = lane; s < splits; s += 32) {
    const float2 split = partial.sums[s * partial.rows + row];
    if (split.y != 0) most = fmaxf(most, split.x);
  }
  most = warp_max(most);
  float sum = 0;
  for (int s = lane; s < splits; s += 32) {
    const float2 split = partial.sums[s * partial.rows + row];
    const float weight =
        split.y == 0 ? 0.0f : split.y * ptx::exp2_approx((split.x - most) * kLog2e);
    weights[s] = weight;
    sum += weight;
  }
  sum = warp_sum(sum);
  __syncwarp();
  if (lse != nullptr && lane == 0) *lse = lse_of(most, sum);
  return sum == 0 ? 0.0f : 1 / sum;
}

template <class Element>
__global__ void __launch_bounds__(kCombineWarps * 32)
    combine_kernel(const __grid_constant__ AttnParams p,
                   const __grid_constant__ PartialResult partial,
                   int splits,
                   int team) {
  __shared__ float weights[kCombineWarps][kMostSplits];
  __shared__ float parts[kCombineWarps][kMostCombineColumns];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, member = warp % team;
  const int rows_each = kCombineWarps / team;
  const TileSlot slot = find_slot(p.seq_q, p.batch, p.seqlen_q, p.heads_q, rows_each, blockIdx.x);
  const SeqInfo seq(p, slot.batch);
  const PackedRows rows(p.heads_q, 0);
  const int64_t row = int64_t{slot.tile} * rows_each + warp / team;
  if (slot.tile < 0 || row >= rows.rows(seq.q_len)) return;  // of a team all warps, or none
  const int i = rows.position(row), head = rows.head(row);
  const int64_t at = seq.lse_offset(p, head, i);
  const float inverse = split_weights(partial, splits, at, weights[warp],
                                      member == 0 ? static_cast<float*>(p.lse) + at : nullptr);

  Element* out = static_cast<Element*>(p.out.ptr) + seq.q_offset(p.out, i, head);
  const int columns = partial_columns(p);
  for (int c = 4 * lane; c < p.head_dim_v; c += 128) {
    constexpr int kTogether = 4;
    const float* from = partial.out + at * columns + c;
    float sum[4] = {};
    for (int first = member; first < splits; first += kTogether * team) {
      float2 part[kTogether][2];
      float weight[kTogether];
#pragma unroll
      for (int t = 0; t < kTogether; ++t) {
        const int s = first + t * team;
        weight[t] = s < splits ? weights[warp][s] : 0.0f;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          part[t][h] = {};
          if (weight[t] != 0 && c + 2 * h < columns) {
            part[t][h] =
                *reinterpret_cast<const float2*>(from + s * (partial.rows * columns) + 2 * h);
          }
        }
      }
#pragma unroll
      for (int t = 0; t < kTogether; ++t) {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          sum[e] += weight[t] * (e % 2 == 0 ? part[t][e / 2].x : part[t][e / 2].y);
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (c + e >= p.head_dim_v) continue;
      if (team == 1)
        store_element(out + c + e, sum[e] * inverse);
      else
        parts[warp][c + e] = sum[e];
    }
  }
  if (team == 1) return;
  __syncthreads();
  for (int c = threadIdx.x; c < p.head_dim_v; c += kCombineWarps * 32) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kCombineWarps; ++w)
      sum += parts[w][c];
    store_element(out + c, sum * inverse);
  }
}

template <class Element>
cudaError_t launch_combine(const AttnParams& p,
                           const PartialResult& partial,
                           int splits,
                           cudaStream_t stream) {
  if (splits > kMostSplits || p.head_dim_v > kMostCombineColumns)
    return cudaErrorInvalidConfiguration;
  const int team = splits >= kCombineWarps ? kCombineWarps : 1;
  const int64_t blocks = slot_count(p.seq_q, p.batch, p.seqlen_q, p.heads_q, kCombineWarps / team);
  return launch(combine_kernel<Element>, blocks, kCombineWarps * 32, stream, p, partial, splits,
                team);
}

}  // namespace flash_attn
