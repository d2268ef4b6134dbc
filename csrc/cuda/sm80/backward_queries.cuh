// SPDX-License-Identifier: BSD-3-Clause
// dQ of a tile in a block of the backward kernel: by the warps of role 1, from the dS^T of all,
// into the accumulator in global memory (support/backward_finish.cuh).
#pragma once

#include "cuda/ptx/reduce.cuh"
#include "cuda/sm80/backward_products.cuh"
#include "cuda/sm80/backward_store.cuh"

namespace flash_attn::sm80 {

template <class Element, class Tile>
struct BackwardQueries : BackwardStore<Element, Tile> {
  using T = Tile;
  using Base = BackwardStore<Element, Tile>;
  using Base::barrier_all, Base::grid, Base::p, Base::smem, Base::state;
  using Base::Base;

  __device__ __forceinline__ uint32_t ds_tile(int t) const {
    return smem + T::kDs + t % T::kStages * T::kPanelBytes;
  }

  // A pass of a warp's dQ on its way to the accumulator, where `to` is its place; null: nothing is.
  struct Leaving {
    static constexpr int kAll = T::kDqRows / 8 * T::kDqPairs;  // additions a thread
    float part[T::kDqRows / 16][2 * T::kDqPairs][4];
    float* to = nullptr;

    // The share of step k of `steps`.
    __device__ __forceinline__ void add(int k, int steps) const {
#pragma unroll
      for (int index = k * kAll / steps; index < (k + 1) * kAll / steps; ++index) {
        const int r = index / T::kDqPairs, n = index % T::kDqPairs, half = r % 2 * 2;
        const float(&left)[4] = part[r / 2][2 * n], (&right)[4] = part[r / 2][2 * n + 1];
        ptx::add_global_4(to + (r * T::kHeadDim + n * T::kDqColumnWarps * 16) * kAccumulatorLines,
                          left[half], left[half + 1], right[half], right[half + 1]);
      }
    }
  };

  // Role 1: dQ of a tile whose dS^T is complete. Of a whole tile the last pass may be left to the
  // caller.
  __device__ __forceinline__ void spread_query_step(Leaving& last, int t) const {
    if (t < 0 || grid.dq_accum == nullptr) return;
    const QueryStep& step = state.steps[t % 4];
    if (step.end - step.begin != T::kBlockM || grid.dq_columns != T::kHeadDim ||
        step.parts_end - step.parts_begin != T::kKeyWarps) {
      query_step(t);
      return;
    }
    constexpr int kColumnWarps = T::kDqColumnWarps;
    const uint32_t thread = here(threadIdx.x), lane = thread % 32;
    const int own = static_cast<int>(thread) / 32 % T::kRoleWarps;
    const int query = own / kColumnWarps * T::kDqRows, row = query + static_cast<int>(lane) / 4;
    const uint32_t ds = operand_at<0>(columns_operand(here(ds_tile(t))), query / 16);
#pragma unroll
    for (int pass = 0; pass < T::kDqPasses; ++pass) {
      const int column = pass * T::kDqPairs * kColumnWarps + own % kColumnWarps;  // of 16
      const uint32_t keys = operand_at<T::kBlockN>(rows_operand(here(smem)), column);
      Leaving now;
      zero(now.part);
      multiply_keys<Element, T::kBlockN, T::kBlockN, kColumnWarps>(now.part, ds, keys, [&](int k) {
        if (pass > 0) last.add(k, T::kBlockN / 16);
      });
      now.to = grid.dq_accum + lane % 4 * 4 +
               accumulator_offset(step.dq_line + row, column * 16, T::kHeadDim);
      last = now;
    }
    if (!T::kDqOverScores) last.add(0, 1);
  }

  // The same of any tile, all of it.
  __device__ __forceinline__ void query_step(int t) const {
    if (t < 0 || grid.dq_accum == nullptr) return;
#pragma unroll 1
    for (int pass = 0; pass < T::kDqPasses; ++pass)
      query_pass(state.steps[t % 4], ds_tile(t), pass);
  }

