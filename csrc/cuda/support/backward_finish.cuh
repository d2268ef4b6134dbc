// SPDX-License-Identifier: BSD-3-Clause
// The end of the backward pass: dq from its fp32 accumulator, or dk and dv from the sums of slices,
// added up in a fixed order.
//
// An accumulator has a line of `columns` (a multiple of 16) for every element of lse (dq), or for
// every (batch, key head, key), packed (key head, key). Eight lines and 16 columns are 128 floats
// in a row, as the mma registers of a warp had them (accumulator_offset): of a line, floats 4t … 4t
// + 3 are columns 2t, 2t + 1, 8 + 2t, 9 + 2t.
#pragma once

#include "core/params.h"
#include "core/seqlen.h"
#include "cuda/launch.h"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/load.cuh"

namespace flash_attn {

constexpr int kFinishThreads = 256;
constexpr int kFinishLoads = 4;       // of a thread
constexpr int kAccumulatorLines = 8;  // that lie together

// Where the 16 floats of a line and of the columns from `column` on, a multiple of 16, begin.
FA_HD int64_t accumulator_offset(int64_t line, int column, int columns) {
  return (line / kAccumulatorLines * columns + column) * kAccumulatorLines +
         line % kAccumulatorLines * 16;
}
// Floats of an accumulator.
FA_HD int64_t accumulator_size(int64_t lines, int columns) {
  return round_up(lines, int64_t{kAccumulatorLines}) * columns;
}

// Rows of an accumulator of dk or dv, and the row of a key.
FA_HD int64_t key_rows(const AttnParams& p) {
  const bool packed = p.seq_k.cu_seqlens != nullptr;
  return (packed ? p.seq_k.total : int64_t{p.batch} * p.seqlen_k) * p.heads_k;
}
FA_HD int64_t key_row(const AttnParams& p, const SeqInfo& seq, int head, int key) {
  if (p.seq_k.cu_seqlens != nullptr) return head * p.seq_k.total + seq.k_row + key;
  return (seq.k_batch * p.heads_k + head) * p.seqlen_k + key;
}

// Where the accumulator goes.
struct FinishTarget {
  TensorRef to;
  int64_t rows;  // of a head of one batch, or of all when packed
  int64_t planes;
  int heads, dim;
  float scale;
};

// Lines of an accumulator that a block takes.
FA_HD int finish_lines(int columns) {
  return max_of(1, kFinishThreads * kFinishLoads / 2 / columns) * kAccumulatorLines;
}

// Of the 16 columns that four threads share, four floats in each as in dq's fragment: this thread's
// four columns, times scale. What makes its neighbours' columns it gives away. All lanes.
template <class Element>
__device__ __forceinline__ uint2 four_columns(const float4& x, float scale) {
  const int lane = threadIdx.x % 32, t = lane % 4, from = lane - t + t % 2 * 2;
  const uint32_t low = pack_pair(Element(), x.x * scale, x.y * scale);
  const uint32_t high = pack_pair(Element(), x.z * scale, x.w * scale);
  const uint32_t low0 = __shfl_sync(0xffffffffu, low, from);
  const uint32_t low1 = __shfl_sync(0xffffffffu, low, from + 1);
  const uint32_t high0 = __shfl_sync(0xffffffffu, high, from);
  const uint32_t high1 = __shfl_sync(0xffffffffu, high, from + 1);
  return t < 2 ? uint2{low0, low1} : uint2{high0, high1};
}

// A thread takes four floats of a line at a time.
template <class Element>
__global__ void __launch_bounds__(kFinishThreads) backward_finish_kernel(
    const __grid_constant__ FinishTarget target, const float* accum, int columns, int splits) {
  const int64_t lines = target.planes * target.rows, all = accumulator_size(lines, columns);
  const int block_lines = finish_lines(columns), floats = block_lines * columns;
  const int64_t first_line = int64_t{blockIdx.x} * block_lines;
  const int64_t first_plane = quotient(first_line, static_cast<int>(target.rows));
  const int64_t first_row = first_line - first_plane * target.rows;
  accum += first_line * columns;
  const int t = threadIdx.x % 4;
  const bool whole = copies_whole_chunks<Element>(target.to);
  for (int begin = threadIdx.x * 4; begin < floats; begin += kFinishLoads * kFinishThreads * 4) {
    float4 x[kFinishLoads] = {};
#pragma unroll
    for (int k = 0; k < kFinishLoads; ++k) {
      const int at = begin + k * kFinishThreads * 4;
      if (at >= floats || first_line * columns + at >= all) continue;
      x[k] = *reinterpret_cast<const float4*>(accum + at);
      for (int s = 1; s < splits; ++s) {
        const float4 y = *reinterpret_cast<const float4*>(accum + s * all + at);
        x[k] = {x[k].x + y.x, x[k].y + y.y, x[k].z + y.z, x[k].w + y.w};
      }
    }
#pragma unroll
    for (int k = 0; k < kFinishLoads; ++k) {
      const uint2 pairs = four_columns<Element>(x[k], target.scale);
      const int at = begin + k * kFinishThreads * 4;
      const int chunk = at / (kAccumulatorLines * 16), across = columns / 16;
      const int group = chunk / across, column = (chunk - group * across) * 16 + t * 4;
      const int line = group * kAccumulatorLines + at / 16 % kAccumulatorLines;
      if (at >= floats || first_line + line >= lines || column >= target.dim) continue;
      int64_t row = first_row + line, plane = first_plane;
      for (; row >= target.rows; row -= target.rows)
        ++plane;
      const int batch = static_cast<int>(plane) / target.heads;
      const int head = static_cast<int>(plane) - batch * target.heads;
      Element* to = static_cast<Element*>(target.to.ptr) + row * target.to.row +
                    head * target.to.head + batch * target.to.batch + column;
      if (whole && column + 4 <= target.dim) {
        *reinterpret_cast<uint2*>(to) = pairs;
        continue;
      }
      const uint32_t word[2] = {pairs.x, pairs.y};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const uint16_t bits = static_cast<uint16_t>(word[e / 2] >> (e % 2 * 16));
        if (column + e < target.dim) reinterpret_cast<uint16_t*>(to)[e] = bits;
      }
    }
  }
}

