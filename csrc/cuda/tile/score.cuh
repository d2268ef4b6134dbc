// SPDX-License-Identifier: BSD-3-Clause
// What happens to a warp's scores between the two products, beyond the mask: scale, softcap, ALiBi
// and bias in the order of the specification, and dropout on the probabilities. Only kGeneral
// kernels have it; each feature is a branch that all threads take alike.
#pragma once

#include "core/mask.h"
#include "core/philox.h"
#include "core/rows.h"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/fragment.cuh"

namespace flash_attn {

// tanh x by exponentials: 1 - 2 / (e^2|x| + 1). Absolute error 2^-22.
__device__ __forceinline__ float tanh_exact(float x) {
  const float e = ptx::exp2_approx(fabsf(x) * 2.885390082f);
  return copysignf(1 - __fdividef(2.0f, e + 1), x);
}

__device__ __forceinline__ float bias_at(const Bias& bias, int64_t at) {
  if (bias.boolean) return static_cast<const uint8_t*>(bias.ptr)[at] ? 0.0f : -INFINITY;
  switch (bias.dtype) {
    case DType::kF16: return __half2float(static_cast<const __half*>(bias.ptr)[at]);
    case DType::kBF16: return __bfloat162float(static_cast<const __nv_bfloat16*>(bias.ptr)[at]);
    default: return static_cast<const float*>(bias.ptr)[at];
  }
}

// The rows of a thread: row h of block b is 8 * h below the first row of the block.
template <int kRowBlocks>
struct ThreadRows {
  int position[kRowBlocks][2], head[kRowBlocks][2];

  // `row`: packed row of the warp's first.
  __device__ ThreadRows(const PackedRows& rows, int row, int end) {
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = min(row + 16 * b + 8 * h + static_cast<int>(threadIdx.x) % 32 / 4, end - 1);
        position[b][h] = rows.position(r);
        head[b][h] = rows.head(r);
      }
    }
  }
};

// scores, q . k -> the scores of the specification, in natural units. `key`: first key of the tile.
template <int kRowBlocks, int kColumns>
__device__ __forceinline__ void apply_features(float (&s)[kRowBlocks][kColumns][4],
                                               const AttnParams& p,
                                               const Mask& mask,
                                               const ThreadRows<kRowBlocks>& rows,
                                               int batch,
                                               int key) {
  const float scale = static_cast<float>(p.softmax_scale), cap = static_cast<float>(p.softcap);
#pragma unroll
  for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int i = rows.position[b][h], head = rows.head[b][h];
      const float slope =
          p.alibi.slopes != nullptr ? p.alibi.slopes[batch * p.alibi.batch + head] : 0.0f;
      const int64_t row = batch * p.bias.batch + head * p.bias.head + i * p.bias.row;
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int c = 2 * h; c < 2 * h + 2; ++c) {
          const int j = key + 8 * n + fragment_column(c);
          float x = s[b][n][c] * scale;
          if (cap > 0) x = cap * tanh_exact(x / cap);
          if (p.alibi.slopes != nullptr)
            x -= slope * static_cast<float>(abs(i + mask.k_len - mask.q_len - j));
          if (p.bias.ptr != nullptr && j < mask.k_len) {
            const float bias = bias_at(p.bias, row + j * p.bias.col);
            x = bias == -INFINITY ? -INFINITY : x + bias;
          }
          s[b][n][c] = x;
        }
      }
    }
  }
}

// Zeroes the probabilities that dropout drops; the scale of the others waits for the end. A call of
// Philox covers rows g, g + 8 and the same column of four neighbouring 8-column accumulators
// (core/philox.h), so a block of 16 rows x 32 columns takes two.
template <int kRowBlocks, int kColumns>
__device__ __forceinline__ void apply_dropout(float (&s)[kRowBlocks][kColumns][4],
                                              const AttnParams& p,
                                              const ThreadRows<kRowBlocks>& rows,
                                              int batch,
                                              int key) {
  static_assert(kColumns % 4 == 0);
#pragma unroll
  for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
    for (int n = 0; n < kColumns; n += 4) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int j = key + 8 * n + fragment_column(c);
        const DropoutMask first(p, batch, rows.head[b][0]);
        const Philox4 lanes = first.lanes(rows.position[b][0], j);
        // Packed heads and tiles that begin between multiples of 16 break the pairing of rows.
        const bool paired = rows.head[b][1] == rows.head[b][0] &&
                            rows.position[b][1] == rows.position[b][0] + 8 &&
                            rows.position[b][0] % 16 < 8;
        const Philox4 other =
            paired ? lanes : DropoutMask(p, batch, rows.head[b][1]).lanes(rows.position[b][1], j);
        const int half0 = rows.position[b][0] / 8 % 2 * 4, half1 = rows.position[b][1] / 8 % 2 * 4;
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          if (lanes.lane(half0 + m) >= first.keep_below) s[b][n + m][c] = 0;
          if (other.lane(half1 + m) >= first.keep_below) s[b][n + m][2 + c] = 0;
        }
      }
    }
  }
}

}  // namespace flash_attn
