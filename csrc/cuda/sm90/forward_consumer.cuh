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
  static constexpr bool kAhead = Tile::kAhead;
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

  // Weights as operands of the next product, after the last one.
  template <Feature kOnly>
  __device__ __forceinline__ void take(const Scores& s, const FeatureRegisters& held, int n) {
    to_operands<Element>(weights, s);
    features.template drop<kOnly>(weights, held, n);
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
    FeatureRegisters held = features.template hold<kAny>();
    features.template begin<kAny>(held, tile.n);
    wait_scores<0>(s);
    release_k();
    features.template score<kAny>(s, held, tile.n, softmax, grid.scale);
    hide(s, tile);
    weigh(softmax, s, factor, grid.scale);
    features.template drop_slowly<kAny>(s, tile.n);
    take<kAny>(s, held, tile.n);
    before = tile.n;
  }

  // 2 to 5 of a later tile; with kWhole of one that hides nothing, after another such, where the
  // problem has kOnly alone.
  template <Feature kOnly, bool kWhole>
  __device__ __forceinline__ void step(const KvTile& tile, FeatureRegisters& held) {
    Scores s;
    float factor[2];
    multiply_qk(s);
    kWhole ? wait_v() : wait_v(before);
    multiply_pv();
    features.template begin<kOnly>(held, tile.n);
    wait_scores(s);
    release_k();
    const bool may_rise = features.template score<kOnly>(s, held, tile.n, softmax, grid.scale);
    if constexpr (!kWhole) hide(s, tile);
    const bool raised = weigh(softmax, s, factor, grid.scale, may_rise);
    if constexpr (kScore == Score::kGeneral) ptx::settle(softmax.l[0][0] + softmax.l[0][1]);
    features.template drop_slowly<kOnly>(s, tile.n);
    wait_out();
    take<kOnly>(s, held, tile.n);
    before = tile.n;
    if (raised) rescale(out, factor);
    if constexpr (kAhead) calm.note(raised);
  }

  // The same of a whole tile without looking for the maximum. With a feature as weigh_tile_ahead
  // (products.cuh) does it without.
  template <Feature kOnly>
  __device__ __forceinline__ void step_ahead(const KvTile& tile, FeatureRegisters& held) {
    if constexpr (kScore == Score::kPlain) {
      weigh_tile_ahead<Element>(*this);
    } else {
      weigh_features_ahead<kOnly>(tile, held);
    }
    before = tile.n;
  }
  template <Feature kOnly>
  __device__ __forceinline__ void weigh_features_ahead(const KvTile& tile, FeatureRegisters& held) {
    Scores s;
    float factor[2], sum[2];
    multiply_qk(s);
    wait_v();
    multiply_pv();
    features.template begin<kOnly>(held, tile.n);
    wait_scores(s);
    const bool right =
        features.template weigh_ahead<kOnly>(s, sum, held, tile.n, softmax, grid.scale);
    const bool again = some_of_group(!right);
    if (!again) release_k();
    wait_out();
    features.template end_ahead<kOnly>(held, tile.n, !again);
    if (__builtin_expect(again, 0)) {
      calm.begin(false);
      multiply_qk(s);
      wait_scores<0>(s);
      release_k();
      const bool may_rise = features.template score<kOnly>(s, held, tile.n, softmax, grid.scale);
      if (weigh(softmax, s, factor, grid.scale, may_rise)) rescale(out, factor);
    } else {
      softmax.l[0][0] += sum[0], softmax.l[0][1] += sum[1];
    }
    take<kOnly>(s, held, tile.n);
  }

  // 2 to 5 of any tile.
  __device__ __forceinline__ void step_any(const KvTile& tile) {
    FeatureRegisters held = features.template hold<kAny>();
    step<kAny, false>(tile, held);
  }

  // Plain scores have such steps only while weights are made ahead: less code.
  __device__ __forceinline__ bool has_whole_steps() const {
    return kScore == Score::kGeneral || !kAhead || calm;
  }

  // Steps of a tile that hides nothing, after another such, and of all such that follow it: a loop
  // of its own for each feature. The first tile that is another.
  template <Feature kOnly>
  __device__ __forceinline__ KvTile whole_tiles_of(KvTile tile) {
    FeatureRegisters held = features.template hold<kOnly>();
    do {
      if (kAhead && (kScore == Score::kPlain || calm)) {
        step_ahead<kOnly>(tile, held);
      } else {
        step<kOnly, true>(tile, held);
      }
      tile = wait_k();
    } while (tile.n >= 0 && tile.full && has_whole_steps());
    return tile;
  }
  __device__ __forceinline__ KvTile whole_tiles(const KvTile& tile) {
    if constexpr (kScore == Score::kGeneral) {
      if constexpr (Tile::kDropout) {
        if (features.only == Feature::kDropout) return whole_tiles_of<Feature::kDropout>(tile);
      }
      switch (features.only) {
        case Feature::kCap: return whole_tiles_of<Feature::kCap>(tile);
        case Feature::kAlibi: return whole_tiles_of<Feature::kAlibi>(tile);
        case Feature::kBias: return whole_tiles_of<Feature::kBias>(tile);
        case Feature::kMask: return whole_tiles_of<Feature::kMask>(tile);
        default: step_any(tile); return wait_k();
      }
    }
    return whole_tiles_of<kAny>(tile);
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
  tile = self.wait_k();
  while (tile.n >= 0) {
    if (tile.full && full_before && self.has_whole_steps()) {
      tile = self.whole_tiles(tile);
      continue;
    }
    full_before = tile.full;
    if (!self.sees(tile)) {  // left of a window: nothing more comes for these rows
      self.add_last();
      self.skip(tile);
      return;
    }
    self.step_any(tile);
    tile = self.wait_k();
  }
  self.add_last();
}

}  // namespace flash_attn::sm90
