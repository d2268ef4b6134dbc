// SPDX-License-Identifier: BSD-3-Clause
// What happens to a warp's scores between the two products, beyond the mask: scale, softcap, ALiBi
// and bias in the order of the specification, and dropout on the probabilities. Only kGeneral
// kernels have it; each feature is a branch that all threads take alike.
#pragma once

#include "core/philox.h"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/bias.cuh"

namespace flash_attn {

// q . k -> scale * (q . k), capped: cap * tanh(scale * (q . k) / cap) with tanh x = 1 - 2 / (e^2x +
// 1) of |x|, whose absolute error is 2^-22: too much for fp32.
template <class Element, int kRowBlocks, int kColumns>
__device__ __forceinline__ void scale_and_cap(float (&s)[kRowBlocks][kColumns][4],
                                              float scale,
                                              float cap) {
  if (cap <= 0) {
#pragma unroll
    for (int e = 0; e < kRowBlocks * kColumns * 4; ++e)
      s[e / 4 / kColumns][e / 4 % kColumns][e % 4] *= scale;
    return;
  }
  if constexpr (sizeof(Element) == 4) {
    const float inside = scale / cap;
#pragma unroll
    for (int e = 0; e < kRowBlocks * kColumns * 4; ++e) {
      float& x = s[e / 4 / kColumns][e / 4 % kColumns][e % 4];
      x = cap * tanhf(x * inside);
    }
    return;
  }
  const float twice = scale / cap * 2.885390082f;  // 2 log2 e
#pragma unroll
  for (int e = 0; e < kRowBlocks * kColumns * 4; ++e) {
    float& x = s[e / 4 / kColumns][e / 4 % kColumns][e % 4];
    x *= twice;
    const float inverse = ptx::reciprocal_approx(ptx::exp2_approx(fabsf(x)) + 1);
    x = copysignf(fmaf(-2 * cap, inverse, cap), x);
  }
}

// s -= slope * |i + shift - j|, where shift = k_len - q_len.
template <int kRowBlocks, int kColumns>
__device__ __forceinline__ void apply_alibi(float (&s)[kRowBlocks][kColumns][4],
                                            const Alibi& alibi,
                                            const WarpRows& rows,
                                            int shift,
                                            int batch,
                                            int key) {
#pragma unroll
  for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float slope = alibi.slopes[batch * alibi.batch + rows(b, h).head];
      const int away = rows(b, h).position + shift - key - fragment_column(0);
      const float distance = static_cast<float>(away);
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = s[b][n][2 * h + c];
          x = fmaf(-slope, fabsf(distance - static_cast<float>(8 * n + c)), x);
        }
      }
    }
  }
}

// q . k -> the scores of the specification, in natural units. `key`: first key of the tile.
template <class Element, int kRowBlocks, int kColumns>
__device__ __forceinline__ void apply_features(float (&s)[kRowBlocks][kColumns][4],
                                               const AttnParams& p,
                                               const WarpRows& rows,
                                               const BiasTile<kRowBlocks, kColumns>& bias,
                                               int shift,
                                               int batch,
                                               int key) {
  scale_and_cap<Element>(s, static_cast<float>(p.softmax_scale), static_cast<float>(p.softcap));
  if (p.alibi.slopes != nullptr) apply_alibi(s, p.alibi, rows, shift, batch, key);
  if (p.bias.ptr != nullptr) bias.add_to(s, p.bias);
}

// Dropout of any tile, element by element. Bit 2 * n + c of the result: column c of this thread's
// in the n-th eight columns is kept. `j`: key of the first.
template <int kColumns>
__device__ __forceinline__ uint32_t kept_columns(const DropoutMask& mask, int i, int j) {
  static_assert(kColumns <= 16);
  uint32_t kept = 0;
#pragma unroll 1
  for (int e = 0; e < 2 * kColumns; ++e) {
    const int key = j + e / 2 * 8 + e % 2, lane = dropout_lane(i, key);
    const Philox4 all = mask.lanes(i, key);
    const uint32_t low = lane & 2 ? all.word[1] : all.word[0];
    const uint32_t high = lane & 2 ? all.word[3] : all.word[2];
    const uint32_t value = (lane & 4 ? high : low) >> (lane % 2 * 16) & 0xffffu;
    kept |= uint32_t{value < mask.keep_below} << e;
  }
  return kept;
}

// Zeroes the probabilities that dropout drops; the scale of the others waits for the end. A call of
// Philox covers rows g, g + 8 and the same column of four neighbouring 8-column accumulators
// (core/philox.h), so a block of 16 rows x 32 columns takes two a thread. Packed heads, and tiles
// that begin between multiples of 16 rows or 32 keys, break that up and go one by one.
template <int kRowBlocks, int kColumns>
__device__ __forceinline__ void apply_dropout(float (&s)[kRowBlocks][kColumns][4],
                                              const AttnParams& p,
                                              const WarpRows& rows,
                                              int batch,
                                              int key) {
  constexpr int kLanes = kColumns < 4 ? kColumns : 4;
  static_assert(kLanes == 4 || kLanes == 2);
  const bool second = kLanes == 2 && key % 32 == 16;  // half of a call's columns
  if (rows.group == 1 && rows.first % 16 == 0 && (key % 32 == 0 || second)) {
    const DropoutMask mask(p, batch, rows(0, 0).head);
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
      const int i = rows.first + 16 * b + fragment_row(0);
#pragma unroll
      for (int n = 0; n < kColumns; n += 4) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          Philox4 lanes = mask.lanes(i, key + 8 * n + fragment_column(c));
          if (second) lanes.word[0] = lanes.word[1], lanes.word[2] = lanes.word[3];
#pragma unroll
          for (int m = 0; m < kLanes; ++m) {
            if (lanes.lane(m) >= mask.keep_below) s[b][n + m][c] = 0;
            if (lanes.lane(4 + m) >= mask.keep_below) s[b][n + m][2 + c] = 0;
          }
        }
      }
    }
    return;
  }
#pragma unroll
  for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const RowPlace row = rows(b, h);
      const uint32_t kept = kept_columns<kColumns>(DropoutMask(p, batch, row.head), row.position,
                                                   key + fragment_column(0));
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        if ((kept >> (2 * n) & 1u) == 0) s[b][n][2 * h] = 0;
        if ((kept >> (2 * n + 1) & 1u) == 0) s[b][n][2 * h + 1] = 0;
      }
    }
  }
}

}  // namespace flash_attn
