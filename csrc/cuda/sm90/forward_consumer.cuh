// SPDX-License-Identifier: BSD-3-Clause
// What a warpgroup of the forward kernel (forward.cuh) does with the key tiles that the producer
// brings.
#pragma once

#include <type_traits>

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/tile/score.cuh"
#include "plan/kernel_list.h"

namespace flash_attn::sm90 {

// The same number, which all lanes have, for the registers that the lanes share: operands of wgmma
// are made there.
__device__ __forceinline__ uint32_t uniform(uint32_t x) {
  return __shfl_sync(0xffffffffu, x, 0);
}

// A warpgroup: what it reads, and its place in the rings.
template <class Element, class Tile, Score kScore>
struct Consumer {
  using T = ForwardSizes<Tile>;
  static constexpr int kColumns = Tile::kBlockN / 8, kOutColumns = Tile::kHeadDimV / 8;
  using Scores = float[1][kColumns][4];
  using Weights = uint32_t[Tile::kBlockN / 16][4];
  using Out = float[1][kOutColumns][4];

  const AttnParams& p;
  const ForwardGrid& grid;
  const ForwardState<Element, Tile>& state;
  uint32_t smem;
  Pipeline<Tile::kStages> pipe;
  uint8_t* barriers;
  uint32_t group;  // of the block's warpgroups
  Ring<Tile::kStages> k, v;

  // Whether some row of this warpgroup sees something of a tile.
  __device__ __forceinline__ bool sees(const KvTile& tile) const {
    bool some = false;
#pragma unroll
    for (int w = 0; w < 4; ++w)
      some |= state.sees(4 * group + w, tile.n * Tile::kBlockN, Tile::kBlockN);
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
    const int first = n * Tile::kBlockN;
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
  __device__ __forceinline__ void multiply_pv(Out& out, Weights& weights) const {
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

  // 6. The last product.
  __device__ __forceinline__ void add_last(Out& out, Weights& weights, int n) {
    wait_v(n);
    multiply_pv(out, weights);
    ptx::wgmma_wait<0>();
    ptx::hold<kOutColumns * 4>(&out[0][0][0]);
    release_v();
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

  // 4. Features and mask.
  __device__ __forceinline__ void finish_scores(Scores& s, const KvTile& tile) const {
    const int key = tile.n * Tile::kBlockN;
    const WarpRows warp = state.warp_rows(threadIdx.x / 32 * 16);
    if constexpr (kScore == Score::kGeneral) {
      if (grid.steps.any)
        apply_steps<Element, KeysInOrder>(s, p, grid.steps, warp, state.seq, state.task.batch, key,
                                          tile.full);
    }
    if (tile.full) return;
    if (tile.bits < 0) {
      if (!state.sees_all(threadIdx.x / 32, key, Tile::kBlockN)) apply_window(s, warp, key);
      return;
    }
    const TileMask<ceil_div(kColumns, 4)> hidden(p.pages, state.task.batch, key, Tile::kBlockN,
                                                 tile.bits);
    apply_mask(s, p.mask, warp, hidden);
  }

  // 4. Weights as operands; those that dropout drops are 0.
  __device__ __forceinline__ void to_weights(Weights& weights,
                                             Scores& s,
                                             const KvTile& tile) const {
    if constexpr (kScore == Score::kGeneral) {
      if (p.dropout.philox != nullptr) {
        apply_dropout<KeysInOrder>(s, p, state.warp_rows(threadIdx.x / 32 * 16), state.task.batch,
                                   tile.n * Tile::kBlockN);
      }
    }
#pragma unroll
    for (int step = 0; step < kColumns / 2; ++step)
      to_operand<Element>(weights[step], s[0][2 * step], s[0][2 * step + 1]);
  }
};

// 4. Scores -> weights. Whether m rose, and by what out is then to be multiplied.
template <class Element, int kColumns>
__device__ __forceinline__ bool weigh(Softmax<Element, 1>& softmax,
                                      float (&s)[1][kColumns][4],
                                      float (&factor)[2],
                                      const ScoreScale& scale) {
  float most[1][2], one[1][1][4] = {{{1, 1, 1, 1}}};
  const bool raised = __any_sync(0xffffffffu, softmax.passes(s, most, scale));
  if (raised) {
    softmax.reduce(most, scale);
    softmax.raise(most, one, scale);
  }
  factor[0] = one[0][0][0], factor[1] = one[0][0][2];
  softmax.prepare(s, scale);
  softmax.weigh(s, scale);
  return raised;
}

template <class Element, class Tile, Score kScore>
__device__ __forceinline__ void consume(Consumer<Element, Tile, kScore>& self,
                                        float (&out)[1][Tile::kHeadDimV / 8][4],
                                        Softmax<Element, 1>& softmax) {
  using C = Consumer<Element, Tile, kScore>;
  KvTile tile = self.wait_k();
  if (!self.skip(tile)) return;
  typename C::Weights weights;
  float factor[2];
  int before = tile.n;  // whose weights wait for their values
  {
    typename C::Scores s;
    self.multiply_qk(s);
    ptx::wgmma_wait<0>();
    ptx::hold<C::kColumns * 4>(&s[0][0][0]);
    self.release_k();
    self.finish_scores(s, tile);
    weigh(softmax, s, factor, self.grid.scale);
    self.to_weights(weights, s, tile);
  }
  // 2 to 5 of a tile; with kWhole of one that hides nothing, after another such.
  const auto step = [&](auto whole) {
    constexpr bool kWhole = decltype(whole)::value;
    typename C::Scores s;
    self.multiply_qk(s);
    kWhole ? self.wait_v() : self.wait_v(before);
    self.multiply_pv(out, weights);
    ptx::wgmma_wait<1>();
    ptx::hold<C::kColumns * 4>(&s[0][0][0]);
    self.release_k();
    if constexpr (!kWhole || kScore == Score::kGeneral) self.finish_scores(s, tile);
    const bool raised = weigh(softmax, s, factor, self.grid.scale);
    ptx::wgmma_wait<0>();
    ptx::hold<C::kOutColumns * 4>(&out[0][0][0]);
    self.release_v();
    self.to_weights(weights, s, tile);
    before = tile.n;
    if (raised) {
#pragma unroll
      for (int n = 0; n < C::kOutColumns; ++n) {
        out[0][n][0] *= factor[0], out[0][n][1] *= factor[0];
        out[0][n][2] *= factor[1], out[0][n][3] *= factor[1];
      }
    }
  };
  bool full_before = false;
  while (true) {
    tile = self.wait_k();
    if (tile.n < 0) break;
    if constexpr (kScore == Score::kPlain) {
      if (tile.full && full_before) {
        step(std::true_type());
        continue;
      }
      full_before = tile.full;
    }
    if (!self.sees(tile)) {  // left of a window: nothing more comes for these rows
      self.add_last(out, weights, before);
      self.skip(tile);
      return;
    }
    step(std::false_type());
  }
  self.add_last(out, weights, before);
}

}  // namespace flash_attn::sm90
