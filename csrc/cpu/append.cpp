// SPDX-License-Identifier: BSD-3-Clause
#include "cpu/append.h"

#include <vector>

#include "core/pages.h"

namespace flash_attn::cpu {

namespace {

template <class Elem>
struct Job {
  const AppendParams* p;
  int workers;
  std::vector<AccumulatorOf<Elem>> angles;  // (workers, 2 * half)
};

template <class Elem>
void copy_row(Elem* dst, int64_t stride, const Elem* src, int dim) {
  for (int c = 0; c < dim; ++c) {
    dst[c * stride] = src[c];
  }
}

// Element offset of `slot` in a cache; kNoRow without a page.
int64_t slot_offset(const AppendParams& p, const TensorRef& cache, int batch, int slot) {
  if (p.pages.table == nullptr) {
    const int64_t entry = p.cache_batch_idx != nullptr ? p.cache_batch_idx[batch] : batch;
    return entry * cache.batch + slot * cache.row;
  }
  const int64_t page = page_of(p.pages, batch, slot);
  return page == kNoRow ? kNoRow : page * cache.batch + slot % p.pages.page_size * cache.row;
}

// One worker's share of the (batch, new row)s.
template <class Elem>
void work(int worker, void* context) {
  Job<Elem>& job = *static_cast<Job<Elem>*>(context);
  const AppendParams& p = *job.p;
  auto* angles = job.angles.data() + int64_t{worker} * 2 * p.rotary.half;
  const RowRange range = rows_of_worker(int64_t{p.batch} * p.seqlen_new, job.workers, worker);
  for (int64_t r = range.begin; r < range.end; ++r) {
    const int batch = static_cast<int>(r / p.seqlen_new), i = static_cast<int>(r % p.seqlen_new);
    // A padding sequence may have any length, that of no slot included.
    const int64_t slot = int64_t{p.cache_seqlens[batch]} + i;
    if (slot < 0 || slot > INT32_MAX) continue;
    const int64_t k_at = slot_offset(p, p.k_cache, batch, static_cast<int>(slot));
    if (k_at == kNoRow) continue;
    const int64_t v_at = slot_offset(p, p.v_cache, batch, static_cast<int>(slot));
    if (p.rotary.cos != nullptr) load_angles(angles, p.rotary, slot);
    const Elem* k = static_cast<const Elem*>(p.k.ptr) + batch * p.k.batch + i * p.k.row;
    const Elem* v = static_cast<const Elem*>(p.v.ptr) + batch * p.v.batch + i * p.v.row;
    Elem* k_to = static_cast<Elem*>(p.k_cache.ptr) + k_at;
    Elem* v_to = static_cast<Elem*>(p.v_cache.ptr) + v_at;
    for (int h = 0; h < p.heads; ++h) {
      Elem* to = k_to + h * p.k_cache.head;
      if (p.rotary.cos != nullptr) {
        rotate_row(to, p.k_stride, k + h * p.k.head, p.head_dim, p.rotary, angles);
      } else {
        copy_row(to, p.k_stride, k + h * p.k.head, p.head_dim);
      }
      copy_row(v_to + h * p.v_cache.head, p.v_stride, v + h * p.v.head, p.head_dim_v);
    }
  }
}

}  // namespace

void append_kv(const AppendParams& p, int workers, ParallelFor parallel_for) {
  with_element(p.dtype, [&](auto element) {
    using Elem = decltype(element);
    Job<Elem> job{&p, 1, {}};
    job.workers = useful_workers(int64_t{p.batch} * p.seqlen_new,
                                 int64_t{p.heads} * (p.head_dim + p.head_dim_v), workers);
    job.angles.resize(int64_t{job.workers} * 2 * p.rotary.half);
    parallel_for(job.workers, work<Elem>, &job);
  });
}

}  // namespace flash_attn::cpu
