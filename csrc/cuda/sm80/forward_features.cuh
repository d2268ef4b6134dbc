// SPDX-License-Identifier: BSD-3-Clause
// The loop over key tiles of the forward kernels with features (kGeneral, 16 bits), for as long as
// keys lie evenly in memory and nothing but the window hides any: nearly all tiles of nearly all
// problems. What is rare is left to the loop of forward.cuh.
#pragma once

#include "cuda/sm80/forward_block.cuh"

namespace flash_attn::sm80 {

// Where a warp reads its operands: lane addresses in Q, and in stage 0 of K and V.
struct WarpOperands {
  uint32_t q, k, v;
};

// 5. out += P V for the tile at v, P where the scores were.
template <class Element, class Tile, int kRowBlocks, int kColumns>
__device__ __forceinline__ void add_values(float (&out)[kRowBlocks][Tile::kHeadDimV / 8][4],
                                           const float (&s)[kRowBlocks][kColumns][4],
                                           uint32_t v) {
  if constexpr (sizeof(Element) == 4) {
    warp_multiply_add<Tile::kBlockN>(out, s, v);
  } else {
    const auto weights = [&](uint32_t(&a)[kRowBlocks][4], int step) {
#pragma unroll
      for (int b = 0; b < kRowBlocks; ++b)
        to_operand<Element>(a[b], s[b][2 * step], s[b][2 * step + 1]);
    };
    warp_matmul_pv<Element, Tile::kHeadDimV, Tile::kBlockN, Tile::kBlockN>(out, weights, v);
  }
}

// What dropout does to the probabilities of a tile: nothing.
struct KeepAll {
  __device__ __forceinline__ void draw(int) {}
  template <int kRowBlocks, int kColumns>
  __device__ __forceinline__ void apply(float (&)[kRowBlocks][kColumns][4]) const {}
};

// Or zeroes, in tiles that begin at multiples of 16 rows and 32 keys. A call of Philox covers rows
// g, g + 8 and the same column of four neighbouring 8-column accumulators (core/philox.h). The
// calls of a tile are made beside its first product.
template <int kRowBlocks, int kColumns>
struct DropInOrder {
  DropoutMask mask;
  uint32_t rows;  // of the counter, for this thread's first row
  Philox4 drawn[kRowBlocks][kColumns / 4][2];

  // first_row: of the warp.
  __device__ __forceinline__ DropInOrder(const DropoutMask& mask_, int first_row)
      : mask(mask_), rows(first_row / 2 + fragment_row(0)) {
    mask.seed_low = ptx::uniform(mask.seed_low);
    mask.seed_high = ptx::uniform(mask.seed_high);
  }

  __device__ __forceinline__ void draw(int key) {
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
      for (int n = 0; n < kColumns / 4; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c)
          drawn[b][n][c] = mask.call(rows + 8 * b, key / 4 + 8 * n + fragment_column(c));
      }
    }
  }

  __device__ __forceinline__ void apply(float (&s)[kRowBlocks][kColumns][4]) const {
    const uint32_t limit = mask.keep_below << 16;
#pragma unroll
    for (int e = 0; e < kRowBlocks * kColumns * 4; ++e) {
      const int b = e / 4 / kColumns, n = e / 4 % kColumns, c = e % 4;
      // A lane as the high half of a word, whatever the low half is.
      const uint32_t word = drawn[b][n / 4][c % 2].word[c / 2 * 2 + n % 4 / 2];
      if ((n % 2 == 0 ? word << 16 : word) >= limit) s[b][n][c] = 0;
    }
  }
};

// What a bias does to the scores of a tile: nothing.
struct NoBias {
  static constexpr bool kHides = false;
  __device__ __forceinline__ void load(const Bias&, int) {}
  template <int kRowBlocks, int kColumns>
  __device__ __forceinline__ void add(float (&)[kRowBlocks][kColumns][4],
                                      const Bias&,
                                      float,
                                      int) const {}
};

// Whether the loop takes a tile: all its keys exist, and nothing but the window hides any.
template <class Element, class Tile>
__device__ __forceinline__ bool loop_takes(const ForwardState<Element, Tile>& state,
                                           const KvTile& tile) {
  const int key = tile.n * Tile::kBlockN;
  return tile.full ||
         (tile.bits < 0 && key >= state.keys.first && key + Tile::kBlockN <= state.keys.end);
}

