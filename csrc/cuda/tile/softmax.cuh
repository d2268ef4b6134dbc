// SPDX-License-Identifier: BSD-3-Clause
// The online softmax of a warp's rows: m, near the running maximum, and the sum l of the weights
// 2^((s - m) * c), where c brings scores to units of log 2. A thread holds two rows of each 16-row
// block (g and g + 8); sums stay per thread until the end.
//
// m need not be the maximum, so that most tiles neither exchange maxima nor rescale out: it is
// raised when the weight of some score would be more than 2^8, or more than twice the thread's sum
// so far. The second because weights are rounded to 16 bits for the next product: that of m itself
// is 1 and exact, and a key of another weight must not dominate its row.
//
// A weight is 2^(s * c - base) with base = m * c rounded, one fused operation. The rounding of base
// is a factor common to the row, so it cancels against l; what is old changes by the ratio of the
// rounded bases, not of the exact ones. Where base is so large that its rounding is no small factor
// (kHuge), and always for fp32, weights are 2^((s - m) * c) instead.
//
// What becomes of a row depends on its own scores alone, not on the other rows of the warp.
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/tile/fragment.cuh"

namespace flash_attn {

// What the host knows of a kernel's scores. They are in natural units after multiplication by
// `unit`, which is positive.
struct ScoreScale {
  float unit = 1, c = 1, inverse = 1;  // 1 / c

  ScoreScale() = default;
  __host__ explicit ScoreScale(double unit_)
      : unit(static_cast<float>(unit_)),
        c(static_cast<float>(unit_ * 1.4426950408889634)),
        inverse(1 / c) {}
};

// Columns of 8 keys whose weights weigh_ahead bounds by their sum.
constexpr int kSumColumns = 4;

template <class Element, int kRowBlocks>
struct Softmax {
  static constexpr bool kExact = sizeof(Element) == 4;
  static constexpr float kHuge = 8192;  // base is rounded by up to 2^-11 there

  float m[kRowBlocks][2], l[kRowBlocks][2];

  __device__ Softmax() {
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b)
      m[b][0] = m[b][1] = -INFINITY, l[b][0] = l[b][1] = 0;
  }

  // scores -> probabilities in place; out is brought to the new m. All lanes of the warp.
  template <int kColumns, int kOutColumns>
  __device__ __forceinline__ void step(float (&s)[kRowBlocks][kColumns][4],
                                       float (&out)[kRowBlocks][kOutColumns][4],
                                       const ScoreScale& scale) {
    settle(s, out, scale);
    weigh(s, scale);
  }

  // The part of it before weights are taken.
  template <int kColumns, int kOutColumns>
  __device__ __forceinline__ void settle(float (&s)[kRowBlocks][kColumns][4],
                                         float (&out)[kRowBlocks][kOutColumns][4],
                                         const ScoreScale& scale) {
    float most[kRowBlocks][2];
    if (__any_sync(0xffffffffu, passes(s, most, scale))) {
      reduce(most, scale);
      raise(most, out, scale);
    }
    prepare(s, scale);
  }