  __device__ __forceinline__ void query_pass(const QueryStep& step,
                                             uint32_t ds_rows,
                                             int pass) const {
    constexpr int kRows = T::kDqRows, kColumnWarps = T::kDqColumnWarps, kPairs = T::kDqPairs;
    const uint32_t thread = here(threadIdx.x), lane = thread % 32;
    const int own = static_cast<int>(thread) / 32 % T::kRoleWarps;
    const int column = pass * kPairs * kColumnWarps + own % kColumnWarps;  // of 16
    const int query = own / kColumnWarps * kRows, row = query + static_cast<int>(lane) / 4;
    float dq[kRows / 16][2 * kPairs][4] = {};
    const uint32_t ds = operand_at<0>(columns_operand(here(ds_rows)), query / 16);
    const uint32_t keys = operand_at<T::kBlockN>(rows_operand(here(smem)), column);
    if (step.parts_end - step.parts_begin == T::kKeyWarps) {
      multiply_keys<Element, T::kBlockN, T::kBlockN, kColumnWarps>(dq, ds, keys);
    } else {
#pragma unroll 1
      for (int part = step.parts_begin; part < step.parts_end; ++part) {
        const int at = part * T::kWarpKeys * 128;
        multiply_keys<Element, T::kBlockN, T::kWarpKeys, kColumnWarps>(dq, ds + at, keys + at);
      }
    }
    const int live = step.end - step.begin - row;
    float* to = grid.dq_accum + lane % 4 * 4 +
                accumulator_offset(step.dq_line + row, column * 16, grid.dq_columns);
    if (step.end - step.begin == T::kBlockM && grid.dq_columns == T::kHeadDim) {
      add_queries(to, dq, [](int, int) { return true; });
    } else {
      add_queries(to, dq, [&](int r, int n) {
        return 8 * r < live && (column + n * kColumnWarps) * 16 < grid.dq_columns;
      });
    }
  }

  // What query_pass made to the accumulator, where inside(row / 8, column / 16 / kDqColumnWarps).
  template <class Inside>
  __device__ __forceinline__ void add_queries(
      float* to,
      const float (&dq)[T::kDqRows / 16][2 * T::kDqPairs][4],
      const Inside& inside) const {
#pragma unroll
    for (int r = 0; r < T::kDqRows / 8; ++r) {
      const int half = r % 2 * 2;
#pragma unroll
      for (int n = 0; n < T::kDqPairs; ++n) {
        const float(&left)[4] = dq[r / 2][2 * n], (&right)[4] = dq[r / 2][2 * n + 1];
        if (inside(r, n)) {
          ptx::add_global_4(to + n * T::kDqColumnWarps * 16 * kAccumulatorLines, left[half],
                            left[half + 1], right[half], right[half + 1]);
        }
      }
      to += 8 * grid.dq_columns;
    }
  }

  // ---- the ring

  // A warp, before its first addition.
  __device__ __forceinline__ void wait_for_place() const {
    if (!this->has_ring()) return;
    if (threadIdx.x % 32 == 0) {
      while (ptx::load_acquire(grid.ring.finished + state.place) != state.turn)
        ;
    }
    __syncwarp();
  }

  // One thread, once all additions of the block are behind it.
  __device__ __forceinline__ void arrive() const {
    const int before = ptx::add_acquire_release(grid.ring.arrived + state.place, 1);
    state.last = before + 1 == grid.ring.blocks;
  }

  // All threads of a group's last block.
  __device__ __forceinline__ void finish_group() const {
    float* accum = grid.dq_accum + state.place * grid.ring.lines * T::kHeadDim;
    const int head = state.head_k * grid.group;
    ring_to_rows<Element, T::kHeadDim, T::kWarps>(
        accum, grid.group * p.seqlen_q, grid.numbers.scale, [&](int line) {
          int row = line, of_head = head;
          for (; row >= p.seqlen_q; row -= p.seqlen_q)
            ++of_head;
          return static_cast<Element*>(p.grad.dq.ptr) + state.seq.q_offset(p.grad.dq, row, of_head);
        });
    const int groups_left = p.batch * p.heads_k - (state.turn + 1) * grid.ring.places;
    if (state.place >= groups_left) return;  // nobody has the place after this group
    barrier_all();
    if (threadIdx.x == 0) {
      grid.ring.arrived[state.place] = 0;
      ptx::store_release(grid.ring.finished + state.place, state.turn + 1);
    }
  }
};

}  // namespace flash_attn::sm80
