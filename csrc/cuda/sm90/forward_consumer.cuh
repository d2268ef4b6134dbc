// SPDX-License-Identifier: BSD-3-Clause
// What a warpgroup of the forward kernel (forward.cuh) does with the key tiles that the producer
// brings.
#pragma once

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/forward_features.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "plan/kernel_list.h"

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
  softmax.l[0][0] = softmax.l[0][1] = 0;
  softmax.weigh(s, scale);
  softmax.l[0][0] += before[0], softmax.l[0][1] += before[1];
  return raised;
}

// Whether a thread of the warpgroup says so.
__device__ __forceinline__ bool some_of_group(bool x) {
  // The compiler knows of a vote that all lanes have its result.
  return __any_sync(0xffffffffu, ptx::barrier_any(2 + threadIdx.x / 128, 128, x));
}

// Whether m rises so rarely that weights are made ahead of the maximum: after some tiles in which
// it rose in no row of the warpgroup.
class Calm {
 public:
  __device__ __forceinline__ explicit operator bool() const { return calm_; }
  // After a tile, whether m rose in the warp.
  __device__ __forceinline__ void note(bool raised) {
    raised_ |= raised;
    if (--tiles_ == 0) begin(!some_of_group(raised_));
  }
  // `calm`: until a row asks for a higher m. Else the same is asked again after a while.
  __device__ __forceinline__ void begin(bool calm) { calm_ = calm, raised_ = false, tiles_ = 8; }

 private:
  bool calm_ = false, raised_ = false;
  int tiles_ = 2;  // until the warps ask each other
};

// A warpgroup: what it reads, its place in the rings, and its rows.
template <class Element, class Tile, Score kScore>
struct Consumer {
  using T = ForwardSizes<Tile>;
  static constexpr int kColumns = Tile::kBlockN / 8, kOutColumns = Tile::kHeadDimV / 8;
  using Scores = float[1][kColumns][4];
  using Weights = uint32_t[Tile::kBlockN / 16][4];
  using Out = float[1][kOutColumns][4];
  static constexpr bool kAhead = Tile::kAhead && kScore == Score::kPlain;
  static constexpr Feature kAny = kScore == Score::kPlain ? Feature::kNone : Feature::kSeveral;

  const AttnParams& p;
  const ForwardGrid& grid;
  const ForwardState<Element, Tile>& state;
  uint32_t smem;
  Pipeline<Tile::kStages> pipe;
  uint8_t* barriers;
  uint32_t group;  // of the block's warpgroups
  std::conditional_t<kScore == Score::kGeneral, Features<Element, Tile>, NoFeatures> features;
  Ring<Tile::kStages> k = {}, v = {};
  Softmax<Element, 1> softmax = {};
  Out out = {};
  Weights weights = {};  // of tile `before`, which wait for their values
  int before = -1;
  Calm calm = {};

  // Whether some row of this warpgroup sees something of a tile.
  __device__ __forceinline__ bool sees(const KvTile& tile) const {
    bool some = false;
#pragma unroll
    for (int w = 0; w < 4; ++w)
      some |= state.sees(4 * group + w, tile.n * grid.block_n, grid.block_n);
    return some;
  }

  __device__ __forceinline__ KvTile wait_k() const {
    ptx::mbarrier_wait(pipe.k_full(k.stage), k.parity);
    return *pipe.tile(barriers, k.stage);
  }
  __device__ __forceinline__ void release_k() {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(pipe.k_empty(k.stage));
    k.advance();
  }
  __device__ __forceinline__ void wait_v() const {
    ptx::mbarrier_wait(pipe.v_full(v.stage), v.parity);
  }
  // Of tile n. Rows without a key become zero: what lies there may be anything, and its weight 0
  // would not hide a NaN.
  __device__ __forceinline__ void wait_v(int n) const {
    wait_v();
    const int first = n * grid.block_n;
    const int low = state.seq.k_first - first, high = state.seq.k_len - first;
    if (low <= 0 && high >= Tile::kBlockN) return;
    const uint32_t tile = smem + T::kV + v.stage * T::kVBytes;
    for (int at = threadIdx.x % 128; at < Tile::kBlockN * Tile::kHeadDimV / 8; at += 128) {
      const int row = at % Tile::kBlockN, chunk = at / Tile::kBlockN;
      if (row >= low && row < high) continue;
      ptx::store_shared_16(tile + tile_offset<Tile::kBlockN>(row, chunk), {0, 0, 0, 0});
    }
    ptx::proxy_fence();
    ptx::barrier_sync(2 + threadIdx.x / 128, 128);
  }
  __device__ __forceinline__ void release_v() {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(pipe.v_empty(v.stage));
    v.advance();
  }

