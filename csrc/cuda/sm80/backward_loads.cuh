// SPDX-License-Identifier: BSD-3-Clause
// How Q, dO, lse and delta of the next tile come to a block of the backward kernel while it works
// on this one (backward_block.cuh).
#pragma once

#include <type_traits>

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/sm80/backward_state.cuh"
#include "cuda/tile/load_rows.cuh"

namespace flash_attn::sm80 {

// The calling thread of a block, and its part in the loads.
template <class Element, class Tile>
struct BackwardLoads {
  using T = Tile;
  static constexpr Score kScore = Tile::kScore;
  const AttnParams& p;
  const BackwardGrid& grid;
  BackwardState<Element, Tile>& state;
  uint32_t smem;
  uint32_t warp, key_warp, dim_warp;  // key_warp, dim_warp: inside the role

  __device__ BackwardLoads(const AttnParams& params,
                           const BackwardGrid& g,
                           BackwardState<Element, Tile>& s,
                           uint32_t smem_)
      : p(params), grid(g), state(s), smem(smem_), warp(threadIdx.x / 32) {
    const uint32_t in_role = warp % T::kRoleWarps;
    key_warp = in_role % T::kKeyWarps;
    dim_warp = in_role / T::kKeyWarps;
  }

  __device__ __forceinline__ void advance(int to) const {
    state.advance(p, grid, state.steps[to % 4]);
  }

  // Whether dq goes by way of the ring (support/backward_ring.cuh).
  __device__ __forceinline__ bool has_ring() const {
    return T::kHeadDim <= kRingColumns && grid.ring.places > 0;
  }

  // Whether dropout may be on; if it may not, the compiler knows.
  __device__ __forceinline__ bool drops() const {
    return T::kDropout || (kScore == Score::kGeneral && p.dropout.philox != nullptr);
  }

  __device__ __forceinline__ void barrier_all() const { ptx::barrier_sync(0, T::kThreads); }

  // Where the rows of K and V lie in their tiles, and so those of dK and dV.
  using KeyOrder =
      std::conditional_t<kScore == Score::kPlain, KeysInOrder, KeysByLaneOrNot<T::kWarpKeys>>;
  __device__ __forceinline__ KeyOrder key_order() const {
    KeyOrder order;
    if constexpr (kScore == Score::kGeneral) order.by_lane = grid.by_lane;
    return order;
  }

  __device__ __forceinline__ bool q_whole() const { return T::kUsual || state.q_whole; }
  __device__ __forceinline__ bool dout_whole() const { return T::kUsual || state.dout_whole; }

  // ---- loads

  template <int kRows, int kDim, class Order = KeysInOrder>
  __device__ __forceinline__ static void load(uint32_t to,
                                              const TensorRef& t,
                                              int64_t offset,
                                              int live,
                                              int dim,
                                              bool whole,
                                              Order order = {}) {
    load_rows<kRows, kDim, T::kThreads>(to, static_cast<const Element*>(t.ptr) + offset, t.row,
                                        live, dim, whole, order);
  }

  // The keys of a block, which its state need not know yet.
  __device__ __forceinline__ void load_keys(const SeqInfo& seq, int head_k, int key) const {
    const int live = min(grid.block_n, seq.k_len - key);
    const int64_t k = seq.k_offset(p.k, key, head_k), v = seq.k_offset(p.v, key, head_k);
    load<T::kBlockN, T::kHeadDim>(smem, p.k, k, live, p.head_dim,
                                  T::kUsual || copies_whole_chunks<Element>(p.k, p.head_dim),
                                  key_order());
    load<T::kBlockN, T::kHeadDimV>(smem + T::kKBytes, p.v, v, live, p.head_dim_v,
                                   T::kUsual || copies_whole_chunks<Element>(p.v, p.head_dim_v),
                                   key_order());
    ptx::copy_async_commit();
  }

  // Q and dO on their way to buffer `stage`, by all threads.
  __device__ __forceinline__ void load_queries(const QueryStep& step, int stage) const {
    const int live = step.end - step.begin;
    load<T::kBlockM, T::kHeadDim>(smem + T::kQ + stage * T::kQBytes, p.q, step.q, live, p.head_dim,
                                  q_whole());
    load<T::kBlockM, T::kHeadDimV>(smem + T::kDout + stage * T::kDoutBytes, p.grad.dout, step.dout,
                                   live, p.head_dim_v, dout_whole());
    ptx::copy_async_commit();
  }

