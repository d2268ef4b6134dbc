// SPDX-License-Identifier: BSD-3-Clause
#include "cpu/rotary.h"

#include <vector>

namespace flash_attn::cpu {

namespace {

template <class Elem>
struct Job {
  const RotaryParams* p;
  int workers;
  std::vector<AccumulatorOf<Elem>> angles;  // (workers, 2 * half)
};

// One worker's share of the (batch, row)s.
template <class Elem>
void work(int worker, void* context) {
  Job<Elem>& job = *static_cast<Job<Elem>*>(context);
  const RotaryParams& p = *job.p;
  auto* angles = job.angles.data() + int64_t{worker} * 2 * p.tables.half;
  const RowRange range = rows_of_worker(int64_t{p.batch} * p.seqlen, job.workers, worker);
  for (int64_t r = range.begin; r < range.end; ++r) {
    const int64_t batch = r / p.seqlen, i = r % p.seqlen;
    load_angles(angles, p.tables, p.offsets[batch] + (p.per_row ? i : 0));
    const Elem* src = static_cast<const Elem*>(p.x.ptr) + batch * p.x.batch + i * p.x.row;
    Elem* dst = static_cast<Elem*>(p.out.ptr) + batch * p.out.batch + i * p.out.row;
    for (int h = 0; h < p.heads; ++h) {
      rotate_row(dst + h * p.out.head, 1, src + h * p.x.head, p.head_dim, p.tables, angles);
    }
  }
}

}  // namespace

void rotary(const RotaryParams& p, int workers, ParallelFor parallel_for) {
  with_element(p.dtype, [&](auto element) {
    using Elem = decltype(element);
    Job<Elem> job{&p, 1, {}};
    job.workers =
        useful_workers(int64_t{p.batch} * p.seqlen, int64_t{p.heads} * p.head_dim, workers);
    job.angles.resize(int64_t{job.workers} * 2 * p.tables.half);
    parallel_for(job.workers, work<Elem>, &job);
  });
}

}  // namespace flash_attn::cpu
