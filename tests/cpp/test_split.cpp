// SPDX-License-Identifier: BSD-3-Clause
// The split heuristics as tables, their bounds for every small case, and the sizes of what is
// shared.
#include "check.h"
#include "plan/split.h"

using namespace flash_attn;

namespace {

AttnParams problem(int batch, int heads_q, int heads_k, int seqlen_q, int seqlen_k) {
  AttnParams p;
  p.batch = batch;
  p.heads_q = heads_q;
  p.heads_k = heads_k;
  p.seqlen_q = seqlen_q;
  p.seqlen_k = seqlen_k;
  p.head_dim = 64;
  p.head_dim_v = 32;
  return p;
}

DeviceInfo threads(int n) {
  DeviceInfo device;
  device.sm_count = n;
  return device;
}

void test_balanced_table() {
  struct Case {
    int tasks, workers, most, splits;
  };
  const Case cases[] = {
      {1, 1, 100, 1},                     // one worker has nothing to share
      {1, 2, 100, 2},                     // one decode step on two cores
      {1, 96, 100, 96},                   // and on 96
      {1, 96, 7, 7},                      // not more than there are keys for
      {1, 96, 0, 1},                      // short sequences stay whole
      {2, 4, 100, 2},                     // 2 x 2
      {3, 4, 100, 4},                     // 12 slices, three rounds of a quarter
      {4, 4, 100, 1},                     // full
      {5, 4, 100, 4},                     // 20 slices in 5 rounds, not 2 rounds of wholes
      {8, 4, 100, 1},                     // enough to balance themselves
      {1000, 4, 100, 1}, {0, 4, 100, 1},  // an empty problem
  };
  for (const Case& c : cases) {
    CHECK_EQ(balanced_splits(c.tasks, c.workers, c.most), c.splits, c.tasks, c.workers, c.most);
  }
}

void test_balanced_bounds() {
  for (int tasks = 0; tasks < 40; ++tasks) {
    for (int workers = 1; workers < 20; ++workers) {
      for (int most = 0; most < 30; ++most) {
        const int splits = balanced_splits(tasks, workers, most);
        CHECK(splits >= 1 && (splits <= most || splits == 1), tasks, workers, most, splits);
        if (workers == 1) CHECK_EQ(splits, 1);
        if (tasks == 0) continue;
        // Never slower than not splitting, in rounds of slices.
        const double whole = ceil_div(tasks, workers);
        CHECK(ceil_div(tasks * splits, workers) / double(splits) <= whole, tasks, workers, splits);
      }
    }
  }
}

void test_passes() {
  // Decode: the eight query heads of a key head are one task.
  AttnParams decode = problem(1, 32, 4, 1, 65536);
  CHECK_EQ(forward_tasks(decode, 16), 4);
  CHECK_EQ(forward_splits(decode, 16, 128, threads(4)), 1);
  CHECK_EQ(forward_splits(decode, 16, 128, threads(16)), 4);
  decode.seqlen_k = 600;  // two slices of at least 256 keys
  CHECK_EQ(forward_splits(decode, 16, 128, threads(16)), 2);
  CHECK_EQ(forward_splits(decode, 16, 512, threads(16)), 1);  // a slice is at least a tile
  const int32_t none = 0;
  decode.mask.blocks.index = &none;  // with a block mask every query head has its own tiles
  CHECK_EQ(forward_tasks(decode, 16), 32);

  AttnParams train = problem(2, 8, 2, 4096, 4096);
  CHECK_EQ(forward_tasks(train, 64), 2 * 2 * 4096 * 4 / 64);
  CHECK_EQ(forward_splits(train, 64, 128, threads(64)), 1);
  CHECK_EQ(backward_tasks(train), 4);
  CHECK_EQ(backward_splits(train, 128, threads(2)), 1);
  CHECK_EQ(backward_splits(train, 128, threads(8)), 2);
  float dbias = 0;
  train.grad.dbias = &dbias;
  train.grad.dbias_batch = train.grad.dbias_head = 1;
  CHECK_EQ(backward_splits(train, 128, threads(8)), 1);  // the bias is one column
  train.grad.dbias_col = 1;
  CHECK_EQ(backward_splits(train, 128, threads(8)), 2);
  train.grad.dbias_head = 0;  // the heads add to one gradient: they are one piece
  CHECK_EQ(backward_tasks(train), 2);
  train.grad.dbias_batch = 0;
  CHECK_EQ(backward_tasks(train), 1);
  CHECK_EQ(backward_splits(train, 128, threads(8)), 8);

  for (int zero = 0; zero < 4; ++zero) {  // empty problems
    AttnParams p = problem(zero != 0, zero != 1, 1, zero != 2, zero != 3);
    CHECK_EQ(forward_splits(p, 64, 64, threads(8)), 1, zero);
    CHECK_EQ(backward_splits(p, 64, threads(8)), 1, zero);
  }
}

}  // namespace

void test_split() {
  test_balanced_table();
  test_balanced_bounds();
  test_passes();
}
