// SPDX-License-Identifier: BSD-3-Clause
// Backward attention on the CPU by recomputation from the inputs, out and lse. Panels as in
// forward.h: query rows in the lanes, scores transposed.
//
//   1 delta = rowsum(out * dout) - dlse                             for every row
//   2 for each unit (key head, slice of the key tiles), each key tile:  pack K, V
//   3   for each panel of queries that sees it:  pack Q, dO and their transposes
//   4     P^T = 2^(scale K Q^T - lse);  dP^T = V dO^T;  dS^T = P^T (dP^T - delta)
//   5     dV += P^T dO;  dK += dS^T Q;  dQ^T += K^T dS^T
//   6   dK, dV of the tile;  after the last tile dQ, or its partial sum when the keys are split
//   7 sums over the splits (dQ, dslopes), dsinks
//
// Whatever several units would add to is kept apart and summed in a fixed order, so the same call
// gives the same bits. A bias gradient that broadcasts over batch or heads makes one unit of what
// it sums over.
#pragma once

#include "cpu/forward.h"

namespace flash_attn::cpu {

template <class Arch, class Number, class Elem>
class Backward {
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

    Scratch(Carver& c, const AttnParams& p, int block_m, int block_n, bool own_dq) {
      const Widths w(p);
      const int64_t n = round_up(block_n, 16);
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

  struct Job {
    const AttnParams* p;
    const Plan* plan;
    char* workspace;
    Acc* dq_partial;  // (splits, batch, heads_q) slots of (dq, kPanel), when the keys are split
    double* slopes_partial;       // (splits, batch, heads_q), when slopes need a gradient
    bool all_batches, all_heads;  // what one unit covers
    std::atomic<int64_t> next{0};
    int64_t tasks = 0;
    void (*task)(const Job&, const Scratch&, int64_t index) = nullptr;
  };

  // What one unit works on at a time: the query heads of `rows` against one key head.
  struct Head {
    int batch, head_k, split;
    SeqInfo seq;
    Mask mask;
    Acc* dq;  // slots of the group's first head
  };

  struct KeyTile {
    int begin, end;
  };

 public:
  static int64_t worker_bytes(const AttnParams& p, int block_m, int block_n) {
    Carver c(nullptr);
    Scratch(c, p, block_m, block_n, true);
    return c.used();
  }

  static int64_t shared_bytes(const AttnParams& p, int block_m, int num_splits) {
    Carver c(nullptr);
    Job job;
    carve_shared(c, p, block_m, num_splits, job);
    return c.used();
  }

  static void run(const AttnParams& p,
                  const Plan& plan,
                  void* workspace,
                  ParallelFor parallel_for) {
    Job job;
    job.p = &p;
    job.plan = &plan;
    job.workspace = static_cast<char*>(workspace);
    Carver shared(job.workspace + plan.worker_bytes * plan.workers);
    carve_shared(shared, p, plan.block_m, plan.num_splits, job);
    job.all_batches = p.grad.dbias != nullptr && p.grad.dbias_batch == 0;
    job.all_heads = p.grad.dbias != nullptr && p.grad.dbias_head == 0;
    if (job.slopes_partial != nullptr) {
      for (int64_t e = 0; e < int64_t{plan.num_splits} * p.batch * p.heads_q; ++e)
        job.slopes_partial[e] = 0;
    }
    const int64_t pairs = int64_t{p.batch} * p.heads_q;
    phase(job, delta, pairs * ceil_div(p.seqlen_q, kDeltaRows), parallel_for);
    phase(
        job, unit,
        int64_t{job.all_batches ? 1 : p.batch} * (job.all_heads ? 1 : p.heads_k) * plan.num_splits,
        parallel_for);
    if (job.dq_partial != nullptr) phase(job, sum_dq, pairs, parallel_for);
    if (p.grad.dsinks != nullptr) phase(job, sum_sinks, p.heads_q, parallel_for);
    if (job.slopes_partial != nullptr) sum_slopes(job);
  }

 private:
  static constexpr int kDeltaRows = 1024;

  static void carve_shared(Carver& c, const AttnParams& p, int block_m, int num_splits, Job& job) {
    const int64_t pairs = int64_t{num_splits} * p.batch * p.heads_q;
    const bool partial = num_splits > 1 && p.grad.dq.ptr != nullptr;
    job.dq_partial =
        partial ? c.take<Acc>(pairs * slots(p, block_m) * Widths(p).dq * kPanel) : nullptr;
    job.slopes_partial = p.grad.dslopes != nullptr ? c.take<double>(pairs) : nullptr;
  }

  static void phase(Job& job,
                    void (*task)(const Job&, const Scratch&, int64_t),
                    int64_t tasks,
                    ParallelFor parallel_for) {
    job.next = 0;
    job.tasks = tasks;
    job.task = task;
    parallel_for(job.plan->workers, work, &job);
  }

  static void work(int worker, void* context) {
    Job& job = *static_cast<Job*>(context);
    Carver carver(job.workspace + worker * job.plan->worker_bytes);
    const Scratch scratch(carver, *job.p, job.plan->block_m, job.plan->block_n,
                          job.plan->num_splits == 1);
    for (int64_t t; (t = job.next.fetch_add(1, std::memory_order_relaxed)) < job.tasks;)
      job.task(job, scratch, t);
  }

  // ---- 1: delta

  static void delta(const Job& job, const Scratch&, int64_t index) {
    const AttnParams& p = *job.p;
    const int chunks = ceil_div(p.seqlen_q, kDeltaRows);
    const int first = static_cast<int>(index % chunks) * kDeltaRows;
    const int head = static_cast<int>(index / chunks % p.heads_q);
    const SeqInfo seq(p, static_cast<int>(index / chunks / p.heads_q));
    for (int i = first; i < min_of(first + kDeltaRows, seq.q_len); ++i) {
      const Elem* out = static_cast<const Elem*>(p.out.ptr) + seq.q_offset(p.out, i, head);
      const Elem* dout =
          static_cast<const Elem*>(p.grad.dout.ptr) + seq.q_offset(p.grad.dout, i, head);
      Acc sum = 0;
      for (int c = 0; c < p.head_dim_v; ++c)
        sum += to_float(out[c]) * to_float(dout[c]);
      const int64_t at = seq.lse_offset(p, head, i);
      if (p.grad.dlse != nullptr) sum -= static_cast<const Acc*>(p.grad.dlse)[at];
      // Without a key every weight is 0, whatever dlse of an infinite lse may be.
      const bool empty =
          static_cast<const Acc*>(p.lse)[at] == -std::numeric_limits<Acc>::infinity();
      static_cast<Acc*>(p.grad.delta)[at] = empty ? 0 : sum;
    }
  }

  // ---- 2: units

  static void unit(const Job& job, const Scratch& scratch, int64_t index) {
    const AttnParams& p = *job.p;
    const int split = static_cast<int>(index % job.plan->num_splits);
    const int64_t rest = index / job.plan->num_splits;
    const int heads = job.all_heads ? 1 : p.heads_k;
    const int batch = static_cast<int>(rest / heads), head = static_cast<int>(rest % heads);
    for (int b = job.all_batches ? 0 : batch; b < (job.all_batches ? p.batch : batch + 1); ++b) {
      for (int h = job.all_heads ? 0 : head; h < (job.all_heads ? p.heads_k : head + 1); ++h)
        key_head(job, scratch, b, h, split);
    }
  }

  static int64_t slot_size(const AttnParams& p) { return int64_t{Widths(p).dq} * kPanel; }

  static void key_head(const Job& job, const Scratch& scratch, int batch, int head_k, int split) {
    const AttnParams& p = *job.p;
    const SeqInfo seq(p, batch);
    Head head{batch, head_k, split, seq, Mask(p.mask, seq), scratch.dq};
    const int64_t head_slots = slots(p, job.plan->block_m), group = p.group_size();
    if (job.dq_partial != nullptr) {
      head.dq = job.dq_partial + ((int64_t{split} * p.batch + batch) * p.heads_q + head_k * group) *
                                     head_slots * slot_size(p);
    }
    if (head.dq != nullptr) {
      for (int64_t e = 0; e < group * head_slots * slot_size(p); ++e)
        head.dq[e] = 0;
    }
    // Splits take turns, so that each has its share of the long columns of a causal mask.
    const int block_n = job.plan->block_n;
    for (int n = split; n * block_n < seq.k_len; n += job.plan->num_splits)
      key_tile(job, scratch, head, {n * block_n, min_of((n + 1) * block_n, seq.k_len)});
    if (head.dq != nullptr && job.dq_partial == nullptr) {
      for (int g = 0; g < group; ++g)
        write_dq(job, scratch, seq, static_cast<int>(head_k * group) + g,
                 head.dq + g * head_slots * slot_size(p), 1, 0);
    }
  }

  static void key_tile(const Job& job,
                       const Scratch& scratch,
                       const Head& head,
                       const KeyTile& tile) {
    const AttnParams& p = *job.p;
    const Widths w(p);
    const int count = tile.end - tile.begin, padded = round_up(count, S::kRows);
    pack_keys(scratch.k, head, p.k, p.head_dim, w.q, tile, padded);
    pack_keys(scratch.v, head, p.v, p.head_dim_v, w.v, tile, padded);
    if constexpr (kPairs)
      interleave_rows<Arch>(scratch.k_pairs, scratch.k, padded, w.q, p.head_dim, w.q_wide);
    const int64_t n = round_up(job.plan->block_n, 16);
    for (int64_t e = 0; e < n * w.q_wide; ++e)
      scratch.dk[e] = 0;
    for (int64_t e = 0; e < n * w.v_wide; ++e)
      scratch.dv[e] = 0;

    const int group = p.group_size(), block_m = job.plan->block_m;
    const int tile_slots = ceil_div(block_m, kPanel);
    for (int g = 0; g < group; ++g) {
      const int query_head = head.head_k * group + g;
      Acc* dq = head.dq == nullptr ? nullptr : head.dq + g * slots(p, block_m) * slot_size(p);
      QTiles tiles(p, head.seq, head.batch, query_head, tile.begin, tile.end, block_m);
      for (QTile t; tiles.next(t);) {
        const int end = min_of((t.m + 1) * block_m, head.seq.q_len);
        for (int i = t.m * block_m, slot = t.m * tile_slots; i < end; i += kPanel, ++slot) {
          const Lanes lanes(PackedRows(1, query_head), i, min_of(kPanel, end - i));
          KeySpan seen = key_span(head.mask, lanes.first, lanes.last, tile.begin, tile.end);
          if (seen.begin >= seen.end) continue;
          panel_step(job, scratch, head, lanes, tile.begin, seen,
                     dq == nullptr ? nullptr : dq + slot * slot_size(p));
        }
      }
    }
    if (p.grad.dk.ptr != nullptr)
      write_keys(p.grad.dk, head, tile, scratch.dk, n, p.head_dim, p.softmax_scale);
    if (p.grad.dv.ptr != nullptr) write_keys(p.grad.dv, head, tile, scratch.dv, n, p.head_dim_v, 1);
  }

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

  static void pack_queries(const Head& head,
                           const Lanes& lanes,
                           const TensorRef& t,
                           int dim,
                           int ld,
                           int wide,
                           Unit* rows_dst,
                           Unit* transposed,
                           Unit* pairs) {
    const Elem* rows[kPanel];
    for (int r = 0; r < lanes.count; ++r) {
      const int i = static_cast<int>(lanes.position[r]);
      rows[r] = static_cast<const Elem*>(t.ptr) + head.seq.q_offset(t, i, lanes.head[r]);
    }
    pack_rows<Arch, Number>(rows_dst, rows, lanes.count, kPanel, dim, ld);
    transpose_panel<Arch, Number>(transposed, rows_dst, units_of<Number>(dim), ld);
    if constexpr (kPairs) interleave_rows<Arch>(pairs, rows_dst, kPanel, ld, dim, wide);
  }

  // ---- 3 to 5: one panel of queries against the keys `seen` of a packed tile that begins at
  // `base`

  static void panel_step(const Job& job,
                         const Scratch& scratch,
                         const Head& head,
                         const Lanes& lanes,
                         int base,
                         const KeySpan& seen,
                         Acc* dq) {
    const AttnParams& p = *job.p;
    const Widths w(p);
    pack_queries(head, lanes, p.q, p.head_dim, w.q, w.q_wide, scratch.q, scratch.qt,
                 scratch.q_pairs);
    pack_queries(head, lanes, p.grad.dout, p.head_dim_v, w.v, w.v_wide, scratch.o, scratch.ot,
                 scratch.o_pairs);
    const int skip = (seen.begin - base) / S::kRows * S::kRows;
    const int key = base + skip, keys = round_up(seen.end - key, S::kRows);
    probabilities(p, scratch, head, lanes, seen, skip, key, keys);
    gemm<Arch, Number>(keys, units_of<Number>(p.head_dim_v), scratch.v + int64_t{skip} * w.v, w.v,
                       1, scratch.ot, kPanel, scratch.dp, StoreScaled{1.0});
    if (scratch.keep != nullptr) {
      dropout_tile(scratch.keep, p, lanes, head.batch, key, keys);
      drop(p, scratch, keys);
    }
    const int n = round_up(job.plan->block_n, 16);
    if (p.grad.dv.ptr != nullptr) {
      if constexpr (kPairs) pack_lane_pairs<Arch>(scratch.p_lanes, scratch.dropped, keys);
      accumulate_keys(keys, scratch.p_lanes, scratch.o_pairs, w.v_wide, scratch.dv, n, skip);
    }
    score_gradient(p, scratch, head, lanes, keys);
    feature_gradients(job, scratch, head, lanes, key, keys, seen.end);
    if constexpr (kPairs) pack_lane_pairs<Arch>(scratch.ds_lanes, scratch.dp, keys);
    if (p.grad.dk.ptr != nullptr)
      accumulate_keys(keys, scratch.ds_lanes, scratch.q_pairs, w.q_wide, scratch.dk, n, skip);
    if (dq != nullptr) {
      if constexpr (kPairs) pack_key_pairs<Arch>(scratch.ds_keys, scratch.dp, keys);
      gemm<Arch, Number>(round_up(p.head_dim, S::kRows), keys / Number::kPair,
                         scratch.k_pairs + int64_t{skip} / Number::kPair * w.q_wide, 1, w.q_wide,
                         scratch.ds_keys, kPanel, dq, Accumulate{});
    }
  }

  // scratch.s <- P^T = 2^(S^T - lse); scratch.slope with softcap.
  static void probabilities(const AttnParams& p,
                            const Scratch& scratch,
                            const Head& head,
                            const Lanes& lanes,
                            const KeySpan& seen,
                            int skip,
                            int key,
                            int keys) {
    const bool general = has_features(p);
    const int ld = Widths(p).q;
    gemm<Arch, Number>(keys, units_of<Number>(p.head_dim), scratch.k + int64_t{skip} * ld, ld, 1,
                       scratch.qt, kPanel, scratch.s,
                       StoreScaled{p.softmax_scale * (general ? 1.0 : kLog2e)});
    if (general) {
      apply_features<Arch, Number>(scratch.s, scratch.slope, scratch.bias, p, head.mask, lanes,
                                   head.batch, key, keys, seen.end);
    }
    if (!seen.full || key != seen.begin || key + keys != seen.end)
      apply_mask(scratch.s, head.mask, lanes, seen, nullptr, key, keys);
    const Acc* lse = static_cast<const Acc*>(p.lse);
    for (int v = 0; v < Arch::kVectors; ++v) {
      V base;
      for (int l = 0; l < S::kLane; ++l) {
        const int lane = v * S::kLane + l;
        const Acc x =
            lse[head.seq.lse_offset(p, lanes.head[lane], static_cast<int>(lanes.position[lane]))];
        // Lanes past the end and rows without a key: every weight is 2^(-inf) = 0.
        const bool none = lane >= lanes.count || x == -std::numeric_limits<Acc>::infinity();
        base[l] = none ? std::numeric_limits<Acc>::infinity() : x * static_cast<Acc>(kLog2e);
      }
      for (int r = 0; r < keys; ++r) {
        Acc* at = scratch.s + r * kPanel + v * S::kLane;
        store(at, vexp2<Number::kDegree>(load<V>(at) - base));
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

  // scratch.dp <- dS^T = P^T * (dP^T - delta), the gradient of the biased scores.
  static void score_gradient(
      const AttnParams& p, const Scratch& scratch, const Head& head, const Lanes& lanes, int keys) {
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
        store(scratch.dp + at, load<V>(scratch.s + at) * (load<V>(scratch.dp + at) - delta));
      }
    }
  }

  // dbias and dslopes from dS^T, then dS^T through the softcap.
  static void feature_gradients(const Job& job,
                                const Scratch& scratch,
                                const Head& head,
                                const Lanes& lanes,
                                int key,
                                int keys,
                                int end) {
    const AttnParams& p = *job.p;
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
      job.slopes_partial[(int64_t{head.split} * p.batch + head.batch) * p.heads_q +
                         lanes.head[0]] += sum;
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
    for (int l = 0; l < lanes.count; ++l) {
      Acc* to = static_cast<Acc*>(g.dbias) + head.batch * g.dbias_batch +
                lanes.head[l] * g.dbias_head + lanes.position[l] * g.dbias_row + key * g.dbias_col;
      const Acc* from = scratch.bias.rows + int64_t{l} * ld;
      for (int r = 0; r < end - key; ++r)
        to[r * g.dbias_col] += from[r];
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

  static void write_keys(const TensorRef& t,
                         const Head& head,
                         const KeyTile& tile,
                         const Acc* accumulators,
                         int64_t n,
                         int dim,
                         double factor) {
    for (int r = 0; r < tile.end - tile.begin; ++r) {
      Elem* to = static_cast<Elem*>(t.ptr) + head.seq.k_offset(t, tile.begin + r, head.head_k);
      for (int c = 0; c < dim; ++c) {
        const Acc x = accumulators[c / kPanel * n * kPanel + r * kPanel + c % kPanel];
        to[c] = narrow<Elem>(x * static_cast<Acc>(factor));
      }
    }
  }

  // ---- 6, 7: dQ of one query head, from the accumulators of its splits, `stride` apart

  static void write_dq(const Job& job,
                       const Scratch& scratch,
                       const SeqInfo& seq,
                       int head,
                       Acc* dq,
                       int splits,
                       int64_t stride) {
    const AttnParams& p = *job.p;
    const int block_m = job.plan->block_m, ld = Widths(p).q_wide;
    for (int m = 0; m * block_m < seq.q_len; ++m) {
      const int end = min_of((m + 1) * block_m, seq.q_len);
      for (int i = m * block_m, slot = m * ceil_div(block_m, kPanel); i < end;
           i += kPanel, ++slot) {
        Acc* sum = dq + slot * slot_size(p);
        for (int s = 1; s < splits; ++s) {
          for (int64_t e = 0; e < slot_size(p); ++e)
            sum[e] += sum[s * stride + e];
        }
        transpose_to_rows<Arch, Number>(scratch.rows, sum, p.head_dim, ld);
        for (int r = 0; r < min_of(kPanel, end - i); ++r) {
          Elem* to = static_cast<Elem*>(p.grad.dq.ptr) + seq.q_offset(p.grad.dq, i + r, head);
          for (int c = 0; c < p.head_dim; ++c)
            to[c] = narrow<Elem>(scratch.rows[r * ld + c] * static_cast<Acc>(p.softmax_scale));
        }
      }
    }
  }

  static void sum_dq(const Job& job, const Scratch& scratch, int64_t index) {
    const AttnParams& p = *job.p;
    const int64_t size = slots(p, job.plan->block_m) * slot_size(p);
    const SeqInfo seq(p, static_cast<int>(index / p.heads_q));
    write_dq(job, scratch, seq, static_cast<int>(index % p.heads_q), job.dq_partial + index * size,
             job.plan->num_splits, int64_t{p.batch} * p.heads_q * size);
  }

  // dsink = sum over rows of p_sink * (dlse - rowsum(out * dout)) = -sum p_sink * delta.
  static void sum_sinks(const Job& job, const Scratch&, int64_t head) {
    const AttnParams& p = *job.p;
    const double sink = static_cast<const Acc*>(p.sinks.ptr)[head];
    double sum = 0;
    for (int b = 0; b < p.batch; ++b) {
      const SeqInfo seq(p, b);
      for (int i = 0; i < seq.q_len; ++i) {
        const int64_t at = seq.lse_offset(p, static_cast<int>(head), i);
        const double lse = static_cast<const Acc*>(p.lse)[at];
        if (lse != -INFINITY)
          sum -= std::exp(sink - lse) * static_cast<const Acc*>(p.grad.delta)[at];
      }
    }
    static_cast<Acc*>(p.grad.dsinks)[head] = static_cast<Acc>(sum);
  }

  static void sum_slopes(const Job& job) {
    const AttnParams& p = *job.p;
    float* slopes = static_cast<float*>(p.grad.dslopes);
    const int lines = p.alibi.batch == 0 ? 1 : p.batch;
    for (int64_t at = 0; at < int64_t{lines} * p.heads_q; ++at) {
      double sum = 0;
      for (int s = 0; s < job.plan->num_splits; ++s) {
        for (int b = 0; b < (lines == 1 ? p.batch : 1); ++b) {
          sum += job.slopes_partial[(int64_t{s} * p.batch + b) * p.heads_q + at];
        }
      }
      slopes[at] = static_cast<float>(sum);
    }
  }
};

}  // namespace flash_attn::cpu
