// SPDX-License-Identifier: BSD-3-Clause
// Forward attention on the CPU, for one instruction set (Arch), arithmetic (Number) and storage
// (Elem).
//
// A task is block_m packed rows of one key head (all query heads of a group share a tile; with a
// block mask each query head has its own) and one split of the keys. Workers take tasks from a
// counter:
//
//   1 pack Q^T into panels of kPanel lanes
//   2 for each key tile that the mask leaves:  pack K, V
//   3   for each panel:  S^T = scale K Q^T  (keys, lanes);  features; mask
//   4                    m, l, P^T = exp(S^T - m)           down the lanes
//   5                    O^T = O^T * alpha + V^T P^T        (head_dim_v, lanes)
//   6 sinks; O / l, transposed back; out and lse, or a partial result when the keys are split
//   7 after all tasks: merge the splits (core/merge.h)
#pragma once

#include <algorithm>
#include <atomic>

#include "core/merge.h"
#include "core/tiles.h"
#include "cpu/dropout.h"
#include "cpu/few_rows.h"
#include "plan/plan.h"

namespace flash_attn::cpu {

constexpr int kMostKeys = 512;  // bound of block_n, for arrays of row pointers

template <class Arch, class Number, class Elem>
class Forward {
  using Acc = typename Number::Acc;
  using Unit = typename Number::Unit;
  using S = Shape<Arch, Number>;
  using V = typename S::V;
  using Lanes = Panel<Arch, Number>;
  static constexpr int kPanel = S::kPanel;

  struct Scratch {
    Unit *q, *qt;           // (block_m, q_ld) as rows; panels of (q_ld, kPanel)
    Unit *k, *v, *v_pairs;  // (block_n, q_ld); (block_n, v_ld); bf16: (block_n / 2, v_ld)
    Acc* s;                 // (block_n, kPanel) scores, then probabilities
    Unit* p;                // bf16: (block_n / 2, kPanel) probabilities in pairs
    Acc *o, *m, *l;         // panels of (v_ld, kPanel); (block_m,)
    Acc *alpha, *o_rows;    // (kPanel,); (kPanel, v_ld)
    BiasTile<Acc> bias;
    float* keep;  // (block_n, kPanel), with dropout
    FewRowsScratch<Acc> few;

    Scratch(Carver& c, const AttnParams& p, int block_m, int block_n) {
      const int64_t q_ld = Forward::q_ld(p), v_ld = Forward::v_ld(p);
      const int64_t n = round_up(block_n, 16);
      q = c.take<Unit>(kPanel * q_ld);
      qt = c.take<Unit>(block_m * q_ld);
      k = c.take<Unit>(n * q_ld);
      v = c.take<Unit>(n * v_ld);
      v_pairs = Number::kPair == 2 ? c.take<Unit>(n / 2 * v_ld) : v;
      s = c.take<Acc>(n * kPanel);
      this->p = Number::kPair == 2 ? c.take<Unit>(n / 2 * kPanel) : reinterpret_cast<Unit*>(s);
      o = c.take<Acc>(block_m * v_ld);
      m = c.take<Acc>(block_m);
      l = c.take<Acc>(block_m);
      alpha = c.take<Acc>(kPanel);
      o_rows = c.take<Acc>(kPanel * v_ld);
      bias.rows = p.bias.ptr != nullptr ? c.take<Acc>(n * kPanel) : nullptr;
      bias.transposed = p.bias.ptr != nullptr ? c.take<Acc>(n * kPanel) : nullptr;
      keep = p.dropout.philox != nullptr ? c.take<float>(n * kPanel) : nullptr;
      few = FewRowsScratch<Acc>(c, n, p.head_dim);
    }
  };

  // Rounded so that transposes and products run over whole vectors and rows.
  static int q_ld(const AttnParams& p) { return round_up(units_of<Number>(p.head_dim), 16); }
  static int v_ld(const AttnParams& p) { return round_up(p.head_dim_v, 16); }

  struct Job {
    const AttnParams* p;
    const Plan* plan;
    char* workspace;
    int group, heads, tiles;  // query heads in a task; tasks' heads; row tiles of a head
    std::atomic<int64_t> next{0};
    int64_t tasks, merge_rows;
    Acc *partial_out, *partial_lse;  // (splits, rows of lse, head_dim_v), (splits, rows of lse)
  };

  struct Task {
    int batch, split, begin, end;  // packed rows [begin, end)
    PackedRows rows;
  };

 public:
  static int64_t worker_bytes(const AttnParams& p, int block_m, int block_n) {
    Carver c(nullptr);
    Scratch(c, p, round_up(block_m, kPanel), block_n);
    return c.used();
  }

