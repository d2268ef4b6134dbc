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

namespace {

// Rows of one sequence on the query side.
int64_t mean_queries(const AttnParams& p) {
  if (p.seq_q.cu_seqlens == nullptr) return p.seqlen_q;
  return ceil_div(p.seq_q.total, int64_t{max_of(p.batch, 1)});
}

int64_t sequence_tiles(const AttnParams& p, int block_m, int group) {
  return ceil_div(mean_queries(p) * group, int64_t{block_m});
}

// Keys that the rows of one tile can see at most, or see on average when keys are packed.
int64_t visible_keys(const AttnParams& p, int block_m, int group) {
  const MaskSpec& mask = p.mask;
  int64_t keys = p.seqlen_k;
  if (p.pages.table != nullptr) {
    keys = min_of(keys, int64_t{p.pages.page_size} * p.pages.num_pages);
  } else if (p.seq_k.cu_seqlens != nullptr) {
    keys = ceil_div(p.seq_k.total, int64_t{max_of(p.batch, 1)});
  }
  if (mask.window_left >= 0 && mask.window_right >= 0) {
    const int64_t positions = ceil_div(block_m, group);
    keys = min_of(keys, int64_t{mask.window_left} + mask.window_right + positions);
  }
  if (mask.blocks.index != nullptr) {
    keys = min_of(keys, int64_t{mask.blocks.width} * mask.block_k);
  }
  return keys;
}

}  // namespace

int cuda_group(const AttnParams& p, int block_m) {
  const int group = p.heads_k > 0 ? p.group_size() : 1;
  if (group <= 1 || p.mask.blocks.index != nullptr || p.dropout.philox != nullptr) return 1;
  const int64_t apart = sequence_tiles(p, block_m, 1) * group;
  return 10 * sequence_tiles(p, block_m, group) <= 9 * apart ? group : 1;
}

int64_t cuda_forward_tasks(const AttnParams& p, int block_m, int group) {
  return sequence_tiles(p, block_m, group) * p.batch * (p.heads_q / group);
}

int cuda_forward_splits(const AttnParams& p,
                        int block_m,
                        int block_n,
                        int group,
                        int resident,
                        const DeviceInfo& device) {
  // Costs in steps over a tile of keys, from decoding on an H200: starting a block; writing a
  // partial result; the merging kernel and each slice that it reads.
  constexpr double kBlock = 3, kPartial = 2, kMerge = 4, kSlice = 0.1;
  constexpr int64_t kMostSplits = 128, kMostRounds = 4;
  const int64_t tasks = cuda_forward_tasks(p, block_m, group);
  const int64_t tiles = ceil_div(visible_keys(p, block_m, group), int64_t{block_n});
  const int64_t sms = max_of(device.sm_count, 1), limit = min_of(tiles, kMostSplits);
  if (tasks == 0 || 10 * tasks >= 8 * sms) return 1;
  const bool few_rows = 2 * mean_queries(p) * group <= block_m;
  const int64_t places = few_rows ? sms * resident : sms;
  int64_t best = 1;
  double best_time = static_cast<double>(tiles) + kBlock;
  for (int64_t rounds = 1; rounds <= kMostRounds; ++rounds) {  // as many as fill them
    const int64_t most = min_of(rounds * places / tasks, limit);
    if (most <= 1) continue;
    const int64_t each = ceil_div(tiles, most), splits = ceil_div(tiles, each);
    const double time =
        static_cast<double>(rounds) * (static_cast<double>(each) + kBlock + kPartial) + kMerge +
        kSlice * static_cast<double>(splits);
    if (time < best_time) {
      best = splits;
      best_time = time;
    }
  }
  return static_cast<int>(best);
}

int cuda_backward_splits(const AttnParams& p, int block_m, int block_n, const DeviceInfo& device) {
  constexpr int64_t kLeastSteps = 4;
  const bool packed = p.seq_k.cu_seqlens != nullptr;
  const int64_t keys =
      packed ? ceil_div(p.seq_k.total, int64_t{max_of(p.batch, 1)}) : int64_t{p.seqlen_k};
  const int64_t tasks = ceil_div(keys, int64_t{block_n}) * p.batch * p.heads_k;
  if (tasks == 0) return 1;
  const int64_t tiles = sequence_tiles(p, block_m, 1), group = p.group_size();
  int64_t splits = min_of(device.sm_count / tasks, tiles * group / kLeastSteps);
  if (splits > group) splits = splits / group * group;
  return static_cast<int>(max_of(int64_t{1}, splits));
}

}  // namespace flash_attn
