// SPDX-License-Identifier: BSD-3-Clause
#include "plan/split.h"

namespace flash_attn {

namespace {

// A slice of fewer keys does not pay for starting a thread and merging: a few microseconds, the
// time of a decode step over about as many keys of one head.
constexpr int kLeastKeys = 256;

// What one more slice costs, in shares of the whole.
constexpr double kSliceCost = 0.03;

// Slices that still have kLeastKeys keys and a tile each.
int64_t most_splits(const AttnParams& p, int block_n) {
  return p.seqlen_k / max_of(kLeastKeys, block_n);
}

}  // namespace

int64_t forward_tasks(const AttnParams& p, int block_m) {
  if (p.heads_q == 0) return 0;
  const int group = p.mask.blocks.index != nullptr ? 1 : p.group_size();
  const int64_t tiles = ceil_div(int64_t{p.seqlen_q} * group, int64_t{block_m});
  return int64_t{p.batch} * (p.heads_q / group) * tiles;
}

int64_t backward_tasks(const AttnParams& p) {
  if (p.batch == 0) return 0;
  const bool all_batches = p.grad.dbias != nullptr && p.grad.dbias_batch == 0;
  const bool all_heads = p.grad.dbias != nullptr && p.grad.dbias_head == 0;
  return int64_t{all_batches ? 1 : p.batch} * (all_heads ? 1 : p.heads_k);
}

int balanced_splits(int64_t tasks, int workers, int64_t most) {
  if (tasks <= 0 || tasks >= 2 * int64_t{workers}) return 1;
  const int64_t limit = min_of(most, 2 * int64_t{workers});
  int best = 1;
  double best_time = 0;
  for (int splits = 1; splits <= limit || splits == 1; ++splits) {
    const int64_t rounds = ceil_div(tasks * splits, int64_t{workers});
    const double time = static_cast<double>(rounds) / splits * (1 + kSliceCost * (splits - 1));
    if (splits == 1 || time < best_time) {
      best = splits;
      best_time = time;
    }
  }
  return best;
}

int forward_splits(const AttnParams& p, int block_m, int block_n, const DeviceInfo& device) {
  return balanced_splits(forward_tasks(p, block_m), device.sm_count, most_splits(p, block_n));
}

int backward_splits(const AttnParams& p, int block_n, const DeviceInfo& device) {
  // Slices own their keys' columns of dbias; where the bias broadcasts over keys they would all add
  // to the same elements.
  if (p.grad.dbias != nullptr && p.grad.dbias_col == 0) return 1;
  return balanced_splits(backward_tasks(p), device.sm_count, most_splits(p, block_n));
}

}  // namespace flash_attn
