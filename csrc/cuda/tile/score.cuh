// SPDX-License-Identifier: BSD-3-Clause
// What happens to a warp's scores between the two products, beyond the mask: scale, softcap, ALiBi
// and bias in the order of the specification, and dropout on the probabilities. Only kGeneral
// kernels have it; each feature is a branch that all threads take alike.
#pragma once

#include "core/philox.h"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/bias.cuh"
#include "cuda/tile/softmax.cuh"

namespace flash_attn {

// How scores come from q . k. Between the steps they are kept in whatever unit costs nothing, which
// the exponent of the softmax makes good: tanh, for one, is not multiplied by the cap.
struct ScoreSteps {
  bool capped = false;
  float inside = 0;           // x = tanh(inside * q . k), if capped
  float factor = 1;           // then x *= factor, which is 1 but for unusual scales
  float unit = 1, slope = 1;  // then x is in this unit, a positive number; 1 / unit
  bool numbers = false;       // then x = unit * x + bias; else x keeps its unit
  bool any = false;           // of these steps, or a boolean bias

  ScoreSteps() = default;
  __host__ explicit ScoreSteps(const AttnParams& p)
      : capped(p.softcap > 0), numbers(p.bias.ptr != nullptr && !p.bias.boolean) {
    double size = capped ? p.softcap : p.softmax_scale;
    inside = static_cast<float>(capped ? p.softmax_scale / p.softcap : 0);
    const bool usual = size > 1e-20 && size < 1e20;
    factor = usual ? 1.0f : static_cast<float>(size);
    unit = usual ? static_cast<float>(size) : 1.0f;
    slope = 1 / unit;
    any = capped || !usual || p.alibi.slopes != nullptr || p.bias.ptr != nullptr;
  }

  // Of the finished scores.
  __host__ ScoreScale scale() const { return ScoreScale(numbers ? 1.0 : unit); }
};

// x -> tanh(inside * x), by 1 - 1 / (e^2y / 2 + 1 / 2), whose absolute error is 2^-22: too much for
// fp32.
template <class Element, int kRowBlocks, int kColumns>
__device__ __forceinline__ void cap_scores(float (&s)[kRowBlocks][kColumns][4], float inside) {
  const float twice = inside * 2.885390082f;  // 2 log2 e
#pragma unroll
  for (int e = 0; e < kRowBlocks * kColumns * 4; ++e) {
    float& x = s[e / 4 / kColumns][e / 4 % kColumns][e % 4];
    if constexpr (sizeof(Element) == 4) {
      x = tanhf(x * inside);
    } else {
      x = 1 - ptx::reciprocal_approx(ptx::exp2_approx(fmaf(x, twice, -1)) + 0.5f);
    }
  }
}

// The same of 16 bits with one division for two neighbours, so that a score that is no number
// spoils its neighbour: not where something hides it.
template <int kRowBlocks, int kColumns>
__device__ __forceinline__ void cap_pairs(float (&s)[kRowBlocks][kColumns][4], float inside) {
  const float twice = inside * 2.885390082f;
#pragma unroll
  for (int e = 0; e < kRowBlocks * kColumns * 2; ++e) {
    float(&x)[4] = s[e / 2 / kColumns][e / 2 % kColumns];
    float &a = x[e % 2 * 2], &b = x[e % 2 * 2 + 1];
    // tanh 21 is 1 in fp32, and the product of two such stays finite.
    const float more_a = ptx::exp2_approx(ptx::min_or_nan(fmaf(a, twice, -1), 60.0f)) + 0.5f;
    const float more_b = ptx::exp2_approx(ptx::min_or_nan(fmaf(b, twice, -1), 60.0f)) + 0.5f;
    const float inverse = ptx::reciprocal_approx(more_a * more_b);
    a = fmaf(-inverse, more_b, 1);
    b = fmaf(-inverse, more_a, 1);
  }
}

// s -= slope * |i + shift - j| * factor, where shift = k_len - q_len.
template <class Order, int kRowBlocks, int kColumns>
__device__ __forceinline__ void apply_alibi(float (&s)[kRowBlocks][kColumns][4],
                                            const Alibi& alibi,
                                            float factor,
                                            const WarpRows& rows,
                                            int shift,
                                            int batch,
                                            int key) {
#pragma unroll
  for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float slope = alibi.slopes[batch * alibi.batch + rows(b, h).head] * factor;
      const int away = rows(b, h).position + shift - key - Order::thread_key();
      const float distance = static_cast<float>(away);
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = s[b][n][2 * h + c];
          x = fmaf(-slope, fabsf(distance - static_cast<float>(Order::column_key(n) + c)), x);
        }
      }
    }
  }
}