  // Partial out and lse of every split.
  static int64_t shared_bytes(const AttnParams& p, int, int num_splits) {
    if (num_splits == 1) return 0;
    return num_splits * lse_rows(p) * (p.head_dim_v + 1) * int64_t{sizeof(Acc)};
  }

  static void run(const AttnParams& p,
                  const Plan& plan,
                  void* workspace,
                  ParallelFor parallel_for) {
    Job job;
    job.p = &p;
    job.plan = &plan;
    job.workspace = static_cast<char*>(workspace);
    job.group = p.mask.blocks.index != nullptr ? 1 : p.group_size();
    job.heads = p.heads_q / job.group;
    job.tiles = static_cast<int>(ceil_div(int64_t{p.seqlen_q} * job.group, int64_t{plan.block_m}));
    job.tasks = int64_t{p.batch} * job.heads * job.tiles * plan.num_splits;
    if (plan.num_splits > 1) {
      job.merge_rows = lse_rows(p);
      job.partial_out = reinterpret_cast<Acc*>(job.workspace + plan.worker_bytes * plan.workers);
      job.partial_lse = job.partial_out + plan.num_splits * job.merge_rows * p.head_dim_v;
    }
    parallel_for(plan.workers, work, &job);
    if (plan.num_splits == 1) return;
    job.next = 0;
    job.tasks = int64_t{p.batch} * p.heads_q;
    parallel_for(plan.workers, merge, &job);
  }

 private:
  static void work(int worker, void* context) {
    Job& job = *static_cast<Job*>(context);
    Carver carver(job.workspace + worker * job.plan->worker_bytes);
    Scratch scratch(carver, *job.p, round_up(job.plan->block_m, kPanel), job.plan->block_n);
    for (int64_t t; (t = job.next.fetch_add(1, std::memory_order_relaxed)) < job.tasks;)
      attend(job, scratch, t);
  }

  // Row tiles of one head follow each other from the last, the longest under causal.
  static void attend(const Job& job, const Scratch& scratch, int64_t task_index) {
    const AttnParams& p = *job.p;
    const int split = static_cast<int>(task_index % job.plan->num_splits);
    int64_t rest = task_index / job.plan->num_splits;
    const int tile = job.tiles - 1 - static_cast<int>(rest % job.tiles);
    rest /= job.tiles;
    const int batch = static_cast<int>(rest / job.heads);
    Task task{batch, split, 0, 0, PackedRows(job.group, static_cast<int>(rest % job.heads))};
    const SeqInfo seq(p, batch);
    const int64_t rows = task.rows.rows(seq.q_len), begin = int64_t{tile} * job.plan->block_m;
    if (begin >= rows) return;
    task.begin = static_cast<int>(begin);
    task.end = static_cast<int>(min_of(begin + job.plan->block_m, rows));
    const int panels = ceil_div(task.end - task.begin, kPanel);
    start(p, scratch, seq, task, panels);

    const int head_k = task.rows.head_first / p.group_size();
    const int first = task.rows.position(task.begin), end = task.rows.position_end(task.end);
    const Mask mask(p.mask, seq);
    KvTiles tiles(p, seq, batch, task.rows.head_first, first, end, job.plan->block_n, split,
                  job.plan->num_splits);
    for (KvTile t; tiles.next(t);) {
      const int key_begin = t.n * job.plan->block_n;
      const int key_end = min_of(key_begin + job.plan->block_n, seq.k_len);
      step(p, scratch, seq, mask, task, head_k, panels,
           key_span(mask, first, end - 1, key_begin, key_end, t.bits));
    }
    for (int panel = 0; panel < panels; ++panel)
      finish(job, scratch, seq, task, panel);
  }

  static void start(const AttnParams& p,
                    const Scratch& scratch,
                    const SeqInfo& seq,
                    const Task& task,
                    int panels) {
    const Elem* rows[kPanel];
    const Elem* q = static_cast<const Elem*>(p.q.ptr);
    const bool few = few_rows(p, seq, task);
    for (int panel = 0; panel < panels; ++panel) {
      const int begin = task.begin + panel * kPanel, count = min_of(task.end - begin, kPanel);
      for (int r = 0; r < count; ++r)
        rows[r] = q + seq.q_offset(p.q, task.rows.position(begin + r), task.rows.head(begin + r));
      pack_rows<Arch, Number>(scratch.q, rows, count, few ? count : kPanel, p.head_dim, q_ld(p));
      if (few) break;  // its rows are one panel, and stay rows
      transpose_panel<Arch, Number>(scratch.qt + int64_t{panel} * kPanel * q_ld(p), scratch.q,
                                    units_of<Number>(p.head_dim), q_ld(p));
    }
    const int lanes = few ? task.end - task.begin : panels * kPanel;
    std::fill_n(few ? scratch.o_rows : scratch.o, int64_t{lanes} * v_ld(p), Acc(0));
    std::fill_n(scratch.m, lanes, -std::numeric_limits<Acc>::infinity());
    std::fill_n(scratch.l, lanes, Acc(0));
    if (few) scratch.few.clear(p.head_dim);
  }

