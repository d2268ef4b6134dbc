// SPDX-License-Identifier: BSD-3-Clause
// What one block of the backward kernel does: dK and dV of its keys, and its part of dQ.
//
// A block owns kBlockN keys of one key head and goes through the query heads that read it and
// through their query tiles; dK and dV stay in registers, so grouped heads cost nothing. Its warps
// have two roles, and each scheduler warps of both:
//
//          role 0                                role 1
//   1      wait for Q and dO; all threads past the last tile
//   2                                            dQ of the last tile += dS K
//   3      S^T = K Q^T, next Q on its way        dP^T = V dO^T, next dO on its way
//   4      P^T = exp2(S^T scale - lse)  ------>  dS^T = P^T (dP^T - delta)  ---> dS for 2
//   5      dV += P^T dO                          dK += dS^T Q
//   6      which tile comes after the next (kQuickSteps: role 1)
//
// With keys on the M side, P^T and dS^T leave the registers only to meet the other role: P^T goes
// through the place of dS^T, thread for thread. Where two warps share their keys' columns of dV
// and dK (kDimWarps), they read each other's P^T and dS^T from there too. dQ is added to an fp32
// accumulator in global memory (support/backward_finish.cuh), whose rows hold each 16 columns in
// the order of the accumulator registers. With one buffer of each (kStages), dQ has a barrier of
// its own and belongs to the same tile.
#pragma once

#include "cuda/ptx/barrier.cuh"
#include "cuda/sm80/backward_bias.cuh"
#include "cuda/sm80/backward_queries.cuh"

namespace flash_attn::sm80 {

template <class Element, class Tile>
struct BackwardBlock : BackwardQueries<Element, Tile> {
  using T = Tile;
  using Base = BackwardQueries<Element, Tile>;
  using Leaving = typename Base::Leaving;
  using Base::barrier_all, Base::dim_warp, Base::drops, Base::ds_tile, Base::grid, Base::hidden,
      Base::key_warp, Base::p, Base::smem, Base::state, Base::stats;
  using Base::Base;
  template <int kRole>
  using Pieces = typename Base::template Pieces<kRole>;
  static constexpr Score kScore = Tile::kScore;

  // ---- the steps of one tile

  // Barriers of the warps that share keys; 0 is everybody's.
  static constexpr int kGroupThreads = 64 * T::kDimWarps;
  __device__ __forceinline__ int group_barrier(int sub) const {
    return 1 + key_warp * T::kSubBarriers + sub % T::kSubBarriers;
  }
  __device__ __forceinline__ int role_barrier(int role) const {
    return 1 + T::kKeyWarps * (T::kSubBarriers + role) + key_warp;
  }

  __device__ __forceinline__ int first_query(int sub) const {
    return (sub * T::kDimWarps + dim_warp) * T::kSubQueries;
  }

  // Where this warp's rows of a (kBlockN, queries) tile begin, at column `query`.
  __device__ __forceinline__ uint32_t own_rows(uint32_t tile, int query) const {
    return operand_at<0>(here(tile) + key_warp * T::kWarpKeys * 128, query / 16);
  }

  using Scores = float[T::kRowBlocks][T::kSubQueries / 8][4];
  using Operands = uint32_t[T::kSubQueries / 16][T::kRowBlocks][4];

  // S^T or dP^T of this warp's keys and the queries from `query` on, added to c.
  template <int kDim, class Each>
  __device__ __forceinline__ void add_scores(
      Scores& c, uint32_t keys, uint32_t queries, int query, const Each& each) const {
    multiply_rows<Element, kDim, T::kBlockN, T::kBlockM>(
        c, rows_operand(here(keys) + key_warp * T::kWarpKeys * 128),
        columns_operand(here(queries) + query * 128), each);
  }

