// SPDX-License-Identifier: BSD-3-Clause
// The inside of the backward pass: one panel of queries against one packed tile of keys (steps 3 to
// 5 of backward.h), and the scratch that a worker does it in.
#pragma once

#include "cpu/forward.h"

namespace flash_attn::cpu {

template <class Arch, class Number, class Elem>
struct BackwardStep {
  using Acc = typename Number::Acc;
  using Unit = typename Number::Unit;
  using S = Shape<Arch, Number>;
  using V = typename S::V;
  using Lanes = Panel<Arch, Number>;
  static constexpr int kPanel = S::kPanel;
  static constexpr bool kPairs = Number::kPair == 2;

  // Leading dimensions, in units: `ld` of packed rows, `wide` where the values themselves are
  // lanes.
  struct Widths {
    int q, v;            // rows as the inner side of a product
    int q_wide, v_wide;  // values in panels: as B, and of the accumulators of dK, dV
    int dq;              // rows of the accumulator of dQ^T

    explicit Widths(const AttnParams& p)
        : q_wide(round_up(p.head_dim, kPanel)),
          v_wide(round_up(p.head_dim_v, kPanel)),
          dq(round_up(p.head_dim, 16)) {
      q = kPairs ? round_up(q_wide / 2, 16) : q_wide;
      v = kPairs ? round_up(v_wide / 2, 16) : v_wide;
    }
  };

  struct Scratch {
    Unit *k, *v, *k_pairs;     // (block_n, q), (block_n, v); bf16: (block_n / 2, q_wide)
    Unit *q, *qt, *q_pairs;    // (kPanel, q), (q, kPanel); bf16: (kPanel / 2, q_wide)
    Unit *o, *ot, *o_pairs;    // the same of dout
    Acc *s, *dp;               // (block_n, kPanel): P^T; dP^T, then dS^T
    Acc *dropped, *slope;      // (block_n, kPanel): P^T after dropout; the softcap's derivative
    Unit *p_lanes, *ds_lanes;  // bf16: (block_n, kPanel / 2), pairs of queries
    Unit* ds_keys;             // bf16: (block_n / 2, kPanel), pairs of keys
    Acc *dk, *dv;              // panels of (block_n, kPanel)
    Acc* rows;                 // (kPanel, q_wide)
    Acc* dq;                   // slots of (dq, kPanel), when the keys are not split
    BiasTile<Acc> bias;
    float* keep;
    int64_t n;  // keys of a tile, rounded up

    Scratch(Carver& c, const AttnParams& p, int block_m, int block_n, bool own_dq)
        : n(round_up(block_n, 16)) {
      const Widths w(p);
      const bool bias_tiles = p.bias.ptr != nullptr;
      k = c.take<Unit>(n * w.q);
      v = c.take<Unit>(n * w.v);
      q = c.take<Unit>(kPanel * w.q);
      qt = c.take<Unit>(kPanel * w.q);
      o = c.take<Unit>(kPanel * w.v);
      ot = c.take<Unit>(kPanel * w.v);
      s = c.take<Acc>(n * kPanel);
      dp = c.take<Acc>(n * kPanel);
      dropped = p.dropout.philox != nullptr ? c.take<Acc>(n * kPanel) : s;
      slope = p.softcap > 0 ? c.take<Acc>(n * kPanel) : nullptr;
      k_pairs = kPairs ? c.take<Unit>(n / 2 * w.q_wide) : k;
      q_pairs = kPairs ? c.take<Unit>(kPanel / 2 * w.q_wide) : q;
      o_pairs = kPairs ? c.take<Unit>(kPanel / 2 * w.v_wide) : o;
      p_lanes = kPairs ? c.take<Unit>(n * kPanel / 2) : reinterpret_cast<Unit*>(dropped);
      ds_lanes = kPairs ? c.take<Unit>(n * kPanel / 2) : reinterpret_cast<Unit*>(dp);
      ds_keys = kPairs ? c.take<Unit>(n / 2 * kPanel) : reinterpret_cast<Unit*>(dp);
      dk = c.take<Acc>(n * w.q_wide);
      dv = c.take<Acc>(n * w.v_wide);
      rows = c.take<Acc>(kPanel * int64_t{w.q_wide});
      bias.rows = bias_tiles ? c.take<Acc>(n * kPanel) : nullptr;
      bias.transposed = bias_tiles ? c.take<Acc>(n * kPanel) : nullptr;
      keep = p.dropout.philox != nullptr ? c.take<float>(n * kPanel) : nullptr;
      dq = own_dq && p.grad.dq.ptr != nullptr
               ? c.take<Acc>(p.group_size() * slots(p, block_m) * w.dq * kPanel)
               : nullptr;
    }
  };

