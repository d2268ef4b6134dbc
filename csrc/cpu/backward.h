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

#include "cpu/backward_step.h"

namespace flash_attn::cpu {

template <class Arch, class Number, class Elem>
class Backward {
  using Step = BackwardStep<Arch, Number, Elem>;
  using Acc = typename Step::Acc;
  using Head = typename Step::Head;
  using KeyTile = typename Step::KeyTile;
  using Statistics = typename Step::Statistics;
  using Lanes = typename Step::Lanes;
  using Scratch = typename Step::Scratch;
  using Widths = typename Step::Widths;
  static constexpr int kPanel = Step::kPanel;

  struct Job {
    const AttnParams* p;
    const Plan* plan;
    char* workspace;
    Acc* dq_partial;  // (splits, batch, heads_q) slots of (dq, kPanel), when the keys are split
    double* slopes_partial;       // (splits, batch, heads_q), when slopes need a gradient
    bool all_batches, all_heads;  // what one unit covers
    Statistics statistics;        // valid when `large`: an lse beyond kLargeLse was seen
    mutable std::atomic<bool> large{false};
    std::atomic<int64_t> next{0};
    int64_t tasks = 0;
    void (*task)(const Job&, const Scratch&, int64_t index) = nullptr;
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
    if (job.large) phase(job, statistics, pairs * ceil_div(p.seqlen_q, plan.block_m), parallel_for);
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
  // From here on rounding lse costs the weights more than 2^-12 in fp32.
  static constexpr double kLargeLse = 4096;

  static void carve_shared(Carver& c, const AttnParams& p, int block_m, int num_splits, Job& job) {
    const int64_t pairs = int64_t{num_splits} * p.batch * p.heads_q;
    const bool partial = num_splits > 1 && p.grad.dq.ptr != nullptr;
    job.dq_partial =
        partial ? c.take<Acc>(pairs * Step::slots(p, block_m) * Widths(p).dq * kPanel) : nullptr;
    const int64_t rows = lse_rows(p);
    job.statistics = {c.take<Acc>(rows), c.take<Acc>(rows)};
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
      const bool empty = Step::is_empty(p, seq, head, i);
      static_cast<Acc*>(p.grad.delta)[at] = empty ? 0 : sum;
      if (!empty && std::abs(static_cast<const Acc*>(p.lse)[at]) > kLargeLse) job.large = true;
    }
  }

  // m and 1 / l of the rows of one query tile of one head, as the forward pass had them.
  static void statistics(const Job& job, const Scratch& scratch, int64_t index) {
    const AttnParams& p = *job.p;
    const int tiles = ceil_div(p.seqlen_q, job.plan->block_m);
    const int begin = static_cast<int>(index % tiles) * job.plan->block_m;
    const int query_head = static_cast<int>(index / tiles % p.heads_q);
    const int batch = static_cast<int>(index / tiles / p.heads_q);
    const SeqInfo seq(p, batch);
    const Head head{batch, query_head / p.group_size(), 0, seq, Mask(p.mask, seq), nullptr, nullptr,
                    {}};
    const int end = min_of(begin + job.plan->block_m, seq.q_len);
    for (int i = begin; i < end; i += kPanel) {
      const Lanes lanes(PackedRows(1, query_head), i, min_of(kPanel, end - i));
      Acc m[kPanel], l[kPanel], alpha[kPanel];
      for (int lane = 0; lane < kPanel; ++lane)
        m[lane] = -std::numeric_limits<Acc>::infinity(), l[lane] = 0;
      KvTiles walk(p, seq, batch, query_head, begin, end, job.plan->block_n);
      for (KvTile t; walk.next(t);) {
        const int key = t.n * job.plan->block_n;
        const KeyTile tile{key, min_of(key + job.plan->block_n, seq.k_len)};
        Step::scores_of(p, scratch, head, lanes, tile, t.bits, [&](int keys) {
          online_softmax<Arch, Number>(scratch.s, m, l, alpha, keys);
        });
      }
      for (int lane = 0; lane < lanes.count; ++lane) {
        const double sink =
            p.sinks.ptr != nullptr ? static_cast<const Acc*>(p.sinks.ptr)[query_head] : -INFINITY;
        const double most = max_of(static_cast<double>(m[lane]), sink);
        const double sum = l[lane] * std::exp(m[lane] - most) + std::exp(sink - most);
        const int64_t at = seq.lse_offset(p, query_head, i + lane);
        job.statistics.m[at] = static_cast<Acc>(most);
        job.statistics.weight[at] = static_cast<Acc>(sum > 0 ? 1 / sum : 1);
      }
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
    Head head{batch,
              head_k,
              split,
              seq,
              Mask(p.mask, seq),
              scratch.dq,
              nullptr,
              job.large ? job.statistics : Statistics{}};
    const int64_t head_slots = Step::slots(p, job.plan->block_m), group = p.group_size();
    if (job.dq_partial != nullptr) {
      head.dq = job.dq_partial + ((int64_t{split} * p.batch + batch) * p.heads_q + head_k * group) *
                                     head_slots * slot_size(p);
    }
    if (job.slopes_partial != nullptr)
      head.slopes = job.slopes_partial + (int64_t{split} * p.batch + batch) * p.heads_q;
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
    const int count = tile.end - tile.begin, padded = round_up(count, Shape<Arch, Number>::kRows);
    Step::pack_keys(scratch.k, head, p.k, p.head_dim, w.q, tile, padded);
    Step::pack_keys(scratch.v, head, p.v, p.head_dim_v, w.v, tile, padded);
    if constexpr (Number::kPair == 2)
      interleave_rows<Arch>(scratch.k_pairs, scratch.k, padded, w.q, p.head_dim, w.q_wide);
    for (int64_t e = 0; e < scratch.n * w.q_wide; ++e)
      scratch.dk[e] = 0;
    for (int64_t e = 0; e < scratch.n * w.v_wide; ++e)
      scratch.dv[e] = 0;

    const int group = p.group_size(), block_m = job.plan->block_m;
    const int tile_slots = ceil_div(block_m, kPanel);
    for (int g = 0; g < group; ++g) {
      const int query_head = head.head_k * group + g;
      Acc* dq = head.dq == nullptr ? nullptr : head.dq + g * Step::slots(p, block_m) * slot_size(p);
      QTiles tiles(p, head.seq, head.batch, query_head, tile.begin, tile.end, block_m);
      for (QTile t; tiles.next(t);) {
        const int end = min_of((t.m + 1) * block_m, head.seq.q_len);
        for (int i = t.m * block_m, slot = t.m * tile_slots; i < end; i += kPanel, ++slot) {
          const Lanes lanes(PackedRows(1, query_head), i, min_of(kPanel, end - i));
          KeySpan seen = key_span(head.mask, lanes.first, lanes.last, tile.begin, tile.end, t.bits);
          if (seen.begin >= seen.end) continue;
          Step::panel_step(p, scratch, head, lanes, tile.begin, seen,
                           dq == nullptr ? nullptr : dq + slot * slot_size(p));
        }
      }
    }
    if (p.grad.dk.ptr != nullptr)
      write_keys(p.grad.dk, head, tile, scratch.dk, scratch.n, p.head_dim, p.softmax_scale);
    if (p.grad.dv.ptr != nullptr)
      write_keys(p.grad.dv, head, tile, scratch.dv, scratch.n, p.head_dim_v, 1);
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
    const int64_t size = Step::slots(p, job.plan->block_m) * slot_size(p);
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
