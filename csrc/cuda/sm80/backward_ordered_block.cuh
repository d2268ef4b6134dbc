// SPDX-License-Identifier: BSD-3-Clause
// What the backward kernels without atomics share. A block owns a tile of rows, keys or queries,
// and walks over tiles of the other side; the layout says which (tile/score_backward.cuh):
//
//                   own rows    walked rows
//   KeysDown        K, V        Q, dO          S^T = K Q^T, dP^T = V dO^T
//   QueriesDown     Q, dO       K, V           S = Q K^T,   dP = dO V^T
//
// Own rows are the M side, so that P and dS are A operands as they leave the accumulators
// (gemm.cuh, gemm_f32.cuh).
#pragma once

#include <new>
#include <type_traits>

#include "core/slots.h"
#include "core/tiles.h"
#include "cuda/sm80/gemm.cuh"
#include "cuda/support/backward_prepare.cuh"
#include "cuda/tile/load.cuh"
#include "cuda/tile/score_backward.cuh"
#include "cuda/tile/store.cuh"

namespace flash_attn::sm80 {

template <class Element_, class Numbers>
struct OrderedTile : Numbers {
  using N = Numbers;
  using Element = Element_;
  static constexpr int kBytes = sizeof(Element);
  static constexpr int kOwnWarps = N::kOwn / 16, kWarps = kOwnWarps * N::kDimWarps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kColumns = N::kWalk / 8;                       // accumulators of scores
  static constexpr int kDimColumns = N::kHeadDim / 8 / N::kDimWarps;  // of a warp's gradient
  static constexpr int kOwnBytes = kBytes * N::kOwn * N::kHeadDim;
  static constexpr int kWalkBytes = kBytes * N::kWalk * N::kHeadDim;
  // Shared memory: two own tiles | two walked ones a stage | OrderedState.
  static constexpr int kWalkAt = 2 * kOwnBytes, kStateAt = kWalkAt + 2 * N::kStages * kWalkBytes;
};

// What the launcher adds to the problem.
struct OrderedGrid {
  const BackwardFindings* findings;
  RowWeight* rows;  // layout of lse; of use where findings say that some lse is huge
  double* slopes;   // (heads_q, slots of the query side): parts of dslopes; null when not wanted
  int64_t slots;    // of the side that blocks own (core/slots.h)
  int own, walk;    // rows of the tiles, at most the kernel's
};

// A tile of scores: where it begins, where its sequence ends, and what of it is visible.
// `distance`: seqlen_k - seqlen_q; low <= key - query < high. No more tiles when head is -1.
struct TilePlace {
  int batch, head, query, key, query_end, key_end, distance, low, high, bits;
  bool full;
};

// What a block looks up in shared memory. The walk is thread 0's and runs two tiles ahead.
template <class Tile, class Layout>
struct OrderedState {
  using Tiles = std::conditional_t<std::is_same_v<Layout, KeysDown>, QTiles, KvTiles>;
  SeqInfo seq;
  Mask mask;
  int batch, head_k, begin, end;   // own rows [begin, end)
  bool huge;                       // BackwardFindings
  int head, head_end;              // query heads still to come
  Tiles tiles;                     // of the query head `head`
  TilePlace steps[4];              // of step t: steps[t % 4]
  RowWeight rows[2][Tile::kWalk];  // of walked queries, by stage
  float delta[2][Tile::kWalk];
  double parts[Tile::kWarps];

  __device__ OrderedState(const AttnParams& p,
                          const SeqInfo& s,
                          int b,
                          int begin_,
                          int end_,
                          int first_head,
                          int heads,
                          const OrderedGrid& grid)
      : seq(s),
        mask(p.mask, s),
        batch(b),
        head_k(first_head / p.group_size()),
        begin(begin_),
        end(end_),
        huge(grid.findings->huge_lse != 0),
        head(first_head),
        head_end(first_head + heads),
        tiles(p, s, b, first_head, begin_, end_, grid.walk) {}

