// SPDX-License-Identifier: BSD-3-Clause
// The online softmax of a warp's rows: running maximum m and sum l, in units of the scores times
// scale_log2. A thread holds two rows of each 16-row block (g and g + 8); sums stay per thread
// until the end.
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/tile/fragment.cuh"

namespace flash_attn {

template <int kRowBlocks>
struct Softmax {
  float m[kRowBlocks][2], l[kRowBlocks][2];

  __device__ Softmax() {
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b)
      m[b][0] = m[b][1] = -INFINITY, l[b][0] = l[b][1] = 0;
  }

  // scores -> probabilities in place; out is brought to the new maximum. All lanes of the warp.
  template <int kColumns, int kOutColumns>
  __device__ __forceinline__ void step(float (&s)[kRowBlocks][kColumns][4],
                                       float (&out)[kRowBlocks][kOutColumns][4],
                                       float scale_log2) {
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
      float most[2] = {m[b][0], m[b][1]};
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        most[0] = fmaxf(most[0], fmaxf(s[b][n][0], s[b][n][1]));
        most[1] = fmaxf(most[1], fmaxf(s[b][n][2], s[b][n][3]));
      }
      most[0] = row_reduce_max(most[0]);
      most[1] = row_reduce_max(most[1]);
      // Most tiles leave the maximum where it was: then alpha is 1 and nothing is to be rescaled.
      const bool moved = most[0] != m[b][0] || most[1] != m[b][1];
      if (__any_sync(0xffffffffu, moved)) rescale(b, most, out[b], scale_log2);
      // No key seen so far: every weight is 2^(-inf) = 0.
      const float base0 = most[0] == -INFINITY ? 0.0f : most[0] * scale_log2;
      const float base1 = most[1] == -INFINITY ? 0.0f : most[1] * scale_log2;
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        s[b][n][0] = ptx::exp2_approx(s[b][n][0] * scale_log2 - base0);
        s[b][n][1] = ptx::exp2_approx(s[b][n][1] * scale_log2 - base0);
        s[b][n][2] = ptx::exp2_approx(s[b][n][2] * scale_log2 - base1);
        s[b][n][3] = ptx::exp2_approx(s[b][n][3] * scale_log2 - base1);
        l[b][0] += s[b][n][0] + s[b][n][1];
        l[b][1] += s[b][n][2] + s[b][n][3];
      }
    }
  }

 private:
  template <int kOutColumns>
  __device__ __forceinline__ void rescale(int b,
                                          const float (&most)[2],
                                          float (&out)[kOutColumns][4],
                                          float scale_log2) {
    float alpha[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      alpha[r] = most[r] == -INFINITY ? 1.0f : ptx::exp2_approx((m[b][r] - most[r]) * scale_log2);
      m[b][r] = most[r];
      l[b][r] *= alpha[r];
    }
#pragma unroll
    for (int n = 0; n < kOutColumns; ++n) {
      out[n][0] *= alpha[0];
      out[n][1] *= alpha[0];
      out[n][2] *= alpha[1];
      out[n][3] *= alpha[1];
    }
  }
};

}  // namespace flash_attn