template <class Element>
cudaError_t launch_finish(const FinishTarget& target,
                          const float* accum,
                          int splits,
                          cudaStream_t stream) {
  const int columns = round_up(target.dim, 16);
  const int64_t blocks = ceil_div(target.planes * target.rows, int64_t{finish_lines(columns)});
  if (blocks == 0) return cudaSuccess;
  return launch(backward_finish_kernel<Element>, blocks, kFinishThreads, stream, target, accum,
                columns, splits);
}

// dq = softmax_scale * accumulator.
FA_HD FinishTarget query_target(const AttnParams& p) {
  const bool packed = p.seq_q.cu_seqlens != nullptr;
  return {p.grad.dq,
          packed ? p.seq_q.total : p.seqlen_q,
          int64_t{packed ? 1 : p.batch} * p.heads_q,
          p.heads_q,
          p.head_dim,
          static_cast<float>(p.softmax_scale)};
}

// dk = softmax_scale * sum, dv = sum / (1 - p).
inline FinishTarget key_target(const AttnParams& p, bool values) {
  const bool packed = p.seq_k.cu_seqlens != nullptr;
  return {values ? p.grad.dv : p.grad.dk,
          packed ? p.seq_k.total : p.seqlen_k,
          int64_t{packed ? 1 : p.batch} * p.heads_k,
          p.heads_k,
          values ? p.head_dim_v : p.head_dim,
          static_cast<float>(values ? p.dropout.scale : p.softmax_scale)};
}

}  // namespace flash_attn
