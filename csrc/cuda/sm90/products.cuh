// SPDX-License-Identifier: BSD-3-Clause
// The steps of a tile that a warpgroup of 64 query rows makes in registers, for the kernels of
// forward.cuh and persistent.cuh: both products, and the softmax between them.
#pragma once

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/softmax.cuh"
#include "cuda/tile/swizzle.cuh"

namespace flash_attn::sm90 {

// The same number, which all lanes have, for the registers that the lanes share: operands of wgmma
// are made there.
__device__ __forceinline__ uint32_t uniform(uint32_t x) {
  return __shfl_sync(0xffffffffu, x, 0);
}

// 4. Scores -> weights. Whether m rose, and by what out is then to be multiplied. l grows by the
// sum of the tile, as where weights are made ahead.
template <class Element, int kColumns>
__device__ __forceinline__ bool weigh(Softmax<Element, 1>& softmax,
                                      float (&s)[1][kColumns][4],
                                      float (&factor)[2],
                                      const ScoreScale& scale,
                                      bool may_rise = true) {
  float most[1][2], one[1][1][4] = {{{1, 1, 1, 1}}};
  const bool raised = may_rise && __any_sync(0xffffffffu, softmax.passes(s, most, scale));
  if (raised) {
    softmax.reduce(most, scale);
    softmax.raise(most, one, scale);
  }
  factor[0] = one[0][0][0], factor[1] = one[0][0][2];
  softmax.prepare(s, scale);
  const float before[2] = {softmax.l[0][0], softmax.l[0][1]};
  float sum[2] = {0, 0};
#pragma unroll
  for (int n = 0; n < kColumns; n += kSumColumns) {
    softmax.l[0][0] = softmax.l[0][1] = 0;
    softmax.weigh(s, scale, n, min_of(kSumColumns, kColumns - n));
    sum[0] += softmax.l[0][0], sum[1] += softmax.l[0][1];
  }
  softmax.l[0][0] = before[0] + sum[0], softmax.l[0][1] = before[1] + sum[1];
  return raised;
}

// Whether a thread of the warpgroup says so.
__device__ __forceinline__ bool some_of_group(bool x) {
  // The compiler knows of a vote that all lanes have its result.
  return __any_sync(0xffffffffu, ptx::barrier_any(2 + threadIdx.x / 128, 128, x));
}

// Whether m rises so rarely that weights are made ahead of the maximum: after tiles in which it
// rose in no row of the warpgroup, of which the warps ask each other ever less often.
class Calm {
 public:
  Calm() = default;
  // `calm`: from the second tile on.
  __device__ __forceinline__ explicit Calm(bool calm) : calm_(calm) {}
  __device__ __forceinline__ explicit operator bool() const { return calm_; }
  // After a tile, whether m rose in the warp.
  __device__ __forceinline__ void note(bool raised) {
    raised_ |= raised;
    if (--tiles_ == 0) begin(!some_of_group(raised_));
  }
  // `calm`: until a row asks for a higher m.
  __device__ __forceinline__ void begin(bool calm) {
    calm_ = calm, raised_ = false, tiles_ = (wait_ + 1) / 2, wait_ = min_of(2 * wait_, 16);
  }

 private:
  bool calm_ = false, raised_ = false;
  int tiles_ = 1, wait_ = 1;  // until the warps ask each other
};

// S = Q K^T, asynchronous. Addresses in shared memory, of the warpgroup's rows of Q and of K.
template <class Element, class Tile, int kColumns>
__device__ __forceinline__ void multiply_queries(float (&s)[1][kColumns][4],
                                                 uint32_t q_at,
                                                 uint32_t k_at) {
  const uint64_t q = ptx::wgmma_operand(q_at);
  const uint64_t keys = ptx::wgmma_operand(k_at);
  ptx::hold<kColumns * 4>(&s[0][0][0]);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < Tile::kHeadDim / 16; ++step) {
    const int inside = step % 4 * 32, panel = step / 4 * 128;
    ptx::wgmma<8 * kColumns, 0>(
        Element(), &s[0][0][0], ptx::wgmma_operand_at(q, inside + panel * Tile::kBlockM),
        ptx::wgmma_operand_at(keys, inside + panel * Tile::kBlockN), step > 0);
  }
  ptx::wgmma_commit();
}

