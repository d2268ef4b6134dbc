// SPDX-License-Identifier: BSD-3-Clause
// dq without a kernel of its own. The query heads that read one key head of a batch are a group;
// the last of a group's blocks turns its accumulator into dq and leaves zeros behind. So a few
// accumulators, which stay in the L2 cache, serve all groups in turn: group g has place g % places,
// once the group before it there is done. Blocks start in the order of the groups, so nobody waits
// for one that has not started, and with places enough hardly anybody waits.
#pragma once

#include "cuda/ptx/flag.cuh"
#include "cuda/support/backward_finish.cuh"
#include "cuda/support/backward_prepare.cuh"

namespace flash_attn {

constexpr int kRingColumns = 128;  // head_dim at most

struct DqRing {
  int places;     // 0: one accumulator of all rows, which launch_finish turns into dq
  int blocks;     // of a group
  int64_t lines;  // of a group's accumulator
  int* arrived;   // (places,) blocks of the group that are done; zero before
  int* finished;  // (places,) groups that are done with the place; zero before
};

// Lines of the accumulator of a group: whole ones.
inline int64_t ring_lines(const AttnParams& p) {
  return round_up(int64_t{p.group_size()} * p.seqlen_q, int64_t{kAccumulatorLines});
}

// For blocks of block_n keys at most, with columns for head_dim `columns`; 0: no ring. Only where
// all sequences are alike, so that every group has its blocks, and where it pays: a block makes dq
// of a MB in 50 us, nothing beside what many groups save, but the last of them all is waited for.
inline int ring_places(const AttnParams& p, int block_n, int columns) {
  constexpr int64_t kLeastGroups = 128, kMostFloats = 1 << 18;  // 2026-11, H200
  constexpr int kBlocks = 320;  // twice those that run at once; 2026-11, H200
  const Sequence &q = p.seq_q, &k = p.seq_k;
  const bool alike = q.cu_seqlens == nullptr && k.cu_seqlens == nullptr && k.used == nullptr &&
                     k.leftpad == nullptr && k.cache_batch_idx == nullptr && p.seqlen_k > 0;
  const int64_t groups = int64_t{p.batch} * p.heads_k;
  const int64_t floats = accumulator_size(ring_lines(p), columns);
  if (!alike || groups < kLeastGroups || groups > INT32_MAX || floats > kMostFloats) return 0;
  if (p.head_dim != columns || columns > kRingColumns || !rows_aligned(p.grad.dq, 2)) return 0;
  return static_cast<int>(min_of(groups, int64_t{kBlocks / ceil_div(p.seqlen_k, block_n) + 3}));
}

// By kWarps warps of a block: the `lines` lines of kColumns floats at `accum`, times scale, to the
// rows that row(line) points at, aligned to 8 bytes; zeros stay behind.
template <class Element, int kColumns, int kWarps, class Row>
__device__ __forceinline__ void ring_to_rows(float* accum, int lines, float scale, const Row& row) {
  constexpr int kGroups = 4, kChunks = 4;  // of eight lines and of 16 columns, loaded at once
  const int lane = threadIdx.x % 32, t = lane % 4;
  const int groups = ceil_div(lines, kAccumulatorLines);
#pragma unroll 1
  for (int first = threadIdx.x / 32; first < groups; first += kWarps * kGroups) {
    Element* to[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int line = (first + g * kWarps) * kAccumulatorLines + lane / 4;
      to[g] = line < lines ? row(line) + t * 4 : nullptr;
    }
#pragma unroll 1
    for (int column = 0; column < kColumns; column += kChunks * 16) {
      float4 x[kGroups][kChunks];
      float4* at = reinterpret_cast<float4*>(accum + column * kAccumulatorLines) + lane;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int c = 0; c < kChunks; ++c)
          x[g][c] = __ldcg(at + (min(first + g * kWarps, groups - 1) * kColumns + c * 16) * 2);
      }
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int c = 0; c < kChunks; ++c)
          if (first + g * kWarps < groups)
            __stcg(at + ((first + g * kWarps) * kColumns + c * 16) * 2, float4{});
      }
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          const uint2 pairs = four_columns<Element>(x[g][c], scale);
          if (to[g] != nullptr) *reinterpret_cast<uint2*>(to[g] + column + c * 16) = pairs;
        }
      }
    }
  }
}

}  // namespace flash_attn