  // dV += P^T dO or dK += dS^T Q over the queries of a substep, whose A operands are in registers
  // or, where warps share them, in `tile`.
  template <int kColumnBlocks>
  __device__ __forceinline__ void accumulate(float (&c)[T::kRowBlocks][kColumnBlocks][4],
                                             const Operands& own,
                                             uint32_t tile,
                                             uint32_t rows,
                                             int sub) const {
    constexpr int kAll = T::kDimWarps * T::kSubQueries / 16;
    const int query = sub * 16 * kAll;
    const uint32_t b = operand_at<T::kBlockM>(rows_operand(here(rows) + query * 128), dim_warp);
#pragma unroll
    for (int n = 0; n < kAll; ++n) {
      if constexpr (T::kShareProbabilities) {
        uint32_t a[T::kRowBlocks][4];
        const uint32_t at = rows_operand(own_rows(tile, query));
#pragma unroll
        for (int r = 0; r < T::kRowBlocks; ++r)
          ptx::load_matrix_x4(a[r], operand_at<0>(at, n) + r * kRowBlockBytes);
        multiply_add_step<Element, T::kBlockM, T::kDimWarps>(c, a, b + n * kRowBlockBytes);
      } else {
        multiply_add_step<Element, T::kBlockM, T::kDimWarps>(c, own[n], b + n * kRowBlockBytes);
      }
    }
  }

  // What role 1 reads: P^T, in the general kernels changed as to_probabilities says, from where
  // dS^T will be or, where warps of role 0 need P^T as well, beside it.
  __device__ __forceinline__ uint32_t sent_tile(int t) const {
    if constexpr (T::kShareProbabilities) {
      return smem + T::kP + (T::kTilesOfP - 1) * T::kPanelBytes;
    } else {
      return ds_tile(t);
    }
  }

  // Role 0: dV of tile t.
  template <class Held, int kColumnBlocks>
  __device__ __forceinline__ void value_step(float (&dv)[T::kRowBlocks][kColumnBlocks][4],
                                             Held& bias,
                                             int t) {
    const int stage = t % T::kStages;
    constexpr int kEach = Pieces<0>::kPieces / T::kSubSteps;
    static_assert(kEach <= T::kHeadDim / 16 && kEach % Pieces<0>::kPanels == 0);
    if (hidden(state.steps[t % 4])) {
      this->template load_next<0>(t);
      return;
    }
#pragma unroll 1
    for (int sub = 0; sub < T::kSubSteps; ++sub) {
      const QueryStep& step = state.steps[t % 4];
      const ScoreTile tile = score_tile<Held>(step, first_query(sub));
      const bool full = step.bits == QueryStep::kFull;
      HiddenBits<T::kRowBlocks, T::kSubQueries / 8> hidden;
      const bool some_bits = !full && hidden.find(tile, step.bits);
      Scores s;
      zero(s);
      if constexpr (kScore == Score::kGeneral) begin_with_bias(s, bias, tile, t, sub);
      Pieces<0> next = this->template next_rows<0>(t, sub * kEach);
      add_scores<T::kHeadDim>(s, smem, smem + T::kQ + stage * T::kQBytes, first_query(sub),
                              [&](int k) {
                                if (T::kStages == 2 && k < kEach) next.issue(k);
                              });
      float2 lse[T::kSubQueries / 8];
      load_statistics(lse, stats(stage) + first_query(sub) * 4);
      float factor = grid.numbers.scale;
      if constexpr (kScore == Score::kGeneral) {
        // The slopes of the softcap wait where P^T will go.
        const uint32_t rows = own_rows(sent_tile(t), first_query(sub));
        factor = to_scores<Element>(s, tile, [&](int r, int n, const uint32_t(&slopes)[4]) {
          store_operand(rows + r * kRowBlockBytes, n, slopes);
        });
      }
      if (tile.rows == nullptr) {
        to_probabilities(s, lse, factor);
      } else {
        to_huge_probabilities(s, lse, tile, factor);
      }
      if (!full) hide(s, tile);
      if (some_bits) hidden.apply(s);
      if (!Held::kByLane && drops()) mark_dropped<T::kDropout>(s, tile, state.dropout);
      Operands a;
      send(a, s, t, first_query(sub));
      // Role 0 may be ahead of role 1 by as many substeps as there are barriers, no more.
      if (T::kSubSteps > 2 && sub % 2 == 1) {
        ptx::barrier_sync(group_barrier(sub), kGroupThreads);
      } else {
        ptx::barrier_arrive(group_barrier(sub), kGroupThreads);
      }
      if constexpr (T::kShareProbabilities) {
        ptx::barrier_sync(role_barrier(0), kGroupThreads / 2);
      }
      if (sub + 1 == T::kSubSteps) this->template finish_next<0>(t);
      if (p.grad.dv.ptr != nullptr) {
        accumulate(dv, a, smem + T::kP, smem + T::kDout + stage * T::kDoutBytes, sub);
      }
    }
  }

