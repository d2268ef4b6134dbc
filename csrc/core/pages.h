// SPDX-License-Identifier: BSD-3-Clause
// Key slot -> where its row lies, in a contiguous tensor, a packed one or a paged cache. Slot j of
// a paged sequence is row j % page_size of page table[batch][j / page_size]. An entry that is -1,
// or names a page that does not exist, is no page: the offset is kNoRow and nothing may be read
// there.
#pragma once

#include "core/params.h"
#include "core/seqlen.h"

namespace flash_attn {

constexpr int64_t kNoRow = -1;

// The page that holds slot j >= 0 of sequence `batch`; kNoRow if there is none.
FA_HD int64_t page_of(const Pages& pages, int batch, int j) {
  const int column = j / pages.page_size;
  if (column >= pages.max_pages) return kNoRow;
  const int page = pages.table[batch * pages.table_stride + column];
  return page >= 0 && page < pages.num_pages ? page : kNoRow;
}

// Element offset of (slot j, head) in k, v or a tensor laid out like them; kNoRow without a page.
FA_HD int64_t key_offset(
    const AttnParams& p, const SeqInfo& seq, const TensorRef& t, int batch, int j, int head) {
  if (p.pages.table == nullptr) return seq.k_offset(t, j, head);
  const int64_t page = page_of(p.pages, batch, j);
  if (page == kNoRow) return kNoRow;
  return page * t.batch + int64_t{j % p.pages.page_size} * t.row + head * t.head;
}

// One past the last slot that lies in one piece with slot j (row after row, t.row apart), at most
// `end`.
FA_HD int contiguous_end(const AttnParams& p, int j, int end) {
  if (p.pages.table == nullptr) return end;
  const int left = p.pages.page_size - j % p.pages.page_size;
  return end - j < left ? end : j + left;
}

}  // namespace flash_attn
