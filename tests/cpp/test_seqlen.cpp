// SPDX-License-Identifier: BSD-3-Clause
// SeqInfo: the good cases by hand, then arrays full of nonsense, which must not leave the room
// there is.
#include <climits>
#include <vector>

#include "check.h"
#include "core/seqlen.h"

using namespace flash_attn;

static AttnParams dense(int batch, int seqlen_q, int seqlen_k) {
  AttnParams p;
  p.batch = batch;
  p.seqlen_q = seqlen_q;
  p.seqlen_k = seqlen_k;
  p.heads_q = 4;
  p.heads_k = 2;
  p.q = {nullptr, 1000000, 1000, 10};
  p.k = {nullptr, 2000000, 2000, 20};
  return p;
}

static void test_dense() {
  const AttnParams p = dense(3, 7, 9);
  const SeqInfo s(p, 2);
  CHECK_EQ(s.q_len, 7);
  CHECK_EQ(s.k_len, 9);
  CHECK_EQ(s.k_first, 0);
  CHECK_EQ(s.q_offset(p.q, 3, 1), 2003010);
  CHECK_EQ(s.k_offset(p.k, 3, 1), 4006020);
  CHECK_EQ(s.lse_offset(p, 3, 5), (2 * 4 + 3) * 7 + 5);
}

static void test_packed() {
  AttnParams p = dense(3, 5, 6);
  p.q.batch = p.k.batch = 0;
  const std::vector<int32_t> cu_q = {0, 3, 3, 8}, cu_k = {0, 0, 6, 7};
  p.seq_q = {cu_q.data(), nullptr, nullptr, nullptr, 10, 0};
  p.seq_k = {cu_k.data(), nullptr, nullptr, nullptr, 7, 0};
  const int q_len[] = {3, 0, 5}, k_len[] = {0, 6, 1};
  for (int b = 0; b < 3; ++b) {
    const SeqInfo s(p, b);
    CHECK_EQ(s.q_len, q_len[b]);
    CHECK_EQ(s.k_len, k_len[b]);
    CHECK_EQ(s.q_row, cu_q[b]);
    CHECK_EQ(s.k_row, cu_k[b]);
    CHECK_EQ(s.q_batch, 0);
    CHECK_EQ(s.k_batch, 0);
    CHECK_EQ(s.q_offset(p.q, 1, 2), (cu_q[b] + 1) * 1000 + 20);
    CHECK_EQ(s.k_offset(p.k, 1, 1), (cu_k[b] + 1) * 2000 + 20);
    CHECK_EQ(s.lse_offset(p, 2, 1), 2 * 10 + cu_q[b] + 1);
  }
}

static void test_cache() {
  AttnParams p = dense(3, 1, 16);
  const std::vector<int32_t> used = {4, 16, 9}, pad = {0, 5, 9}, entry = {6, 0, 3};
  p.seq_k.used = used.data();
  p.seq_k.leftpad = pad.data();
  p.seq_k.cache_batch_idx = entry.data();
  p.seq_k.entries = 7;
  for (int b = 0; b < 3; ++b) {
    const SeqInfo s(p, b);
    CHECK_EQ(s.k_len, used[b]);
    CHECK_EQ(s.k_first, pad[b]);
    CHECK_EQ(s.k_batch, entry[b]);
    CHECK_EQ(s.q_batch, b);
    CHECK_EQ(s.k_offset(p.k, 2, 1), entry[b] * int64_t{2000000} + 4020);
  }
  p.seq_k.entries = 6;  // entry 6 does not exist: no keys, and an index that does
  CHECK_EQ(SeqInfo(p, 0).k_len, 0);
  CHECK_EQ(SeqInfo(p, 0).k_batch, 0);
}

static void test_pages() {
  AttnParams p = dense(2, 1, 12);
  const std::vector<int32_t> table(8, 0), used = {5, 40}, cu_k = {0, 7, 9};
  p.pages = {table.data(), 4, 3, 4, 1};
  p.seq_k.used = used.data();
  CHECK_EQ(SeqInfo(p, 0).k_len, 5);
  CHECK_EQ(SeqInfo(p, 1).k_len, 12);
  CHECK_EQ(SeqInfo(p, 1).k_batch, 0);
  p.seq_k.used = nullptr;
  CHECK_EQ(SeqInfo(p, 0).k_len, 12);
  p.seq_k.cu_seqlens = cu_k.data();  // lengths of a paged cache as prefix sums: no row offset
  CHECK_EQ(SeqInfo(p, 0).k_len, 7);
  CHECK_EQ(SeqInfo(p, 1).k_len, 2);
  CHECK_EQ(SeqInfo(p, 1).k_row, 0);
  p.pages.page_size = p.pages.max_pages = INT_MAX;  // the product must not overflow
  CHECK_EQ(SeqInfo(p, 0).k_len, 7);
}

// Every combination of bad entries: lengths stay non-negative, rows inside the tensors.
static void test_nonsense() {
  const int32_t values[] = {INT_MIN, -5, -1, 0, 1, 3, 8, 9, 1000, INT_MAX};
  for (int features = 0; features < 8; ++features) {
    for (int32_t a : values) {
      for (int32_t b : values) {
        for (int32_t c : values) {
          AttnParams p = dense(1, 6, 7);
          const int32_t cu[] = {a, b};
          const int32_t table[] = {0, 0};
          if (features & 1) p.seq_q = {cu, nullptr, nullptr, nullptr, 8, 0};
          p.seq_k.cu_seqlens = features & 2 ? cu : nullptr;
          p.seq_k.total = features & 2 ? 8 : 0;
          p.seq_k.used = &c;
          p.seq_k.leftpad = &a;
          if (features & 4) {
            p.pages = {table, 2, 2, 2, 1};
          } else if (!(features & 2)) {
            p.seq_k.cache_batch_idx = &b;
            p.seq_k.entries = 4;
          }
          const SeqInfo s(p, 0);
          CHECK(s.q_len >= 0 && s.q_len <= 6, a, b, c, features, s.q_len);
          CHECK(s.k_len >= 0 && s.k_len <= (features & 4 ? 4 : 7), a, b, c, features, s.k_len);
          CHECK(s.k_first >= 0 && s.k_first <= s.k_len, a, b, c, features, s.k_first);
          CHECK(s.q_row >= 0 && s.q_row + s.q_len <= (features & 1 ? 8 : 6), a, b, c, features);
          CHECK(s.k_row >= 0 && s.k_row + s.k_len <= (features & 2 ? 8 : 7), a, b, c, features);
          CHECK(s.k_batch >= 0 && s.k_batch < 4, a, b, c, features, s.k_batch);
        }
      }
    }
  }
}

void test_seqlen() {
  test_dense();
  test_packed();
  test_cache();
  test_pages();
  test_nonsense();
}
