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

struct CudaCase {
  int batch, heads_q, heads_k, seqlen_q, seqlen_k;
  int group, splits;  // of tiles of 128 x 64 on 132 multiprocessors
};

void test_cuda_table() {
  const CudaCase cases[] = {
      {8, 16, 16, 2048, 2048, 1, 1},  // training: the tiles fill the device
      {1, 64, 8, 4096, 4096, 1, 1},   // whole tiles: packing the heads saves none
      {1, 64, 8, 1, 8192, 8, 16},     // decode: 8 tiles, 128 blocks
      {1, 32, 8, 1, 131072, 4, 16},   // the same
      {16, 64, 8, 1, 8192, 8, 1},     // 128 tiles are enough
      {1, 16, 16, 1, 320, 1, 1},      // five tiles of keys: not worth merging
      {1, 16, 16, 1, 1280, 1, 7},     // slices of three of the twenty tiles of keys
      {1, 8, 1, 100, 100, 8, 1},      // packing: 7 tiles instead of 8
      {1, 8, 1, 128, 100, 1, 1},      // and here none less
      {1, 1, 1, 1, 1 << 20, 1, 128},  // one tile for the whole device
      {0, 8, 8, 128, 4096, 1, 1},     // empty problems
      {2, 8, 8, 0, 4096, 1, 1},      {2, 0, 0, 128, 4096, 1, 1}, {2, 8, 8, 1, 0, 1, 1},
  };
  DeviceInfo device;
  device.arch = 90;
  device.sm_count = 132;
  for (const CudaCase& c : cases) {
    const AttnParams p = problem(c.batch, c.heads_q, c.heads_k, c.seqlen_q, c.seqlen_k);
    const int group = cuda_group(p, 128);
    CHECK_EQ(group, c.group, c.batch, c.heads_q, c.heads_k, c.seqlen_q, c.seqlen_k);
    CHECK_EQ(cuda_forward_splits(p, 128, 64, group, 1, device), c.splits, c.batch, c.heads_q,
             c.heads_k, c.seqlen_q, c.seqlen_k);
  }
}

// What the host knows of ragged lengths, windows and lists is a bound or a mean.
void test_cuda_bounds() {
  DeviceInfo device;
  device.sm_count = 132;
  const int32_t some = 0;
  const int64_t seed = 0;

  AttnParams packed = problem(64, 32, 8, 64, 64 * 4096);  // 64 sequences of one query
  packed.seq_q.cu_seqlens = packed.seq_k.cu_seqlens = &some;
  packed.seq_q.total = 64;
  packed.seq_k.total = 64 * 4096;
  CHECK_EQ(cuda_group(packed, 128), 4);
  CHECK_EQ(cuda_forward_tasks(packed, 128, 4), 64 * 8);
  CHECK_EQ(cuda_forward_splits(packed, 128, 64, 4, 1, device), 1);
  packed.batch = 2;  // of 32 queries each
  CHECK_EQ(cuda_group(packed, 128), 4);
  CHECK_EQ(cuda_forward_tasks(packed, 128, 4), 2 * 8);
  CHECK_EQ(cuda_forward_splits(packed, 128, 64, 4, 1, device), 8);

  AttnParams decode = problem(1, 64, 8, 1, 8192);
  CHECK_EQ(cuda_forward_splits(decode, 128, 64, 8, 2, device), 32);  // two blocks side by side
  decode.seqlen_q = 16;                                              // whole tiles: one alone
  CHECK_EQ(cuda_forward_splits(decode, 128, 64, 8, 2, device), 16);
  decode.seqlen_q = 1;
  decode.dropout.philox = &seed;
  CHECK_EQ(cuda_group(decode, 128), 1);
  decode.dropout.philox = nullptr;
  decode.mask.window_right = 0;
  CHECK_EQ(cuda_forward_splits(decode, 128, 64, 8, 1, device), 16);
  decode.mask.window_left = 128;  // three tiles of keys are left
  CHECK_EQ(cuda_forward_splits(decode, 128, 64, 8, 1, device), 1);
  decode.mask.window_left = kUnlimited;
  decode.pages.table = &some;  // the pages hold less than the table could name
  decode.pages.page_size = 16;
  decode.pages.num_pages = 10;
  CHECK_EQ(cuda_forward_splits(decode, 128, 64, 8, 1, device), 1);
  decode.pages.table = nullptr;
  decode.mask.blocks.index = &some;
  decode.mask.blocks.width = 2;
  decode.mask.block_k = 128;
  CHECK_EQ(cuda_group(decode, 128), 1);
  CHECK_EQ(cuda_forward_splits(decode, 128, 64, 1, 1, device), 1);

  for (int heads = 1; heads < 200; ++heads) {
    for (int tiles = 0; tiles < 300; tiles += 7) {
      const AttnParams p = problem(1, heads, heads, 100, tiles * 64);
      const int splits = cuda_forward_splits(p, 128, 64, 1, 1, device);
      CHECK(splits >= 1 && (splits == 1 || splits <= tiles), heads, tiles, splits);
      CHECK(splits == 1 || heads * splits <= 4 * 132, heads, tiles, splits);
    }
  }
}

void test_cuda_backward() {
  DeviceInfo device;
  device.sm_count = 132;
  const auto splits = [&](const AttnParams& p) { return cuda_backward_splits(p, 64, 128, device); };
  CHECK_EQ(splits(problem(8, 16, 16, 2048, 2048)), 1);  // the tiles of keys fill the device
  CHECK_EQ(splits(problem(1, 2, 2, 2048, 2048)), 4);    // 32 tiles of keys
  CHECK_EQ(splits(problem(1, 8, 1, 8192, 128)), 128);   // one tile: 16 slices of each head
  CHECK_EQ(splits(problem(1, 3, 1, 8192, 128)), 96);    // 32, of four steps
  CHECK_EQ(splits(problem(1, 66001, 1, 2, 5)), 132);    // of 500 heads
  CHECK_EQ(splits(problem(1, 5, 1, 64, 128)), 1);       // five steps
  CHECK_EQ(splits(problem(1, 8, 1, 64, 128)), 2);
  CHECK_EQ(splits(problem(1, 8, 8, 1, 128)), 1);     // a step a head
  CHECK_EQ(splits(problem(1, 1, 1, 1024, 128)), 4);  // of four steps
  CHECK_EQ(splits(problem(1, 1, 1, 0, 128)), 1);
  CHECK_EQ(splits(problem(0, 8, 8, 128, 128)), 1);
  CHECK_EQ(splits(problem(2, 0, 0, 128, 128)), 1);
  CHECK_EQ(splits(problem(2, 8, 8, 128, 0)), 1);
  AttnParams packed = problem(4, 2, 2, 4096, 4096);  // four sequences of 1,024
  const int32_t some = 0;
  packed.seq_q.cu_seqlens = packed.seq_k.cu_seqlens = &some;
  packed.seq_q.total = packed.seq_k.total = 4096;
  CHECK_EQ(splits(packed), 2);
}

}  // namespace

void test_split() {
  test_cuda_backward();
  test_cuda_table();
  test_cuda_bounds();
  test_balanced_table();
  test_balanced_bounds();
  test_passes();
}