  // Into steps[to].
  __device__ __forceinline__ void advance(const AttnParams& p, int to, int walk) {
    constexpr bool kKeysDown = std::is_same_v<Layout, KeysDown>;
    TilePlace& step = steps[to];
    int tile, bits;
    bool full;
    while (!tiles.walk.next(tile, full, bits)) {
      if (++head >= head_end) {
        head = head_end;
        step.head = -1;
        return;
      }
      tiles = Tiles(p, seq, batch, head, begin, end, walk);
    }
    const int first = tile * walk, last = min(first + walk, kKeysDown ? seq.q_len : seq.k_len);
    step = {batch,
            head,
            kKeysDown ? first : begin,
            kKeysDown ? begin : first,
            kKeysDown ? last : end,
            kKeysDown ? end : last,
            seq.k_len - seq.q_len,
            mask.low,
            mask.high,
            bits,
            full && last - first == Tile::kWalk};
  }
};

template <class Tile, class Layout>
constexpr int ordered_smem_bytes() {
  return Tile::kStateAt + static_cast<int>(sizeof(OrderedState<Tile, Layout>));
}

template <class Tile, class Layout>
struct OrderedBlock {
  static constexpr bool kKeysDown = std::is_same_v<Layout, KeysDown>;
  static constexpr int kDim = Tile::kHeadDim;
  using Element = typename Tile::Element;
  using State = OrderedState<Tile, Layout>;
  using Scores = float[1][Tile::kColumns][4];
  using Gradient = float[1][Tile::kDimColumns][4];

  const AttnParams& p;
  const OrderedGrid& grid;
  State& state;
  uint8_t* smem;
  int own_warp, dim_warp;
  // KeysDown: of one walked query, on their way; QueriesDown: of the thread's two queries.
  RowWeight rows[kKeysDown ? 1 : 2];
  float delta[kKeysDown ? 1 : 2];

  __device__ OrderedBlock(const AttnParams& params, const OrderedGrid& g, uint8_t* smem_)
      : p(params),
        grid(g),
        state(*reinterpret_cast<State*>(smem_ + Tile::kStateAt)),
        smem(smem_),
        own_warp(threadIdx.x / 32 % Tile::kOwnWarps),
        dim_warp(Tile::kDimWarps == 1 ? 0 : threadIdx.x / 32 / Tile::kOwnWarps) {}

  // ---- addresses

  __device__ __forceinline__ uint32_t own_tile(int which) const {
    return smem_address(smem) + which * Tile::kOwnBytes;
  }
  // This warp's part of the own rows of a tile, as A.
  __device__ __forceinline__ uint32_t own_rows(uint32_t tile) const {
    return tile + own_warp * 16 * 128 + query_lane<Element>();
  }
  __device__ __forceinline__ uint32_t walk_tile(int which, int stage) const {
    return smem_address(smem) + Tile::kWalkAt + (2 * stage + which) * Tile::kWalkBytes;
  }
  // The columns of a walked tile that this warp's gradient has.
  __device__ __forceinline__ uint32_t walk_columns(int which, int stage) const {
    constexpr uint32_t kPart = Tile::kWalkBytes / Tile::kDimWarps;
    return walk_tile(which, stage) + dim_warp * kPart + value_lane<Element>();
  }
  __device__ __forceinline__ int own_row() const { return state.begin + 16 * own_warp; }

  // ---- loads

  // Rows [begin, end) of Q and dO, or of K and V, -> tiles of kRows at `first` and `second`; 0: not
  // wanted.
  template <int kRows>
  __device__ __forceinline__ void load_queries(
      const SeqInfo& seq, uint32_t first, uint32_t second, int head, int begin, int end) const {
    const PackedRows one(1, head);
    load_tile<kRows, kDim, Tile::kThreads>(first, QueryRows<Element>(p.q, seq, one), begin, end,
                                           p.head_dim,
                                           copies_whole_chunks<Element>(p.q, p.head_dim));
    if (second == 0) return;
    const TensorRef& dout = p.grad.dout;
    load_tile<kRows, kDim, Tile::kThreads>(second, QueryRows<Element>(dout, seq, one), begin, end,
                                           p.head_dim_v,
                                           copies_whole_chunks<Element>(dout, p.head_dim_v));
  }
  template <int kRows>
  __device__ __forceinline__ void load_keys(
      const SeqInfo& seq, uint32_t first, uint32_t second, int head_k, int begin, int end) const {
    load_tile<kRows, kDim, Tile::kThreads>(first, key_rows(seq, p.k, head_k), begin, end,
                                           p.head_dim,
                                           copies_whole_chunks<Element>(p.k, p.head_dim));
    if (second == 0) return;
    load_tile<kRows, kDim, Tile::kThreads>(second, key_rows(seq, p.v, head_k), begin, end,
                                           p.head_dim_v,
                                           copies_whole_chunks<Element>(p.v, p.head_dim_v));
  }
  // No pages in the backward pass, so the batch does not matter.
  __device__ __forceinline__ KeyRows<Element> key_rows(const SeqInfo& seq,
                                                       const TensorRef& t,
                                                       int head_k) const {
    return {p, t, key_base<Element>(p, t, seq, head_k), 0, 0, seq.k_len};
  }