// out += P V, or (not `add`) out = P V, asynchronous.
template <class Element, class Tile, int kColumns, int kSteps>
__device__ __forceinline__ void multiply_weights(float (&out)[1][kColumns][4],
                                                 uint32_t (&weights)[kSteps][4],
                                                 uint32_t v_at,
                                                 bool add = true) {
  constexpr int kEach = Tile::kHeadDimV < 128 ? Tile::kHeadDimV : 128;
  const uint64_t values = ptx::wgmma_operand(v_at, Tile::kBlockN * 128);
  ptx::hold<kColumns * 4>(&out[0][0][0]);
  ptx::hold<kSteps * 4>(&weights[0][0]);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int part = 0; part < Tile::kHeadDimV / kEach; ++part) {
      ptx::wgmma<kEach, 1>(
          Element(), &out[0][part * kEach / 8][0], weights[step],
          ptx::wgmma_operand_at(values, step * 2048 + part * (kEach / 64) * Tile::kBlockN * 128),
          step > 0 || add);
    }
  }
  ptx::wgmma_commit();
}

// Weights as operands.
template <class Element, int kColumns>
__device__ __forceinline__ void to_operands(uint32_t (&weights)[kColumns / 2][4],
                                            const float (&s)[1][kColumns][4]) {
#pragma unroll
  for (int step = 0; step < kColumns / 2; ++step)
    to_operand<Element>(weights[step], s[0][2 * step], s[0][2 * step + 1]);
}

// out to a new m.
template <int kColumns>
__device__ __forceinline__ void rescale(float (&out)[1][kColumns][4], const float (&factor)[2]) {
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
    out[0][n][0] *= factor[0], out[0][n][1] *= factor[0];
    out[0][n][2] *= factor[1], out[0][n][3] *= factor[1];
  }
}

// Rows of the values in a stage that are not in [low, high) -> zero: what lies there may be
// anything, and its weight 0 would not hide a NaN. A warpgroup; products may read the stage after
// it. Sizes: the kernel's.
template <class Sizes>
__device__ __forceinline__ void clear_other_values(uint32_t smem,
                                                   uint32_t stage,
                                                   int low,
                                                   int high) {
  if (low <= 0 && high >= Sizes::kBlockN) return;
  const uint32_t tile = smem + Sizes::kV + stage * Sizes::kVBytes;
  for (int at = threadIdx.x % 128; at < Sizes::kBlockN * Sizes::kHeadDimV / 8; at += 128) {
    const int row = at % Sizes::kBlockN, chunk = at / Sizes::kBlockN;
    if (row >= low && row < high) continue;
    ptx::store_shared_16(tile + tile_offset<Sizes::kBlockN>(row, chunk), {0, 0, 0, 0});
  }
  ptx::proxy_fence();
  ptx::barrier_sync(2 + threadIdx.x / 128, 128);
}

// 2 to 5 of a tile that hides nothing, after another such, without looking for the maximum. Where a
// row asks for it after all, S is made once more. `self`: Consumer or TaskConsumer.
template <class Element, class Self>
__device__ __forceinline__ void weigh_tile_ahead(Self& self) {
  typename Self::Scores s;
  float factor[2], sum[2];
  self.multiply_qk(s);
  self.wait_v();
  self.multiply_pv();
  self.wait_scores(s);
  const bool again = some_of_group(!self.softmax.weigh_ahead(s, sum, self.grid.scale));
  if (!again) self.release_k();
  self.wait_out();
  if (__builtin_expect(again, 0)) {
    self.calm.begin(false);
    self.multiply_qk(s);
    self.template wait_scores<0>(s);
    self.release_k();
    if (weigh(self.softmax, s, factor, self.grid.scale)) rescale(self.out, factor);
  } else {
    self.softmax.l[0][0] += sum[0], self.softmax.l[0][1] += sum[1];
  }
  to_operands<Element>(self.weights, s);
}

}  // namespace flash_attn::sm90