  // Panels of dQ^T for one query head: every query tile begins a new one.
  static int64_t slots(const AttnParams& p, int block_m) {
    return int64_t{ceil_div(p.seqlen_q, block_m)} * ceil_div(block_m, kPanel);
  }

  // An lse of some thousands no longer holds log(l) beside m in its digits. Then m and 1 / l of
  // every row are computed anew, in the layout of lse; else null.
  struct Statistics {
    Acc *m, *weight;
  };

  // What one unit works on at a time: a key head, and the query heads that read it.
  struct Head {
    int batch, head_k, split;
    SeqInfo seq;
    Mask mask;
    Acc* dq;         // slots of the group's first head; null when dq is not wanted
    double* slopes;  // (heads_q,) partial gradient of the slopes
    Statistics statistics;
  };

  struct KeyTile {
    int begin, end;
  };

  static void pack_keys(Unit* dst,
                        const Head& head,
                        const TensorRef& t,
                        int dim,
                        int ld,
                        const KeyTile& tile,
                        int padded) {
    const Elem* rows[kMostKeys];
    for (int r = 0; r < tile.end - tile.begin; ++r) {
      rows[r] = static_cast<const Elem*>(t.ptr) + head.seq.k_offset(t, tile.begin + r, head.head_k);
    }
    pack_rows<Arch, Number>(dst, rows, tile.end - tile.begin, padded, dim, ld);
  }

  // Whether a row saw nothing, no sink either.
  static bool is_empty(const AttnParams& p, const SeqInfo& seq, int head, int i) {
    return static_cast<const Acc*>(p.lse)[seq.lse_offset(p, head, i)] ==
           -std::numeric_limits<Acc>::infinity();
  }

  // Rows of q or dout in the forms that the products take. With `live`, rows that saw nothing are
  // zeros: their gradients are 0 whatever dout holds.
  static void pack_queries(const Head& head,
                           const Lanes& lanes,
                           const TensorRef& t,
                           int dim,
                           int ld,
                           int wide,
                           const AttnParams* live,
                           Unit* rows_dst,
                           Unit* transposed,
                           Unit* pairs) {
    const Elem* rows[kPanel];
    for (int r = 0; r < lanes.count; ++r) {
      const int i = static_cast<int>(lanes.position[r]);
      const bool skip = live != nullptr && is_empty(*live, head.seq, lanes.head[r], i);
      rows[r] =
          skip ? nullptr : static_cast<const Elem*>(t.ptr) + head.seq.q_offset(t, i, lanes.head[r]);
    }
    pack_rows<Arch, Number>(rows_dst, rows, lanes.count, kPanel, dim, ld);
    transpose_panel<Arch, Number>(transposed, rows_dst, units_of<Number>(dim), ld);
    if constexpr (kPairs) interleave_rows<Arch>(pairs, rows_dst, kPanel, ld, dim, wide);
  }

  // ---- 3 to 5: one panel of queries against the keys `seen` of a packed tile that begins at
  // `base`