  // l: the sums of whole rows, in all lanes.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b)
      l[b][0] = row_reduce_sum(l[b][0]), l[b][1] = row_reduce_sum(l[b][1]);
  }

  // Whether a score of this thread asks for a higher m. `most`: its largest in each row.
  template <int kColumns>
  __device__ __forceinline__ bool passes(const float (&s)[kRowBlocks][kColumns][4],
                                         float (&most)[kRowBlocks][2],
                                         const ScoreScale& scale) const {
    bool any = false;
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        most[b][h] = fmaxf(s[b][0][2 * h], s[b][0][2 * h + 1]);
#pragma unroll
        for (int n = 1; n < kColumns; ++n)
          most[b][h] = fmaxf(most[b][h], fmaxf(s[b][n][2 * h], s[b][n][2 * h + 1]));
        any |= most[b][h] > threshold(b, h, scale);
      }
    }
    return any;
  }

  // Whether it could be so of scores that are at most `bound` in each row.
  __device__ __forceinline__ bool may_pass(const float (&bound)[2], const ScoreScale& scale) const {
    return bound[0] > threshold(0, 0, scale) || bound[1] > threshold(0, 1, scale);
  }

  // most of threads -> of whole rows, -inf where none of the row's threads asks for a higher m.
  __device__ __forceinline__ void reduce(float (&most)[kRowBlocks][2],
                                         const ScoreScale& scale) const {
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const bool asks = most[b][h] > threshold(b, h, scale);
        const unsigned row = __ballot_sync(0xffffffffu, asks) >> (threadIdx.x % 32 / 4 * 4) & 0xfu;
        const float of_row = row_reduce_max(most[b][h]);
        most[b][h] = row != 0 ? of_row : -INFINITY;
      }
    }
  }

  // Raises m to `most`, the largest of the row's new scores, where that is higher. All lanes.
  template <int kOutColumns>
  __device__ __forceinline__ void raise(float (&most)[kRowBlocks][2],
                                        float (&out)[kRowBlocks][kOutColumns][4],
                                        const ScoreScale& scale) {
    const float c = scale.c;
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        most[b][h] = fmaxf(m[b][h], most[b][h]);
        const float down = is_far(most[b][h], c) ? (m[b][h] - most[b][h]) * c
                                                 : __fmul_rn(m[b][h], c) - __fmul_rn(most[b][h], c);
        const float alpha = m[b][h] == most[b][h] ? 1.0f : ptx::exp2_approx(down);
        m[b][h] = most[b][h];
        l[b][h] *= alpha;
#pragma unroll
        for (int n = 0; n < kOutColumns; ++n)
          out[b][n][2 * h] *= alpha, out[b][n][2 * h + 1] *= alpha;
      }
    }
  }

  // After m is settled, before weigh: scores become differences to m where they must.
  template <int kColumns>
  __device__ __forceinline__ void prepare(float (&s)[kRowBlocks][kColumns][4],
                                          const ScoreScale& scale) const {
    bool far = kExact;
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
      far |= fabsf(__fmul_rn(m[b][0], scale.c)) > kHuge;  // or no key has been seen
      far |= fabsf(__fmul_rn(m[b][1], scale.c)) > kHuge;
    }
    if (__builtin_expect(far, kExact)) subtract(s, scale.c);
  }

  // scores -> probabilities in place, added up in l: `count` columns of 8 from `first` on.
  template <int kColumns>
  __device__ __forceinline__ void weigh(float (&s)[kRowBlocks][kColumns][4],
                                        const ScoreScale& scale,
                                        int first = 0,
                                        int count = kColumns) {
    const float c = scale.c;
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
      const float base0 = near_base(m[b][0], c), base1 = near_base(m[b][1], c);
#pragma unroll
      for (int n = first; n < first + count; ++n) {
        s[b][n][0] = ptx::exp2_approx(fmaf(s[b][n][0], c, -base0));
        s[b][n][1] = ptx::exp2_approx(fmaf(s[b][n][1], c, -base0));
        s[b][n][2] = ptx::exp2_approx(fmaf(s[b][n][2], c, -base1));
        s[b][n][3] = ptx::exp2_approx(fmaf(s[b][n][3], c, -base1));
        l[b][0] += s[b][n][0] + s[b][n][1];
        l[b][1] += s[b][n][2] + s[b][n][3];
      }
    }
  }

  // scores -> probabilities in place by the m that is there, before it is known whether a score
  // asks for a higher one, and their sums in this thread's rows. False where one may: these are
  // then of no use. True: settle would have left m alone, and weigh made the same.
  template <int kColumns>
  __device__ __forceinline__ bool weigh_ahead(float (&s)[1][kColumns][4],
                                              float (&sum)[2],
                                              const ScoreScale& scale) const {
    return weigh_ahead(s, sum, scale,
                       [&](float x, int, int, float base) { return fmaf(x, scale.c, -base); });
  }

  // The same where the exponent of element i of the n-th eight columns is made otherwise:
  // exponent(score, n, i, base).
  template <int kColumns, class Exponent>
  __device__ __forceinline__ bool weigh_ahead(float (&s)[1][kColumns][4],
                                              float (&sum)[2],
                                              const ScoreScale& scale,
                                              const Exponent& exponent) const {
    static_assert(!kExact);
    const float base[2] = {__fmul_rn(m[0][0], scale.c), __fmul_rn(m[0][1], scale.c)};
    float most[2] = {0, 0};
    sum[0] = sum[1] = 0;
#pragma unroll
    for (int first = 0; first < kColumns; first += kSumColumns) {
      float part[2] = {0, 0};
#pragma unroll
      for (int n = first; n < first + kSumColumns && n < kColumns; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          s[0][n][i] = ptx::exp2_approx(exponent(s[0][n][i], n, i, base[i / 2]));
        part[0] += s[0][n][0] + s[0][n][1];
        part[1] += s[0][n][2] + s[0][n][3];
      }
#pragma unroll
      for (int h = 0; h < 2; ++h)
        sum[h] += part[h], most[h] = fmaxf(most[h], part[h]);
    }
    // No weight of a sum is larger than it; a little less than the threshold, for their rounding.
    // A huge or infinite base is none of near_base.
    bool right = true;
#pragma unroll
    for (int h = 0; h < 2; ++h)
      right &=
          most[h] <= 0.99f * fminf(fmaxf(2 * l[0][h], 1.0f), 256.0f) && fabsf(base[h]) <= kHuge;
    return right;
  }

  // What belongs to lse = m * unit + log(l) beside the two: the rounding of m * unit, and that of
  // base, which is in l. Natural units, less than 2^-10; 0 where weights are taken from
  // differences.
  __device__ __forceinline__ static float lse_rest(float m, const ScoreScale& scale) {
    const float base = __fmul_rn(m, scale.c), rounded = __fmul_rn(m, scale.unit);
    if (!(fabsf(base) <= kHuge)) return 0;
    const float in_l = kExact ? 0.0f : fmaf(m, scale.c, -base);
    return fmaf(m, scale.unit, -rounded) - in_l * 0.6931471805599453f;
  }

 private:
  // No key seen so far: every weight is 2^(-inf) = 0.
  __device__ __forceinline__ static float base_of(float m, float c) {
    return m == -INFINITY ? 0.0f : __fmul_rn(m, c);
  }

  // The same, but 0 where weights are taken from differences.
  __device__ __forceinline__ static float near_base(float m, float c) {
    const float base = __fmul_rn(m, c);
    return !kExact && fabsf(base) <= kHuge ? base : 0.0f;
  }

  // Whether weights of a row with this m are taken from differences.
  __device__ __forceinline__ static bool is_far(float m, float c) {
    return kExact || fabsf(base_of(m, c)) > kHuge;
  }

  // A score of this thread above it asks for a higher m.
  __device__ __forceinline__ float threshold(int b, int h, const ScoreScale& scale) const {
    const float slack = fminf(fmaxf(ptx::log2_approx(l[b][h]) + 1, 0.0f), 8.0f);
    return fmaf(slack, scale.inverse, m[b][h]);
  }

  template <int kColumns>
  __device__ __forceinline__ void subtract(float (&s)[kRowBlocks][kColumns][4], float c) const {
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float base = m[b][h] == -INFINITY || !is_far(m[b][h], c) ? 0.0f : m[b][h];
#pragma unroll
        for (int n = 0; n < kColumns; ++n)
          s[b][n][2 * h] -= base, s[b][n][2 * h + 1] -= base;
      }
    }
  }
};

}  // namespace flash_attn