  // lse (as base) and delta of query i: -inf and 0 past `end`. They are on their way until
  // settle().
  __device__ __forceinline__ void fetch(int n, int head, int i, int end) {
    rows[n] = {-INFINITY, 1};
    delta[n] = 0;
    if (i >= end) return;
    const int64_t at = state.seq.lse_offset(p, head, i);
    rows[n].base = static_cast<const float*>(p.lse)[at];
    delta[n] = static_cast<const float*>(p.grad.delta)[at];
  }
  __device__ __forceinline__ void settle(int n, int head, int i) {
    if (rows[n].base == -INFINITY) {
      rows[n].base = INFINITY;
    } else if (state.huge) {
      rows[n] = grid.rows[state.seq.lse_offset(p, head, i)];
    }
  }
  // The first tile, or also the second.
  __device__ __forceinline__ void load_own(bool both) {
    const uint32_t second = both ? own_tile(1) : 0;
    if constexpr (kKeysDown) {
      load_keys<Tile::kOwn>(state.seq, own_tile(0), second, state.head_k, state.begin, state.end);
    } else {
      load_queries<Tile::kOwn>(state.seq, own_tile(0), second, state.head_end - 1, state.begin,
                               state.end);
    }
  }
  __device__ __forceinline__ void load_walk(const TilePlace& step, int stage, bool both) {
    const uint32_t first = walk_tile(0, stage), second = both ? walk_tile(1, stage) : 0;
    if constexpr (kKeysDown) {
      load_queries<Tile::kWalk>(state.seq, first, second, step.head, step.query, step.query_end);
      if (threadIdx.x < Tile::kWalk) fetch(0, step.head, step.query + threadIdx.x, step.query_end);
    } else {
      load_keys<Tile::kWalk>(state.seq, first, second, state.head_k, step.key, step.key_end);
    }
    ptx::copy_async_commit();
  }

  // A query that saw nothing has no gradient, whatever its dO holds.
  __device__ __forceinline__ void clear_empty(const TilePlace& step, int stage) const {
    for (int row = threadIdx.x / 32; row < step.query_end - step.query; row += Tile::kWarps) {
      if (state.rows[stage][row].base != INFINITY) continue;
      for (int chunk = threadIdx.x % 32; chunk < kDim / kChunkOf<Element>; chunk += 32) {
        const uint32_t at = Tile::kWalkAt + (2 * stage + 1) * Tile::kWalkBytes;
        *reinterpret_cast<float4*>(smem + at + tile_offset<Tile::kWalk>(row, chunk)) = {};
      }
    }
    __syncthreads();
  }

  // ---- the walk

  // Calls body(step, stage) with each tile in shared memory. All threads; the state has been
  // written by thread 0. Returns after a barrier that ends all reads of the tiles.
  template <class Body>
  __device__ __forceinline__ void walk(bool both, const Body& body) {
    constexpr bool kAhead = Tile::kStages == 2;
    if (threadIdx.x == 0) {
      state.advance(p, 0, grid.walk);
      state.advance(p, 1, grid.walk);
    }
    __syncthreads();
    load_own(both);
    ptx::copy_async_commit();
    if (state.steps[0].head >= 0) load_walk(state.steps[0], 0, both);
    for (int t = 0;; ++t) {
      const int stage = kAhead ? t % 2 : 0;
      bool empty = false;
      if constexpr (kKeysDown) {
        if (threadIdx.x < Tile::kWalk) {
          const TilePlace& step = state.steps[t % 4];
          if (step.head >= 0) settle(0, step.head, step.query + threadIdx.x);
          state.rows[stage][threadIdx.x] = rows[0];
          state.delta[stage][threadIdx.x] = delta[0];
          empty = rows[0].base == INFINITY && threadIdx.x < step.query_end - step.query;
        }
      }
      ptx::copy_async_wait<0>();
      empty = __syncthreads_or(empty);
      const TilePlace& step = state.steps[t % 4];
      if (step.head < 0) return;
      if (kKeysDown && empty) clear_empty(step, stage);
      const TilePlace& next = state.steps[(t + 1) % 4];
      if (kAhead && next.head >= 0) load_walk(next, stage ^ 1, both);
      if (threadIdx.x == 0) state.advance(p, (t + 2) % 4, grid.walk);
      if (sees(step)) body(step, stage);
      if (!kAhead) {
        __syncthreads();
        if (next.head >= 0) load_walk(next, 0, both);
      }
    }
  }