  static void panel_step(const AttnParams& p,
                         const Scratch& scratch,
                         const Head& head,
                         const Lanes& lanes,
                         int base,
                         const KeySpan& seen,
                         Acc* dq) {
    const Widths w(p);
    pack_queries(head, lanes, p.q, p.head_dim, w.q, w.q_wide, nullptr, scratch.q, scratch.qt,
                 scratch.q_pairs);
    pack_queries(head, lanes, p.grad.dout, p.head_dim_v, w.v, w.v_wide, &p, scratch.o, scratch.ot,
                 scratch.o_pairs);
    const PackedSpan<Arch, Number> at(seen, base);
    const int skip = at.skip, key = at.key, keys = at.keys;
    scores(p, scratch, head, lanes, seen, at);
    probabilities(p, scratch, head, lanes, keys);
    gemm<Arch, Number>(keys, units_of<Number>(p.head_dim_v), scratch.v + int64_t{skip} * w.v, w.v,
                       1, scratch.ot, kPanel, scratch.dp, StoreScaled{1.0});
    if (scratch.keep != nullptr) {
      dropout_tile(scratch.keep, p, lanes, head.batch, key, keys);
      drop(p, scratch, keys);
    }
    if (p.grad.dv.ptr != nullptr) {
      if constexpr (kPairs) pack_lane_pairs<Arch>(scratch.p_lanes, scratch.dropped, keys);
      accumulate_keys(keys, scratch.p_lanes, scratch.o_pairs, w.v_wide, scratch.dv, scratch.n,
                      skip);
    }
    score_gradient(p, scratch, head, lanes, keys, !seen.full || p.bias.ptr != nullptr);
    feature_gradients(p, scratch, head, lanes, key, keys, seen.end);
    if constexpr (kPairs) pack_lane_pairs<Arch>(scratch.ds_lanes, scratch.dp, keys);
    if (p.grad.dk.ptr != nullptr)
      accumulate_keys(keys, scratch.ds_lanes, scratch.q_pairs, w.q_wide, scratch.dk, scratch.n,
                      skip);
    if (dq != nullptr) {
      if constexpr (kPairs) pack_key_pairs<Arch>(scratch.ds_keys, scratch.dp, keys);
      gemm<Arch, Number>(round_up(p.head_dim, S::kRows), keys / Number::kPair,
                         scratch.k_pairs + int64_t{skip} / Number::kPair * w.q_wide, 1, w.q_wide,
                         scratch.ds_keys, kPanel, dq, Accumulate{});
    }
  }

  // scratch.s <- S^T after features and mask; scratch.slope with softcap.
  static void scores(const AttnParams& p,
                     const Scratch& scratch,
                     const Head& head,
                     const Lanes& lanes,
                     const KeySpan& seen,
                     const PackedSpan<Arch, Number>& at) {
    panel_scores(scratch.s, scratch.slope, scratch.bias, p, head.mask, lanes, head.batch, seen, at,
                 nullptr, scratch.k, Widths(p).q, scratch.qt);
  }

  // Packs the keys of a tile and one panel of queries, and calls use(keys) with their scores in
  // scratch.s. bits: as in KeySpan.
  template <class Use>
  static void scores_of(const AttnParams& p,
                        const Scratch& scratch,
                        const Head& head,
                        const Lanes& lanes,
                        const KeyTile& tile,
                        int bits,
                        const Use& use) {
    const Widths w(p);
    const KeySpan seen = key_span(head.mask, lanes.first, lanes.last, tile.begin, tile.end, bits);
    if (seen.begin >= seen.end) return;
    pack_keys(scratch.k, head, p.k, p.head_dim, w.q, tile,
              round_up(tile.end - tile.begin, S::kRows));
    pack_queries(head, lanes, p.q, p.head_dim, w.q, w.q_wide, nullptr, scratch.q, scratch.qt,
                 scratch.q_pairs);
    const PackedSpan<Arch, Number> at(seen, tile.begin);
    scores(p, scratch, head, lanes, seen, at);
    use(at.keys);
  }

  // scratch.s <- P^T = exp(S^T - base) * weight: base is lse and the weight 1, or what `Statistics`
  // says.
  static void probabilities(
      const AttnParams& p, const Scratch& scratch, const Head& head, const Lanes& lanes, int keys) {
    constexpr Acc kInfinity = std::numeric_limits<Acc>::infinity();
    const Acc* lse = static_cast<const Acc*>(p.lse);
    for (int v = 0; v < Arch::kVectors; ++v) {
      V base, weight;
      for (int l = 0; l < S::kLane; ++l) {
        const int lane = v * S::kLane + l;
        const int64_t at =
            head.seq.lse_offset(p, lanes.head[lane], static_cast<int>(lanes.position[lane]));
        // Lanes past the end and rows without a key: every weight is exp(-inf) = 0.
        const bool none = lane >= lanes.count || lse[at] == -kInfinity;
        base[l] = none ? kInfinity : head.statistics.m ? head.statistics.m[at] : lse[at];
        weight[l] = head.statistics.m ? head.statistics.weight[at] : 1;
      }
      for (int r = 0; r < keys; ++r) {
        Acc* at = scratch.s + r * kPanel + v * S::kLane;
        store(at, vexp<Number::kDegree>(load<V>(at) - base) * weight);
      }
    }
  }