// All steps but the bias. `key`: first key of the tile; `all_visible`: nothing will be hidden.
template <class Element, class Order, int kRowBlocks, int kColumns>
__device__ __forceinline__ void apply_steps(float (&s)[kRowBlocks][kColumns][4],
                                            const AttnParams& p,
                                            const ScoreSteps& steps,
                                            const WarpRows& rows,
                                            const SeqInfo& seq,
                                            int batch,
                                            int key,
                                            bool all_visible) {
  if (steps.capped) {
    if (sizeof(Element) == 2 && all_visible)
      cap_pairs(s, steps.inside);
    else
      cap_scores<Element>(s, steps.inside);
  }
  if (steps.factor != 1) {
#pragma unroll
    for (int e = 0; e < kRowBlocks * kColumns * 4; ++e)
      s[e / 4 / kColumns][e / 4 % kColumns][e % 4] *= steps.factor;
  }
  if (p.alibi.slopes != nullptr)
    apply_alibi<Order>(s, p.alibi, steps.slope, rows, seq.k_len - seq.q_len, batch, key);
}

// The scores of any tile. A bias asks for KeysByThread.
template <class Element, class Order, int kRowBlocks, int kColumns>
__device__ __forceinline__ void apply_features(float (&s)[kRowBlocks][kColumns][4],
                                               const AttnParams& p,
                                               const ScoreSteps& steps,
                                               const WarpRows& rows,
                                               const SeqInfo& seq,
                                               int batch,
                                               int key) {
  apply_steps<Element, Order>(s, p, steps, rows, seq, batch, key, false);
  if constexpr (Order::kRun > 0) {
    if (p.bias.ptr != nullptr) add_bias(s, p.bias, steps.unit, rows, batch, key, seq.k_len);
  }
}

// Dropout of any tile, element by element. Bit 2 * n + c of the result: column c of this thread's
// in the n-th eight columns is kept. `j`: key of the first.
template <class Order, int kColumns>
__device__ __forceinline__ uint32_t kept_columns(const DropoutMask& mask, int i, int j) {
  static_assert(kColumns <= 16);
  uint32_t kept = 0;
#pragma unroll 1
  for (int e = 0; e < 2 * kColumns; ++e) {
    const int key = j + Order::column_key(e / 2) + e % 2, lane = dropout_lane(i, key);
    const Philox4 all = mask.lanes(i, key);
    const uint32_t low = lane & 2 ? all.word[1] : all.word[0];
    const uint32_t high = lane & 2 ? all.word[3] : all.word[2];
    const uint32_t value = (lane & 4 ? high : low) >> (lane % 2 * 16) & 0xffffu;
    kept |= uint32_t{value < mask.keep_below} << e;
  }
  return kept;
}