  // Whether a head's rows go through few_rows.h: then their out lies in o_rows, not in a panel. The
  // sequence alone decides, whatever tiles the plan chose: a result does not depend on the batch.
  static bool few_rows(const AttnParams& p, const SeqInfo& seq, const Task& task) {
    return Number::kPair == 1 && task.rows.rows(seq.q_len) <= min_of(kFewRows, kPanel) &&
           seq.k_len >= kFewRowsLeastKeys && !has_features(p) && p.dropout.philox == nullptr &&
           p.mask.block_bits == nullptr;
  }

  // One key tile, cut to the keys [span.begin, span.end) that some row of the task may see.
  static void step(const AttnParams& p,
                   const Scratch& scratch,
                   const SeqInfo& seq,
                   const Mask& mask,
                   const Task& task,
                   int head_k,
                   int panels,
                   const KeySpan& span) {
    if (span.begin >= span.end) return;
    const Elem *k_rows[kMostKeys], *v_rows[kMostKeys];
    uint8_t missing[kMostKeys];
    const int count = span.end - span.begin, padded = round_up(count, S::kRows);
    bool some_missing = false;
    for (int r = 0; r < count; ++r) {
      const int64_t k_at = key_offset(p, seq, p.k, task.batch, span.begin + r, head_k);
      missing[r] = k_at == kNoRow;
      some_missing |= missing[r];
      k_rows[r] = missing[r] ? nullptr : static_cast<const Elem*>(p.k.ptr) + k_at;
      v_rows[r] = missing[r] ? nullptr
                             : static_cast<const Elem*>(p.v.ptr) +
                                   key_offset(p, seq, p.v, task.batch, span.begin + r, head_k);
    }
    if constexpr (Number::kPair == 1) {
      if (few_rows(p, seq, task)) {
        few_rows_step<Arch, Number>(p, mask, task.rows, task.begin, task.end - task.begin, span,
                                    k_rows, v_rows, scratch.q, q_ld(p), scratch.m, scratch.l,
                                    scratch.o_rows, v_ld(p), scratch.few);
        return;
      }
    }
    pack_rows<Arch, Number>(scratch.k, k_rows, count, padded, p.head_dim, q_ld(p));
    pack_rows<Arch, Number>(scratch.v, v_rows, count, padded, p.head_dim_v, v_ld(p));
    if constexpr (Number::kPair == 2)
      interleave_rows<Arch>(scratch.v_pairs, scratch.v, padded, v_ld(p), p.head_dim_v, v_ld(p));
    for (int panel = 0; panel < panels; ++panel) {
      const int begin = task.begin + panel * kPanel;
      const Lanes lanes(task.rows, begin, min_of(task.end - begin, kPanel));
      KeySpan seen = key_span(mask, lanes.first, lanes.last, span.begin, span.end, span.bits);
      if (seen.begin >= seen.end) continue;
      seen.full &= !some_missing;
      panel_step(p, scratch, mask, lanes, task.batch, panel, span.begin, seen, missing);
    }
  }

  // S^T, P^T and O^T of one panel. Packed keys start at `base`; `seen` of them count.
  static void panel_step(const AttnParams& p,
                         const Scratch& scratch,
                         const Mask& mask,
                         const Lanes& lanes,
                         int batch,
                         int panel,
                         int base,
                         const KeySpan& seen,
                         const uint8_t* missing) {
    const PackedSpan<Arch, Number> at(seen, base);
    panel_scores(scratch.s, nullptr, scratch.bias, p, mask, lanes, batch, seen, at, missing,
                 scratch.k, q_ld(p), scratch.qt + int64_t{panel} * kPanel * q_ld(p));
    online_softmax<Arch, Number>(scratch.s, scratch.m + panel * kPanel, scratch.l + panel * kPanel,
                                 scratch.alpha, at.keys);
    if (scratch.keep != nullptr) drop(p, scratch, lanes, batch, at.key, at.keys);
    if constexpr (Number::kPair == 2) pack_key_pairs<Arch>(scratch.p, scratch.s, at.keys);
    gemm<Arch, Number>(round_up(p.head_dim_v, S::kRows), at.keys / Number::kPair,
                       scratch.v_pairs + int64_t{at.skip} / Number::kPair * v_ld(p), 1, v_ld(p),
                       scratch.p, kPanel, scratch.o + int64_t{panel} * kPanel * v_ld(p),
                       Rescale<Acc>{scratch.alpha});
  }