  // Where chunk n of this warp's part begins.
  __device__ __forceinline__ int chunk_query(const TilePlace& tile, int n) const {
    return tile.query + 16 * (kKeysDown ? n : own_warp);
  }
  __device__ __forceinline__ int chunk_key(const TilePlace& tile, int n) const {
    return tile.key + 16 * (kKeysDown ? own_warp : n);
  }

  // Whether the window leaves something of a tile to this warp's rows.
  __device__ __forceinline__ bool sees(const TilePlace& tile) const {
    const int query = chunk_query(tile, 0), key = chunk_key(tile, 0);
    const int query_end = kKeysDown ? tile.query_end : query + 16;
    const int key_end = kKeysDown ? key + 16 : tile.key_end;
    return key_end - 1 - query >= tile.low && key - (query_end - 1) < tile.high;
  }

  // ---- products of a warp

  // c = A B^T: own_rows of a tile at `a`, rows of a tile of kRows at `b`.
  template <int kRows>
  __device__ __forceinline__ void multiply_rows(float (&c)[1][kRows / 8][4],
                                                uint32_t a,
                                                uint32_t b) const {
    if constexpr (sizeof(Element) == 4) {
      warp_multiply_rows<kDim, Tile::kOwn, kRows, kKeysDown>(c, a, b + pair_lane());
    } else {
      warp_matmul_qk<Element, kDim, kRows, kRows, Tile::kOwn>(c, a, b + column_lane());
    }
  }
  // sum += A B: accumulators, this warp's columns of a walked tile.
  __device__ __forceinline__ void multiply_add(Gradient& sum,
                                               const Scores& a,
                                               int which,
                                               int stage) const {
    if constexpr (sizeof(Element) == 4) {
      warp_multiply_add<Tile::kWalk>(sum, a, walk_columns(which, stage));
    } else {
      const auto operand = [&](uint32_t(&to)[1][4], int step) {
        to_operand<Element>(to[0], a[0][2 * step], a[0][2 * step + 1]);
      };
      warp_matmul_pv<Element, 8 * Tile::kDimColumns, Tile::kWalk, Tile::kWalk>(
          sum, operand, walk_columns(which, stage));
    }
  }

  // ---- scores

  __device__ __forceinline__ HeadFeatures features(const TilePlace& tile) const {
    return {p, tile.batch, tile.head, tile.distance, tile.key_end, tile.query_end};
  }