  // The bias as what the product is added to, where it may come first. Where keys lie by lane, that
  // of the warp's next part is then on its way.
  template <class Held>
  __device__ __forceinline__ void begin_with_bias(
      Scores& s, Held& bias, const ScoreTile& tile, int t, int sub) const {
    if (!bias_first(tile)) return;
    const float factor = grid.numbers.inverse;
    if constexpr (!Held::kByLane) {
      add_bias(s, tile, factor);
    } else {
      if (!bias.inside(tile)) {
        add_bias(s, tile, factor);
      } else {
        if (!bias.held) bias.load(tile);
        bias.take(s, p.bias, factor);
      }
      bias.held = false;
      const bool last = sub + 1 == T::kSubSteps;
      const QueryStep& step = state.steps[(t + (last ? 1 : 0)) % 4];
      if (step.head < 0 || hidden(step)) return;
      const ScoreTile next = score_tile<Held>(step, first_query(last ? 0 : sub + 1));
      if (bias.inside(next)) bias.load(next);
    }
  }

  template <class Held>
  __device__ __forceinline__ ScoreTile score_tile(const QueryStep& step, int query) const {
    const RowWeight* rows = state.huge ? grid.rows + step.line - step.begin : nullptr;
    return {p,
            grid.numbers,
            state.batch,
            step.head,
            step.begin + query,
            state.key_begin + static_cast<int>(key_warp) * T::kWarpKeys,
            step.end,
            state.key_end,
            state.mask.low,
            state.mask.high,
            state.seq.k_len - state.seq.q_len,
            rows,
            Held::kByLane ? T::kWarpKeys / 8 : 1,
            Held::kByLane ? 1 : 8};
  }

  __device__ __forceinline__ static void load_statistics(float2 (&to)[T::kSubQueries / 8],
                                                         uint32_t from) {
    const uint32_t lane = here(threadIdx.x);
#pragma unroll
    for (int n = 0; n < T::kSubQueries / 8; ++n)
      to[n] = ptx::load_shared_8(from + n * 32 + lane % 4 * 8);
  }

  __device__ __forceinline__ bool capped() const {
    return kScore == Score::kGeneral && grid.numbers.cap > 0;
  }

  // P^T as A operands, and to role 1: times the slopes of the softcap, negative where dropped.
  __device__ __forceinline__ void send(Operands& a, const Scores& prob, int t, int query) const {
    const uint32_t rows = own_rows(sent_tile(t), query);
    if (!capped() && !drops()) {
#pragma unroll
      for (int n = 0; n < T::kSubQueries / 16; ++n) {
#pragma unroll
        for (int r = 0; r < T::kRowBlocks; ++r)
          to_operand<Element>(a[n][r], prob[r][2 * n], prob[r][2 * n + 1]);
      }
      store_operands(rows, a);
    } else {
      if (capped()) __syncwarp();
#pragma unroll
      for (int n = 0; n < T::kSubQueries / 16; ++n) {
#pragma unroll
        for (int r = 0; r < T::kRowBlocks; ++r)
          send_general(a[n][r], prob[r][2 * n], prob[r][2 * n + 1], rows + r * kRowBlockBytes, n);
      }
    }
    if constexpr (T::kTilesOfP == 2) store_operands(own_rows(smem + T::kP, query), a);
  }