  // dropped = P * keep * scale and dP *= keep * scale.
  static void drop(const AttnParams& p, const Scratch& scratch, int keys) {
    for (int e = 0; e < keys * kPanel; ++e) {
      const Acc factor = static_cast<Acc>(scratch.keep[e] * p.dropout.scale);
      scratch.dropped[e] = scratch.s[e] * factor;
      scratch.dp[e] *= factor;
    }
  }

  // scratch.dp <- dS^T = P^T * (dP^T - delta), the gradient of the biased scores. With `hidden`
  // some weights are 0 for good, and their gradients too, even where dP overflows.
  static void score_gradient(const AttnParams& p,
                             const Scratch& scratch,
                             const Head& head,
                             const Lanes& lanes,
                             int keys,
                             bool hidden) {
    const Acc* deltas = static_cast<const Acc*>(p.grad.delta);
    for (int v = 0; v < Arch::kVectors; ++v) {
      V delta = {};
      for (int l = 0; l < S::kLane; ++l) {
        const int lane = v * S::kLane + l;
        delta[l] = deltas[head.seq.lse_offset(p, lanes.head[lane],
                                              static_cast<int>(lanes.position[lane]))];
      }
      for (int r = 0; r < keys; ++r) {
        const int64_t at = r * kPanel + v * S::kLane;
        const V weight = load<V>(scratch.s + at);
        const V ds = weight * (load<V>(scratch.dp + at) - delta);
        store(scratch.dp + at, hidden ? (weight == 0 ? V{} : ds) : ds);
      }
    }
  }

  // dbias and dslopes from dS^T, then dS^T through the softcap.
  static void feature_gradients(const AttnParams& p,
                                const Scratch& scratch,
                                const Head& head,
                                const Lanes& lanes,
                                int key,
                                int keys,
                                int end) {
    if (p.grad.dbias != nullptr) add_bias_gradient(p, scratch, head, lanes, key, keys, end);
    if (p.grad.dslopes != nullptr) {
      double sum = 0;
      const int d = head.mask.k_len - head.mask.q_len - key;
      for (int r = 0; r < keys; ++r) {
        for (int l = 0; l < lanes.count; ++l) {
          const int64_t away = lanes.position[l] + d - r;
          sum -= static_cast<double>(scratch.dp[r * kPanel + l]) * (away < 0 ? -away : away);
        }
      }
      head.slopes[lanes.head[0]] += sum;
    }
    if (scratch.slope == nullptr) return;
    for (int e = 0; e < keys * kPanel; ++e)
      scratch.dp[e] *= scratch.slope[e];
  }

  static void add_bias_gradient(const AttnParams& p,
                                const Scratch& scratch,
                                const Head& head,
                                const Lanes& lanes,
                                int key,
                                int keys,
                                int end) {
    using Plain = std::conditional_t<sizeof(Acc) == 8, F64, F32>;
    const int ld = round_up(keys, 16);
    transpose_to_rows<Arch, Plain>(scratch.bias.rows, scratch.dp, keys, ld);
    const Gradients& g = p.grad;
    const int live = end - key;
    // What the bias broadcasts over is summed in double before it meets the fp32 total.
    double sums[kMostKeys] = {};
    for (int l = 0; l < lanes.count; ++l) {
      const Acc* from = scratch.bias.rows + int64_t{l} * ld;
      for (int r = 0; r < live; ++r)
        sums[g.dbias_col == 0 ? 0 : r] += from[r];
      if (g.dbias_row == 0 && l + 1 < lanes.count) continue;
      Acc* to = static_cast<Acc*>(g.dbias) + head.batch * g.dbias_batch +
                lanes.head[l] * g.dbias_head + lanes.position[l] * g.dbias_row + key * g.dbias_col;
      for (int r = 0; r < (g.dbias_col == 0 ? 1 : live); ++r) {
        to[r] += static_cast<Acc>(sums[r]);
        sums[r] = 0;
      }
    }
  }

  // accumulators (panels of (n, kPanel)) of keys [skip, skip + keys) += A (keys, lanes) * B (lanes,
  // wide).
  static void accumulate_keys(
      int keys, const Unit* a, const Unit* b, int wide, Acc* accumulators, int n, int skip) {
    constexpr int kSteps = kPanel / Number::kPair;
    for (int c = 0; c < wide; c += kPanel) {
      gemm<Arch, Number>(keys, kSteps, a, kSteps, 1, b + c, wide,
                         accumulators + int64_t{c} * n + skip * kPanel, Accumulate{});
    }
  }
};

}  // namespace flash_attn::cpu