  static void drop(const AttnParams& p,
                   const Scratch& scratch,
                   const Lanes& lanes,
                   int batch,
                   int key,
                   int keys) {
    dropout_tile(scratch.keep, p, lanes, batch, key, keys);
    for (int e = 0; e < keys * kPanel; ++e)
      scratch.s[e] *= static_cast<Acc>(scratch.keep[e]);
  }

  static void finish(
      const Job& job, const Scratch& scratch, const SeqInfo& seq, const Task& task, int panel) {
    const AttnParams& p = *job.p;
    const int begin = task.begin + panel * kPanel, count = min_of(task.end - begin, kPanel);
    if (!few_rows(p, seq, task)) {
      transpose_to_rows<Arch, Number>(scratch.o_rows, scratch.o + int64_t{panel} * kPanel * v_ld(p),
                                      p.head_dim_v, v_ld(p));
    }
    for (int r = 0; r < count; ++r) {
      const int i = task.rows.position(begin + r), head = task.rows.head(begin + r);
      double m = scratch.m[panel * kPanel + r], l = scratch.l[panel * kPanel + r];
      if (p.sinks.ptr != nullptr && task.split == 0) {
        const double sink = static_cast<const Acc*>(p.sinks.ptr)[head];
        const double most = max_of(m, sink);
        l = most == -INFINITY ? 0 : l * std::exp(m - most) + std::exp(sink - most);
        if (most != -INFINITY)
          scale_row(scratch.o_rows + r * v_ld(p), p.head_dim_v, std::exp(m - most));
        m = most;
      }
      const Acc* o = scratch.o_rows + r * v_ld(p);
      const int64_t at = seq.lse_offset(p, head, i);
      const Acc lse = static_cast<Acc>(l > 0 ? m + std::log(l) : l == 0 ? -INFINITY : l);
      const Acc factor = static_cast<Acc>(l == 0 ? 0 : p.dropout.scale / l);
      if (job.plan->num_splits > 1) {
        const int64_t slot = task.split * job.merge_rows + at;
        job.partial_lse[slot] = lse;
        for (int c = 0; c < p.head_dim_v; ++c)
          job.partial_out[slot * p.head_dim_v + c] = o[c] * factor;
        continue;
      }
      static_cast<Acc*>(p.lse)[at] = lse;
      Elem* out = static_cast<Elem*>(p.out.ptr) + seq.q_offset(p.out, i, head);
      for (int c = 0; c < p.head_dim_v; ++c)
        out[c] = narrow<Elem>(o[c] * factor);
    }
  }

  static void scale_row(Acc* row, int n, double factor) {
    for (int c = 0; c < n; ++c)
      row[c] *= static_cast<Acc>(factor);
  }

  // One (batch, query head) at a time: partial results of all splits -> out, lse.
  static void merge(int, void* context) {
    Job& job = *static_cast<Job*>(context);
    const AttnParams& p = *job.p;
    for (int64_t t; (t = job.next.fetch_add(1, std::memory_order_relaxed)) < job.tasks;) {
      const int head = static_cast<int>(t % p.heads_q);
      const SeqInfo seq(p, static_cast<int>(t / p.heads_q));
      for (int i = 0; i < seq.q_len; ++i)
        merge_row(job, seq, head, i);
    }
  }

  static void merge_row(const Job& job, const SeqInfo& seq, int head, int i) {
    const AttnParams& p = *job.p;
    const int64_t at = seq.lse_offset(p, head, i);
    Acc* sum = job.partial_out + at * p.head_dim_v;
    Acc lse = job.partial_lse[at];
    for (int split = 1; split < job.plan->num_splits; ++split) {
      const int64_t slot = split * job.merge_rows + at;
      const Acc* part = job.partial_out + slot * p.head_dim_v;
      const MergeWeights<Acc> w = merge_weights(lse, job.partial_lse[slot]);
      for (int c = 0; c < p.head_dim_v; ++c)
        sum[c] = merge_out(w, sum[c], part[c]);
      lse = w.lse;
    }
    static_cast<Acc*>(p.lse)[at] = lse;
    Elem* out = static_cast<Elem*>(p.out.ptr) + seq.q_offset(p.out, i, head);
    for (int c = 0; c < p.head_dim_v; ++c)
      out[c] = narrow<Elem>(sum[c]);
  }
};

}  // namespace flash_attn::cpu