// Of KeysInOrder: a call of Philox covers rows g, g + 8 and the same column of four neighbouring
// 8-column accumulators (core/philox.h), so a block of 16 rows x 32 columns takes two a thread.
// `second`: the tile is the second half of 32 keys.
template <int kColumns>
__device__ __forceinline__ void drop_in_order(
    float (&s)[kColumns][4], const DropoutMask& mask, int i, int key, bool second) {
  constexpr int kLanes = kColumns < 4 ? kColumns : 4;
  static_assert(kLanes == 4 || kLanes == 2);
#pragma unroll
  for (int n = 0; n < kColumns; n += 4) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      Philox4 lanes = mask.lanes(i, key + 8 * n + fragment_column(c));
      if (second) lanes.word[0] = lanes.word[1], lanes.word[2] = lanes.word[3];
#pragma unroll
      for (int m = 0; m < kLanes; ++m) {
        // A lane as the high half of a word, whatever the low half is.
        const uint32_t upper = lanes.word[m / 2] << (m % 2 == 0 ? 16 : 0);
        const uint32_t lower = lanes.word[2 + m / 2] << (m % 2 == 0 ? 16 : 0);
        if (upper >= mask.keep_below << 16) s[n + m][c] = 0;
        if (lower >= mask.keep_below << 16) s[n + m][2 + c] = 0;
      }
    }
  }
}

// Of KeysByThread, 32 keys at a time: a call covers one key of each of the four threads of a row.
// Each makes two of their eight calls, and they exchange what is kept, bit 8 * c + lane for call c.
template <int kColumns>
__device__ __forceinline__ void drop_by_thread(float (&s)[kColumns][4],
                                               const DropoutMask& mask,
                                               int i,
                                               int key) {
  const int thread = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < kColumns; n += 4) {
    uint32_t kept = 0;
#pragma unroll
    for (int c = 1; c >= 0; --c) {
      const Philox4 lanes = mask.lanes(i, key + 8 * n + 2 * thread + c);
#pragma unroll
      for (int l = 7; l >= 0; --l)  // the sign of a difference moves in from below
        kept = __funnelshift_l(lanes.lane(l) - mask.keep_below, kept, 1);
    }
#pragma unroll
    for (int t = 0; t < 4; ++t) {  // this thread's keys 2 * t and 2 * t + 1
      const uint32_t bits = __shfl_sync(0xffffffffu, kept, t, 4) >> thread;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if ((bits >> (8 * c) & 1u) == 0) s[n + t][c] = 0;
        if ((bits >> (8 * c + 4) & 1u) == 0) s[n + t][2 + c] = 0;
      }
    }
  }
}

// Zeroes the probabilities that dropout drops; the scale of the others waits for the end. Packed
// heads, and tiles that begin between multiples of 16 rows or 32 keys, go element by element.
template <class Order, int kRowBlocks, int kColumns>
__device__ __forceinline__ void apply_dropout(float (&s)[kRowBlocks][kColumns][4],
                                              const AttnParams& p,
                                              const WarpRows& rows,
                                              int batch,
                                              int key) {
  const bool second = Order::kRun == 0 && kColumns == 2 && key % 32 == 16;
  const bool whole = Order::kRun == 0 ? kColumns % 4 == 0 || kColumns == 2 : Order::kRun == 8;
  if (whole && rows.group == 1 && rows.first % 16 == 0 && (key % 32 == 0 || second)) {
    const DropoutMask mask(p, batch, rows(0, 0).head);
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
      const int i = rows.first + 16 * b + fragment_row(0);
      if constexpr (Order::kRun == 8) {
        drop_by_thread(s[b], mask, i, key);
      } else if constexpr (Order::kRun == 0 && kColumns > 1) {
        drop_in_order(s[b], mask, i, key, second);
      }
    }
    return;
  }
  uint32_t kept[2 * kRowBlocks];  // in local memory: registers have no index
#pragma unroll 1
  for (int row = 0; row < 2 * kRowBlocks; ++row) {
    const RowPlace place = rows(row / 2, row % 2);
    kept[row] = kept_columns<Order, kColumns>(DropoutMask(p, batch, place.head), place.position,
                                              key + Order::thread_key());
  }
#pragma unroll
  for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t bits = kept[2 * b + h];
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        if ((bits >> (2 * n) & 1u) == 0) s[b][n][2 * h] = 0;
        if ((bits >> (2 * n + 1) & 1u) == 0) s[b][n][2 * h + 1] = 0;
      }
    }
  }
}

}  // namespace flash_attn
