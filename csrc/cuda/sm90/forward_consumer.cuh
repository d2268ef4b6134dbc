// SPDX-License-Identifier: BSD-3-Clause
// What a warpgroup of the forward kernel (forward.cuh) does with the key tiles that the producer
// brings.
#pragma once

#include "cuda/sm90/forward_features.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/products.cuh"
#include "plan/kernel_list.h"

namespace flash_attn::sm90 {

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
  // Of tile n, which may have rows without a key.
  __device__ __forceinline__ void wait_v(int n) const {
    wait_v();
    const int first = n * grid.block_n;
    clear_other_values<T>(smem, v.stage, state.seq.k_first - first, state.seq.k_len - first);
  }
  __device__ __forceinline__ void release_v() {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(pipe.v_empty(v.stage));
    v.advance();
  }

  // 2. Asynchronous.
  __device__ __forceinline__ void multiply_qk(Scores& s) const {
    multiply_queries<Element, Tile>(s, smem + group * 64 * 128,
                                    smem + T::kK + uniform(k.stage) * T::kKBytes);
  }

  // 3. Asynchronous.
  __device__ __forceinline__ void multiply_pv() {
    multiply_weights<Element, Tile>(out, weights, smem + T::kV + uniform(v.stage) * T::kVBytes);
  }

  // S; products of a later commit, kBehind of them, may still be on their way.
  template <int kBehind = 1>
  __device__ __forceinline__ void wait_scores(Scores& s) const {
    ptx::wgmma_wait<kBehind>();
    ptx::hold<kColumns * 4>(&s[0][0][0]);
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

  // 2 and 4 of the first tile.
  __device__ __forceinline__ void begin(const KvTile& tile) {
    Scores s;
    float factor[2];
    multiply_qk(s);
    features.template begin<kAny>(tile.n);
    wait_scores<0>(s);
    release_k();
    features.template score<kAny>(s, tile.n, softmax, grid.scale);
    hide(s, tile);
    weigh(softmax, s, factor, grid.scale);
    features.template drop<kAny>(s, tile.n);
    to_operands<Element>(weights, s);
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
    wait_scores(s);
    release_k();
    const bool may_rise = features.template score<kOnly>(s, tile.n, softmax, grid.scale);
    if constexpr (!kWhole) hide(s, tile);
    const bool raised = weigh(softmax, s, factor, grid.scale, may_rise);
    if constexpr (kScore == Score::kGeneral) ptx::settle(softmax.l[0][0] + softmax.l[0][1]);
    features.template drop<kOnly>(s, tile.n);
    wait_out();
    to_operands<Element>(weights, s);
    before = tile.n;
    if (raised) rescale(out, factor);
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

  // The same without looking for the maximum.
  __device__ __forceinline__ void step_ahead(const KvTile& tile) {
    weigh_tile_ahead<Element>(*this);
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
  if constexpr (C::kAhead) self.calm = Calm(tile.full);
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