  // What is subtracted from the scores of a tile's rows, and delta: one number a thread.
  __device__ __forceinline__ void load_stats(const QueryStep& step, int stage) const {
    const uint32_t thread = here(threadIdx.x);
    if (thread >= 2 * T::kBlockM) return;
    const int row = static_cast<int>(thread % T::kBlockM);
    const int64_t line = step.line + row;
    const float* from = thread < T::kBlockM ? &grid.rows[line].base
                                            : static_cast<const float*>(p.grad.delta) + line;
    ptx::copy_async_4(stats(stage) + thread * 4, from, row < step.end - step.begin);
  }

  // What a role loads of the next tile, from piece `first` on: role 0 Q, role 1 dO.
  template <int kRole>
  using Pieces =
      RowPieces<T::kBlockM, kRole == 0 ? T::kHeadDim : T::kHeadDimV, T::kRoleWarps * 32, Element>;
  template <int kRole>
  __device__ __forceinline__ Pieces<kRole> next_rows(int t, int first) const {
    const QueryStep& next = state.steps[(t + 1) % 4];
    const int stage = (t + 1) % T::kStages;
    const bool whole = kRole == 0 ? q_whole() : dout_whole();
    const bool wanted = T::kStages == 2 && next.head >= 0 && whole;
    const int live = next.end - next.begin;
    if constexpr (kRole == 0) {
      const Element* from = static_cast<const Element*>(p.q.ptr) + next.q;
      return {smem + T::kQ + stage * T::kQBytes, from, p.q.row, live, p.head_dim, first, wanted};
    } else {
      const Element* from = static_cast<const Element*>(p.grad.dout.ptr) + next.dout;
      return {smem + T::kDout + stage * T::kDoutBytes,
              from,
              p.grad.dout.row,
              live,
              p.head_dim_v,
              first,
              wanted};
    }
  }
  // Whether the window hides all keys of this warp from a tile.
  __device__ __forceinline__ bool hidden(const QueryStep& step) const {
    const int part = static_cast<int>(key_warp);
    return part < step.parts_begin || part >= step.parts_end;
  }

  // All of the next tile at once, by a warp that has nothing to do for this one.
  template <int kRole>
  __device__ __forceinline__ void load_next(int t) {
    if constexpr (T::kStages == 1) return;
    Pieces<kRole> next = next_rows<kRole>(t, 0);
#pragma unroll
    for (int piece = 0; piece < Pieces<kRole>::kPieces; ++piece)
      next.issue(piece);
    finish_next<kRole>(t);
  }

  // The rest of the next tile, after the pieces of its rows.
  template <int kRole>
  __device__ __forceinline__ void finish_next(int t) {
    if constexpr (T::kStages == 1) return;
    const QueryStep& next = state.steps[(t + 1) % 4];
    const int stage = (t + 1) % T::kStages, live = next.end - next.begin;
    if (next.head >= 0) {
      load_stats(next, stage);
      if (kRole == 0 && !q_whole()) {
        load_rows_slowly<T::kBlockM, T::kHeadDim, T::kRoleWarps * 32>(
            smem + T::kQ + stage * T::kQBytes, static_cast<const Element*>(p.q.ptr) + next.q,
            p.q.row, live, p.head_dim);
      }
      if (kRole == 1 && !dout_whole()) {
        load_rows_slowly<T::kBlockM, T::kHeadDimV, T::kRoleWarps * 32>(
            smem + T::kDout + stage * T::kDoutBytes,
            static_cast<const Element*>(p.grad.dout.ptr) + next.dout, p.grad.dout.row, live,
            p.head_dim_v);
      }
    }
    ptx::copy_async_commit();
  }

  __device__ __forceinline__ uint32_t stats(int stage) const {
    return smem + T::kStats + stage * 2 * T::kStatBytes;
  }

  // Rows that saw nothing have no gradient, whatever dout holds there: their dO becomes 0.
  __device__ __forceinline__ void remove_poison(int stage) const {
    if (!state.poison) return;
    constexpr int kChunks = T::kHeadDimV / kChunk;
    for (int at = static_cast<int>(here(threadIdx.x)); at < T::kBlockM * kChunks;
         at += T::kThreads) {
      const int row = at / kChunks;
      if (ptx::load_shared_4(stats(stage) + row * 4) != INFINITY) continue;
      ptx::store_shared_16(
          smem + T::kDout + stage * T::kDoutBytes + tile_offset<T::kBlockM>(row, at % kChunks),
          {0, 0, 0, 0});
    }
    barrier_all();
  }
};

}  // namespace flash_attn::sm80