  // 2. Asynchronous.
  __device__ __forceinline__ void multiply_qk(Scores& s) const {
    const uint64_t q = ptx::wgmma_operand(smem + group * 64 * 128);
    const uint64_t keys = ptx::wgmma_operand(smem + T::kK + uniform(k.stage) * T::kKBytes);
    ptx::hold<kColumns * 4>(&s[0][0][0]);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Tile::kHeadDim / 16; ++step) {
      const int inside = step % 4 * 32, panel = step / 4 * 128;
      ptx::wgmma<Tile::kBlockN, 0>(
          Element(), &s[0][0][0], ptx::wgmma_operand_at(q, inside + panel * Tile::kBlockM),
          ptx::wgmma_operand_at(keys, inside + panel * Tile::kBlockN), step > 0);
    }
    ptx::wgmma_commit();
  }

  // 3. Asynchronous.
  __device__ __forceinline__ void multiply_pv() {
    constexpr int kEach = Tile::kHeadDimV < 128 ? Tile::kHeadDimV : 128;
    const uint64_t values =
        ptx::wgmma_operand(smem + T::kV + uniform(v.stage) * T::kVBytes, Tile::kBlockN * 128);
    ptx::hold<kOutColumns * 4>(&out[0][0][0]);
    ptx::hold<Tile::kBlockN / 4>(&weights[0][0]);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Tile::kBlockN / 16; ++step) {
#pragma unroll
      for (int part = 0; part < Tile::kHeadDimV / kEach; ++part) {
        ptx::wgmma<kEach, 1>(
            Element(), &out[0][part * kEach / 8][0], weights[step],
            ptx::wgmma_operand_at(values, step * 2048 + part * (kEach / 64) * Tile::kBlockN * 128),
            true);
      }
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void wait_out() {
    ptx::wgmma_wait<0>();
    ptx::hold<kOutColumns * 4>(&out[0][0][0]);
    release_v();
  }

  // 6. The last product.
  __device__ __forceinline__ void add_last() {
    wait_v(before);
    multiply_pv();
    wait_out();
  }

  // Passes over tiles, the first of which `tile` is, until some row sees one: false if there is
  // none. Under causal, what only later rows see.
  __device__ __forceinline__ bool skip(KvTile& tile) {
    while (tile.n >= 0 && !sees(tile)) {
      release_k();
      wait_v();
      release_v();
      tile = wait_k();
    }
    return tile.n >= 0;
  }

  // 4. The mask.
  __device__ __forceinline__ void hide(Scores& s, const KvTile& tile) const {
    const int key = tile.n * grid.block_n;
    const WarpRows warp = state.warp_rows(threadIdx.x / 32 * 16);
    if (tile.full) return;
    if (tile.bits < 0 && p.pages.table == nullptr && grid.block_n == Tile::kBlockN) {
      if (!state.sees_all(threadIdx.x / 32, key, Tile::kBlockN)) apply_window(s, warp, key);
      return;
    }
    const TileMask<ceil_div(kColumns, 4)> hidden(p.pages, state.task.batch, key, grid.block_n,
                                                 tile.bits);
    apply_mask(s, p.mask, warp, hidden);
  }

  // 4. Weights as operands.
  __device__ __forceinline__ void to_weights(const Scores& s) {
#pragma unroll
    for (int step = 0; step < kColumns / 2; ++step)
      to_operand<Element>(weights[step], s[0][2 * step], s[0][2 * step + 1]);
  }
  __device__ __forceinline__ void rescale(const float (&factor)[2]) {
#pragma unroll
    for (int n = 0; n < kOutColumns; ++n) {
      out[0][n][0] *= factor[0], out[0][n][1] *= factor[0];
      out[0][n][2] *= factor[1], out[0][n][3] *= factor[1];
    }
  }

  // 2 and 4 of the first tile.
  __device__ __forceinline__ void begin(const KvTile& tile) {
    Scores s;
    float factor[2];
    multiply_qk(s);
    features.template begin<kAny>(tile.n);
    ptx::wgmma_wait<0>();
    ptx::hold<kColumns * 4>(&s[0][0][0]);
    release_k();
    features.template score<kAny>(s, tile.n, softmax, grid.scale);
    hide(s, tile);
    weigh(softmax, s, factor, grid.scale);
    features.template drop<kAny>(s, tile.n);
    to_weights(s);
    before = tile.n;
  }

  // 2 to 5 of a later tile; with kWhole of one that hides nothing, after another such, where the
  // problem has kOnly alone.
  template <Feature kOnly, bool kWhole>
  __device__ __forceinline__ void step(const KvTile& tile) {
    Scores s;
    float factor[2];
    multiply_qk(s);
    kWhole ? wait_v() : wait_v(before);
    multiply_pv();
    features.template begin<kOnly>(tile.n);
    ptx::wgmma_wait<1>();
    ptx::hold<kColumns * 4>(&s[0][0][0]);
    release_k();
    const bool may_rise = features.template score<kOnly>(s, tile.n, softmax, grid.scale);
    if constexpr (!kWhole) hide(s, tile);
    const bool raised = weigh(softmax, s, factor, grid.scale, may_rise);
    if constexpr (kScore == Score::kGeneral) ptx::settle(softmax.l[0][0] + softmax.l[0][1]);
    features.template drop<kOnly>(s, tile.n);
    wait_out();
    to_weights(s);
    before = tile.n;
    if (raised) rescale(factor);
    if constexpr (kAhead) calm.note(raised);
  }

  // The same of a tile that hides nothing, after another such; by the features' own loop.
  __device__ __forceinline__ void step_alone(const KvTile& tile) {
    if constexpr (kScore == Score::kPlain) {
      step<kAny, true>(tile);
    } else {
      switch (features.only) {
        case Feature::kCap: return step<Feature::kCap, true>(tile);
        case Feature::kAlibi: return step<Feature::kAlibi, true>(tile);
        case Feature::kBias: return step<Feature::kBias, true>(tile);
        case Feature::kMask: return step<Feature::kMask, true>(tile);
        case Feature::kDropout: return step<Feature::kDropout, true>(tile);
        default: return step<kAny, false>(tile);
      }
    }
  }

  // The same without looking for the maximum. Where a row asks for it after all, S is made once
  // more.
  __device__ __forceinline__ void step_ahead(const KvTile& tile) {
    Scores s;
    float factor[2], sum[2];
    multiply_qk(s);
    wait_v();
    multiply_pv();
    ptx::wgmma_wait<1>();
    ptx::hold<kColumns * 4>(&s[0][0][0]);
    const bool again = some_of_group(!softmax.weigh_ahead(s, sum, grid.scale));
    if (!again) release_k();
    wait_out();
    if (__builtin_expect(again, 0)) {
      calm.begin(false);
      multiply_qk(s);
      ptx::wgmma_wait<0>();
      ptx::hold<kColumns * 4>(&s[0][0][0]);
      release_k();
      if (weigh(softmax, s, factor, grid.scale)) rescale(factor);
    } else {
      softmax.l[0][0] += sum[0], softmax.l[0][1] += sum[1];
    }
    to_weights(s);
    before = tile.n;
  }
};

// What a warpgroup does.
template <class Element, class Tile, Score kScore>
__device__ __forceinline__ void consume(Consumer<Element, Tile, kScore>& self) {
  using C = Consumer<Element, Tile, kScore>;
  KvTile tile = self.wait_k();
  if (!self.skip(tile)) return;
  self.begin(tile);
  bool full_before = tile.full;
  while (true) {
    tile = self.wait_k();
    if (tile.n < 0) break;
    const bool whole = tile.full && full_before;
    full_before = tile.full;
    if constexpr (C::kAhead) {
      if (whole && self.calm) {
        self.step_ahead(tile);
        continue;
      }
    } else if (whole) {
      self.step_alone(tile);
      continue;
    }
    if (!self.sees(tile)) {  // left of a window: nothing more comes for these rows
      self.add_last();
      self.skip(tile);
      return;
    }
    self.template step<C::kAny, false>(tile);
  }
  self.add_last();
}

}  // namespace flash_attn::sm90
