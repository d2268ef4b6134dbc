// SPDX-License-Identifier: BSD-3-Clause
// Which query row of which head a tile's row is. With grouped heads (GQA, MQA) the query heads of
// one key head can share a tile, so that a decode step of one query fills `group` rows of it:
// packed row r is position r / group of query head head_k * group + r % group. Positions ascend
// with r, so the mask of a tile of packed rows is that of the positions [position(begin),
// position_end(end)). group == 1 is the unpacked tile of one query head.
#pragma once

#include "core/params.h"

namespace flash_attn {

struct PackedRows {
  int group;       // query heads in a tile: 1 or AttnParams::group_size()
  int head_first;  // the first of them

  FA_HD PackedRows(int group_, int head_k) : group(group_), head_first(head_k * group_) {}

  FA_HD int64_t rows(int q_len) const { return int64_t{q_len} * group; }
  FA_HD int position(int64_t r) const { return static_cast<int>(quotient(r, group)); }
  FA_HD int position(int r) const { return quotient(r, group); }
  FA_HD int head(int r) const { return head_first + r - quotient(r, group) * group; }
  FA_HD int head(int64_t r) const {
    return head_first + static_cast<int>(r - quotient(r, group) * group);
  }
  FA_HD int64_t row(int position, int head) const {
    return int64_t{position} * group + (head - head_first);
  }
  // One past the last position that the rows before `end` touch.
  FA_HD int position_end(int end) const { return end == 0 ? 0 : position(end - 1) + 1; }
  FA_HD int position_end(int64_t end) const { return end == 0 ? 0 : position(end - 1) + 1; }
};

}  // namespace flash_attn