// As whole_tiles (forward.cuh), with features and windows; keys in the given order.
template <class Order, class Element, class Tile, class Ahead, class Drop, int kRowBlocks>
__device__ __forceinline__ bool feature_loop(const AttnParams& p,
                                             const ForwardGrid& grid,
                                             ForwardState<Element, Tile>& state,
                                             int& position,
                                             int& stage,
                                             const WarpOperands& at,
                                             const WarpRows& warp,
                                             uint32_t k_smem,
                                             float (&out)[kRowBlocks][Tile::kHeadDimV / 8][4],
                                             Softmax<Element, kRowBlocks>& softmax,
                                             Ahead ahead,
                                             Drop drop) {
  constexpr int kThreads = Tile::kWarps * 32, kBlockN = Tile::kBlockN;
  constexpr uint32_t kKBytes = sizeof(Element) * kBlockN * Tile::kHeadDim;
  constexpr uint32_t kVBytes = sizeof(Element) * kBlockN * Tile::kHeadDimV;
  const int column0 = state.task.slice * Tile::kHeadDimV, low = state.full_low;
  using Keys = WholeTiles<Element, kBlockN, Tile::kHeadDim, kThreads, Order>;
  using Values = WholeTiles<Element, kBlockN, Tile::kHeadDimV, kThreads, Order>;
  const int batch = state.task.batch;
  const SeqInfo& seq = state.seq;
  KvTile tile = state.tiles[stage];
  bool any = false;
  while (true) {
    KvTile next = {position - 1, true, -1};
    int from = position - 1;  // its position
    bool more = true;
    if (!tile.full || from < low) {
      KvTiles walk = state.walk;
      walk.walk.resume(position);
      more = walk.next(next);
      if (more && !loop_takes(state, next)) return any;
      from = more ? walk.walk.position() : kWalked;
    }
    if (any) {
      ptx::copy_async_wait<0>();
      __syncthreads();
    } else {
      ahead.load(p.bias, tile.n * kBlockN);
    }
    if (more) {
      Keys(state.keys.k, p.k.row, p.head_dim)
          .load(k_smem + (stage ^ 1) * kKBytes, next.n * kBlockN);
      Values(state.keys.v + column0, p.v.row, p.head_dim_v - column0)
          .load(k_smem + 2 * kKBytes + (stage ^ 1) * kVBytes, next.n * kBlockN);
      ptx::copy_async_commit();
      if (threadIdx.x == 0) state.tiles[stage ^ 1] = next;
    }
    const int key = tile.n * kBlockN;
    if (tile.full || state.sees(threadIdx.x / 32, key, kBlockN)) {
      drop.draw(key);
      float s[kRowBlocks][kBlockN / 8][4];
      warp_matmul_qk<Element, Tile::kHeadDim, kBlockN, kBlockN, Tile::kBlockM, Tile::kAhead>(
          s, at.q, at.k + stage * kKBytes);
      if (grid.steps.any) {
        apply_steps<Element, Order>(s, p, grid.steps, warp, seq, batch, key,
                                    tile.full && !Ahead::kHides);
      }
      ahead.add(s, p.bias, grid.steps.unit, key);
      if (more) ahead.load(p.bias, next.n * kBlockN);
      if (!tile.full && !state.sees_all(threadIdx.x / 32, key, kBlockN))
        apply_window<Order>(s, warp, key);
      softmax.step(s, out, grid.scale);
      drop.apply(s);
      add_values<Element, Tile>(out, s, at.v + stage * kVBytes);
    } else if (more) {
      ahead.load(p.bias, next.n * kBlockN);
    }
    tile = next;
    position = from;
    stage ^= 1;
    any = true;
    if (!more) return true;
  }
}

// False when the caller has to take the tile in `stage` itself.
template <class Element, class Tile, int kRowBlocks>
__device__ __forceinline__ bool feature_tiles(const AttnParams& p,
                                              const ForwardGrid& grid,
                                              ForwardState<Element, Tile>& state,
                                              int& position,
                                              int& stage,
                                              const WarpOperands& at,
                                              int warp_row,
                                              uint32_t k_smem,
                                              float (&out)[kRowBlocks][Tile::kHeadDimV / 8][4],
                                              Softmax<Element, kRowBlocks>& softmax) {
  constexpr int kColumns = Tile::kBlockN / 8;
  if (!loop_takes(state, state.tiles[stage])) return false;
  const WarpRows warp = state.warp_rows(warp_row);
  const bool dropout = p.dropout.philox != nullptr;
  if (grid.by_thread) {
    if (dropout || !grid.bias_aligned) return false;
    const BiasAhead<kRowBlocks, kColumns> ahead(p.bias, warp, state.task.batch);
    return feature_loop<KeysByThread<Tile::kBlockN>, Element, Tile>(
        p, grid, state, position, stage, at, warp, k_smem, out, softmax, ahead, KeepAll());
  }
  if (!dropout) {
    return feature_loop<KeysInOrder, Element, Tile>(p, grid, state, position, stage, at, warp,
                                                    k_smem, out, softmax, NoBias(), KeepAll());
  }
  if constexpr (kColumns % 4 == 0) {
    if (warp.group != 1 || warp.first % 16 != 0) return false;
    const DropInOrder<kRowBlocks, kColumns> drop(DropoutMask(p, state.task.batch, warp(0, 0).head),
                                                 warp.first);
    return feature_loop<KeysInOrder, Element, Tile>(p, grid, state, position, stage, at, warp,
                                                    k_smem, out, softmax, NoBias(), drop);
  }
  return false;
}

}  // namespace flash_attn::sm80