  // s: q . k -> P as it meets V (without dropout's scale). dp: dP -> dS as it meets Q and K.
  // bias(x, n) adds the bias to chunk n of the scores; use(n, ds, query, key) gets the score
  // gradients of chunk n, which begins there.
  template <int kColumns, class AddBias, class Use>
  __device__ __forceinline__ void gradients(float (&s)[1][kColumns][4],
                                            float (&dp)[1][kColumns][4],
                                            const TilePlace& tile,
                                            int stage,
                                            const AddBias& bias,
                                            const Use& use) const {
    const HeadFeatures head = features(tile);
    const Visible visible{p.mask, tile.low, tile.high, tile.key_end, tile.query_end, tile.bits};
    DropoutChunk<Layout> drawn;
    const float scale = static_cast<float>(p.dropout.scale);
#pragma unroll
    for (int n = 0; n < kColumns / 2; ++n) {
      const int query = chunk_query(tile, n), key = chunk_key(tile, n);
      float x[8], slope[8], ds[8];
#pragma unroll
      for (int e = 0; e < 8; ++e)
        x[e] = s[0][2 * n + e / 4][e % 4];
      exact_scores<Element, Layout>(x, slope, head, query, key);
      bias(x, n);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const RowWeight row = row_of(e, n, stage);
        x[e] = ptx::exp2_approx((x[e] - row.base) * kLog2e) * row.weight;
      }
      if (!tile.full) hide<Layout>(x, visible, query, key);
      if (p.dropout.philox != nullptr)
        mark_dropped(x, drawn, kKeysDown || n == 0, head, query, key);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        float& gradient = dp[0][2 * n + e / 4][e % 4];
        ds[e] = flash_attn::score_gradient(x[e], gradient, delta_of(e, n, stage), scale);
        s[0][2 * n + e / 4][e % 4] = fmaxf(x[e], 0.0f);
        gradient = ds[e] * slope[e];
      }
      use(n, ds, query, key);
    }
  }

  // The same with the bias from global memory.
  template <class Use>
  __device__ __forceinline__ void gradients(
      Scores& s, Scores& dp, const TilePlace& tile, int stage, const Use& use) const {
    const auto bias = [&](float(&x)[8], int n) {
      add_chunk_bias<Layout>(x, features(tile), chunk_query(tile, n), chunk_key(tile, n));
    };
    gradients(s, dp, tile, stage, bias, use);
  }

  // s: q . k -> scores, -inf what is hidden.
  __device__ __forceinline__ void visible_scores(Scores& s, const TilePlace& tile) const {
    const HeadFeatures head = features(tile);
    const Visible visible{p.mask, tile.low, tile.high, tile.key_end, tile.query_end, tile.bits};
#pragma unroll
    for (int n = 0; n < Tile::kColumns / 2; ++n) {
      const int query = chunk_query(tile, n), key = chunk_key(tile, n);
      float x[8], slope[8], seen[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        x[e] = s[0][2 * n + e / 4][e % 4];
        seen[e] = 1;
      }
      exact_scores<Element, Layout>(x, slope, head, query, key);
      add_chunk_bias<Layout>(x, head, query, key);
      if (!tile.full) hide<Layout>(seen, visible, query, key);
#pragma unroll
      for (int e = 0; e < 8; ++e)
        s[0][2 * n + e / 4][e % 4] = seen[e] == 0 ? -INFINITY : x[e];
    }
  }

  __device__ __forceinline__ RowWeight row_of(int e, int n, int stage) const {
    if constexpr (kKeysDown) return state.rows[stage][16 * n + Layout::query(e)];
    return rows[Layout::query_number(e) % 2];
  }
  __device__ __forceinline__ float delta_of(int e, int n, int stage) const {
    if constexpr (kKeysDown) return state.delta[stage][16 * n + Layout::query(e)];
    return delta[Layout::query_number(e) % 2];
  }

  // ---- results

  // acc * factor -> the place of an own tile, then, of all warps together, rows of t.
  __device__ __forceinline__ void write(
      const Gradient& acc, int which, float factor, const TensorRef& t, int dim) const {
    if (t.ptr == nullptr) return;
    uint8_t* tile = smem + which * Tile::kOwnBytes;
    uint8_t* part = tile + dim_warp * (Tile::kOwnBytes / Tile::kDimWarps);
#pragma unroll
    for (int h = 0; h < 2; ++h)
      stage_row<Element, Tile::kOwn>(acc[0], h, factor, part, own_warp * 16);
    __syncthreads();
    constexpr int kRows = Tile::kOwn / Tile::kWarps;
    const int row = threadIdx.x / 32 * kRows;
    const bool whole = copies_whole_chunks<Element>(t);
    if constexpr (kKeysDown) {
      store_rows<Tile::kOwn, kRows, kDim>(tile, row, key_rows(state.seq, t, state.head_k),
                                          state.begin + row, state.end, dim, whole);
    } else {
      const QueryRows<Element> out(t, state.seq, PackedRows(1, state.head_end - 1));
      store_rows<Tile::kOwn, kRows, kDim>(tile, row, out, state.begin + row, state.end, dim, whole);
    }
  }
};

}  // namespace flash_attn::sm80
