// SPDX-License-Identifier: BSD-3-Clause
#include "cpu/delta.h"

#include "cpu/elementwise.h"

namespace flash_attn::cpu {

namespace {

struct Job {
  const DeltaParams* p;
  int workers;
};

// One worker's share of the (batch, head, row)s.
template <class Elem>
void work(int worker, void* context) {
  using Acc = AccumulatorOf<Elem>;
  const Job& job = *static_cast<const Job*>(context);
  const DeltaParams& p = *job.p;
  const RowRange range = rows_of_worker(p.batch * p.heads * p.seqlen, job.workers, worker);
  for (int64_t r = range.begin; r < range.end; ++r) {
    const int64_t i = r % p.seqlen, head = r / p.seqlen % p.heads, batch = r / p.seqlen / p.heads;
    const Elem* out = static_cast<const Elem*>(p.out.ptr) + batch * p.out.batch + i * p.out.row +
                      head * p.out.head;
    const Elem* dout = static_cast<const Elem*>(p.dout.ptr) + batch * p.dout.batch +
                       i * p.dout.row + head * p.dout.head;
    Acc sum = 0;
    for (int64_t c = 0; c < p.head_dim; ++c)
      sum += static_cast<Acc>(to_float(out[c])) * to_float(dout[c]);
    static_cast<Acc*>(p.delta)[r] = sum;
  }
}

}  // namespace

void delta(const DeltaParams& p, int workers, ParallelFor parallel_for) {
  Job job{&p, useful_workers(p.batch * p.heads * p.seqlen, p.head_dim, workers)};
  with_element(p.dtype,
               [&](auto element) { parallel_for(job.workers, work<decltype(element)>, &job); });
}

}  // namespace flash_attn::cpu
