// SPDX-License-Identifier: BSD-3-Clause
// Where sequence `batch` begins and ends: the one place that reads cu_seqlens, seqused, left
// padding and the cache's batch index. Dense, packed, cached and paged problems look alike from
// here on.
//
// Whatever stands in those arrays (on a GPU nobody has checked them), lengths come out non-negative
// and inside the room there is, so nothing built on them leaves its tensor:
//   packed   rows [cu[b], cu[b+1]) cut to the total        paged   slots below max_pages *
//   page_size used     cut to the room of the sequence                both    lengths cut to
//   seqlen_q, seqlen_k an index of a cache entry that does not exist is a sequence without keys
#pragma once

#include "core/params.h"

namespace flash_attn {

template <class T>
FA_HD constexpr T clamp_to(T x, T low, T high) {
  return x < low ? low : (high < x ? high : x);
}

struct SeqInfo {
  int64_t q_row = 0,
          q_batch = 0;  // first row of a packed tensor; index to multiply by its batch stride
  int64_t k_row = 0,
          k_batch = 0;  // the same for keys; both 0 when paged (core/pages.h finds the row)
  int q_len = 0;
  int k_len = 0;    // end of the live slots; bottom-right alignment uses d = k_len - q_len
  int k_first = 0;  // first live slot (left padding): live keys are [k_first, k_len)

  FA_HD SeqInfo(const AttnParams& p, int batch) {
    if (p.seq_q.cu_seqlens != nullptr) {
      q_len = packed(p.seq_q, batch, p.seqlen_q, &q_row);
    } else {
      q_batch = batch;
      q_len = p.seqlen_q;
    }
    k_len = key_room(p, batch);
    if (p.seq_k.used != nullptr) k_len = clamp_to(int{p.seq_k.used[batch]}, 0, k_len);
    if (p.seq_k.leftpad != nullptr) k_first = clamp_to(int{p.seq_k.leftpad[batch]}, 0, k_len);
  }

  // Element offset of (query row i, head) in a tensor on the query side.
  FA_HD int64_t q_offset(const TensorRef& t, int i, int head) const {
    return q_batch * t.batch + (q_row + i) * t.row + head * t.head;
  }
  // The same on the key side, when not paged (core/pages.h serves both).
  FA_HD int64_t k_offset(const TensorRef& t, int j, int head) const {
    return k_batch * t.batch + (k_row + j) * t.row + head * t.head;
  }
  // Element offset of (head, query row i) in lse, dlse and delta: (batch, heads_q, seqlen_q),
  // packed (heads_q, total_q).
  FA_HD int64_t lse_offset(const AttnParams& p, int head, int i) const {
    if (p.seq_q.cu_seqlens != nullptr) return head * p.seq_q.total + q_row + i;
    return (q_batch * p.heads_q + head) * p.seqlen_q + i;
  }

 private:
  FA_HD static int packed(const Sequence& s, int batch, int bound, int64_t* row) {
    const int64_t begin = clamp_to(int64_t{s.cu_seqlens[batch]}, int64_t{0}, s.total);
    const int64_t end = clamp_to(int64_t{s.cu_seqlens[batch + 1]}, begin, s.total);
    *row = begin;
    return static_cast<int>(min_of(end - begin, int64_t{bound}));
  }

  FA_HD int key_room(const AttnParams& p, int batch) {
    if (p.pages.table != nullptr) {
      const int64_t slots = int64_t{p.pages.page_size} * p.pages.max_pages;
      int64_t room = min_of(slots, int64_t{p.seqlen_k});
      // Packed lengths of a paged cache: the rows themselves lie in the pages.
      if (p.seq_k.cu_seqlens != nullptr) {
        const int64_t length =
            int64_t{p.seq_k.cu_seqlens[batch + 1]} - int64_t{p.seq_k.cu_seqlens[batch]};
        room = clamp_to(length, int64_t{0}, room);
      }
      return static_cast<int>(room);
    }
    if (p.seq_k.cu_seqlens != nullptr) return packed(p.seq_k, batch, p.seqlen_k, &k_row);
    k_batch = batch;
    if (p.seq_k.cache_batch_idx != nullptr) {
      const int entry = p.seq_k.cache_batch_idx[batch];
      const bool exists = entry >= 0 && entry < p.seq_k.entries;
      k_batch = exists ? entry : 0;
      return exists ? p.seqlen_k : 0;
    }
    return p.seqlen_k;
  }
};

}  // namespace flash_attn