  __device__ __forceinline__ void send_general(uint32_t (&a)[4],
                                               const float (&left)[4],
                                               const float (&right)[4],
                                               uint32_t rows,
                                               int pair) const {
    uint32_t sent[4];
    to_operand<Element>(sent, left, right);
    if (capped()) {
      uint32_t slopes[4];
      ptx::load_matrix_x4(slopes, operand_at<0>(rows_operand(rows), pair));
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 x = unpack_pair(Element(), sent[e]), slope = unpack_pair(Element(), slopes[e]);
        sent[e] = pack_pair(Element(), x.x * slope.x, x.y * slope.y);
      }
      __syncwarp();
    }
    store_operand(rows, pair, sent);
    // Dropped ones do not meet V.
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float* x = e < 2 ? &left[2 * e] : &right[2 * e - 4];
      a[e] = ptx::pack_positive(Element(), x[0], x[1]);
    }
  }

  __device__ __forceinline__ static void store_operands(uint32_t rows, const Operands& a) {
#pragma unroll
    for (int n = 0; n < T::kSubQueries / 16; ++n) {
#pragma unroll
      for (int r = 0; r < T::kRowBlocks; ++r)
        store_operand(rows + r * kRowBlockBytes, n, a[n][r]);
    }
  }

  // Role 1: dK of tile t, and its dS^T for dQ.
  template <int kColumnBlocks>
  __device__ __forceinline__ void key_step(float (&dk)[T::kRowBlocks][kColumnBlocks][4],
                                           const Leaving& leaving,
                                           int t) {
    const int stage = t % T::kStages;
    constexpr int kEach = Pieces<1>::kPieces / T::kSubSteps;
    static_assert(kEach <= T::kHeadDimV / 16 && kEach % Pieces<1>::kPanels == 0);
    if (hidden(state.steps[t % 4])) {
      if (T::kDqOverScores && leaving.to != nullptr) leaving.add(0, 1);
      this->template load_next<1>(t);
      return;
    }
#pragma unroll 1
    for (int sub = 0; sub < T::kSubSteps; ++sub) {
      Scores dp;
      zero(dp);
      Pieces<1> next = this->template next_rows<1>(t, sub * kEach);
      const uint32_t values = smem + T::kKBytes, dout = smem + T::kDout + stage * T::kDoutBytes;
      if (T::kDqOverScores && leaving.to != nullptr) {
        add_scores<T::kHeadDimV>(dp, values, dout, first_query(sub), [&](int k) {
          if (k < kEach) next.issue(k);
          leaving.add(k, T::kHeadDimV / 16);
        });
      } else {
        add_scores<T::kHeadDimV>(dp, values, dout, first_query(sub), [&](int k) {
          if (T::kStages == 2 && k < kEach) next.issue(k);
        });
      }
      if (sub + 1 == T::kSubSteps) this->template finish_next<1>(t);
      Operands sent, a;
      receive(sent, t, sub);
      make_score_gradient(a, sent, dp, t, first_query(sub));
      store_operands(own_rows(ds_tile(t), first_query(sub)), a);
      if constexpr (T::kShareProbabilities) {
        ptx::barrier_sync(role_barrier(1), kGroupThreads / 2);
      }
      if (p.grad.dk.ptr != nullptr) {
        accumulate(dk, a, ds_tile(t), smem + T::kQ + stage * T::kQBytes, sub);
      }
    }
  }

  // P^T of a substep, from role 0.
  __device__ __forceinline__ void receive(Operands& sent, int t, int sub) const {
    ptx::barrier_sync(group_barrier(sub), kGroupThreads);
    const uint32_t rows = rows_operand(own_rows(sent_tile(t), first_query(sub)));
#pragma unroll
    for (int n = 0; n < T::kSubQueries / 16; ++n) {
#pragma unroll
      for (int r = 0; r < T::kRowBlocks; ++r)
        ptx::load_matrix_x4(sent[n][r], operand_at<0>(rows, n) + r * kRowBlockBytes);
    }
  }

  // dS^T = P^T (dP^T - delta) as A operands. On a tile that hides something, what has no weight has
  // no gradient, were dP infinite.
  __device__ __forceinline__ void make_score_gradient(
      Operands& ds, const Operands& sent, Scores& dp, int t, int query) const {
    float2 delta[T::kSubQueries / 8];
    load_statistics(delta, stats(t % T::kStages) + T::kStatBytes + query * 4);
    if ((kScore == Score::kGeneral && p.bias.ptr != nullptr) ||
        state.steps[t % 4].bits != QueryStep::kFull) {
#pragma unroll
      for (int e = 0; e < T::kRowBlocks * T::kSubQueries / 8 * 2; ++e) {
        const int r = e / 2 / (T::kSubQueries / 8), n = e / 2 % (T::kSubQueries / 8);
        const uint32_t pair = sent[n / 2][r][n % 2 * 2 + e % 2];
        if ((pair & 0x7fffu) == 0) dp[r][n][e % 2 * 2] = 0;
        if ((pair & 0x7fff0000u) == 0) dp[r][n][e % 2 * 2 + 1] = 0;
      }
    }
    if (drops()) {
      const float scale = grid.numbers.dropout_scale;
      score_gradients(ds, sent, dp, delta, [=](float prob, float x, float d) {
        return dropped_gradient(prob, x, d, scale);
      });
    } else {
      score_gradients(ds, sent, dp, delta,
                      [](float prob, float x, float d) { return prob * (x - d); });
    }
  }

  template <class Gradient>
  __device__ __forceinline__ static void score_gradients(Operands& ds,
                                                         const Operands& sent,
                                                         const Scores& dp,
                                                         const float2 (&delta)[T::kSubQueries / 8],
                                                         const Gradient& gradient) {
#pragma unroll
    for (int n = 0; n < T::kSubQueries / 8; ++n) {
#pragma unroll
      for (int r = 0; r < T::kRowBlocks; ++r) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 prob = unpack_pair(Element(), sent[n / 2][r][n % 2 * 2 + half]);
          const float* x = &dp[r][n][2 * half];
          ds[n / 2][r][n % 2 * 2 + half] = pack_pair(Element(), gradient(prob.x, x[0], delta[n].x),
                                                     gradient(prob.y, x[1], delta[n].y));
        }
      }
    }
  }

  // ---- all tiles, in one role

  template <int kRole>
  __device__ __forceinline__ void run() {
    constexpr int kDim = kRole == 0 ? T::kHeadDimV : T::kHeadDim;
    float acc[T::kRowBlocks][kDim / T::kDimWarps / 8][4] = {};
    if (state.steps[0].head >= 0) {
      this->load_stats(state.steps[0], 0);
      this->load_queries(state.steps[0], 0);
    }
    if (kRole == 1) this->wait_for_place();
    // Two loops, because what is held of the bias takes registers.
    if (kRole == 0 && kScore == Score::kGeneral && grid.by_lane) {
      run_tiles<kRole, HeldBias<T::kRowBlocks, T::kSubQueries / 8>>(acc);
    } else {
      run_tiles<kRole, NoHeldBias>(acc);
    }
    // V is read no more, nor K by the other warps of role 1.
    constexpr int kArrival = 3, kArriving = T::kRoleWarps * 32 + 32;
    if constexpr (kRole == 1) {
      ptx::barrier_sync(1 + kRole, T::kRoleWarps * 32);
      if (this->has_ring()) ptx::barrier_arrive(kArrival, kArriving);
    }
    this->template write<kRole>(acc);
    if (kRole == 0 && this->warp == 0 && this->has_ring()) {
      ptx::barrier_sync(kArrival, kArriving);
      if (threadIdx.x == 0) this->arrive();
    }
  }

  template <int kRole, class Held, int kColumnBlocks>
  __device__ __forceinline__ void run_tiles(float (&acc)[T::kRowBlocks][kColumnBlocks][4]) {
    Held bias;
    int t = 0;
    for (; state.steps[t % 4].head >= 0; ++t) {
      ptx::copy_async_wait<0>();
      barrier_all();
      this->remove_poison(t % T::kStages);
      if constexpr (kRole == 0) {
        value_step(acc, bias, t);
        if (!T::kQuickSteps && threadIdx.x == 0) this->advance(t + 2);
      } else {
        Leaving leaving;
        if constexpr (T::kDqSpread) {
          this->spread_query_step(leaving, t - 1);
        } else if (T::kStages == 2) {
          this->query_step(t - 1);
        }
        key_step(acc, leaving, t);
        if constexpr (T::kQuickSteps)
          if (threadIdx.x == T::kThreads - 32) state.quick_step(p, grid, t + 2);
      }
      if constexpr (T::kStages == 1) {
        barrier_all();
        const QueryStep& next = state.steps[(t + 1) % 4];
        if (next.head >= 0) {
          this->load_stats(next, 0);
          this->load_queries(next, 0);
        }
        if (kRole == 1) this->query_step(t);
      }
    }
    ptx::copy_async_wait<0>();
    barrier_all();
    if (kRole == 1 && T::kStages == 2) this->query_step(t - 1);
  }
};

}  // namespace flash_attn::sm80
