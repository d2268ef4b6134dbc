// SPDX-License-Identifier: BSD-3-Clause
// Which tile of which sequence a block of the grid takes, when the lengths of packed sequences are
// known to the device alone. Sequence b of a packed side owns the slots
//
//   [cu[b] * each / block + b,  cu[b + 1] * each / block + b + 1)      `each`: rows of a position
//
// which are enough for its tiles, wherever it begins, and follow each other: no scan, no list, a
// binary search. A slot whose tile is negative or past the sequence's has nothing to do. The host
// needs the total only.
#pragma once

#include "core/seqlen.h"

namespace flash_attn {

struct TileSlot {
  int batch, tile;
};

// Slots of a side whose sequences have at most `length` positions of `each` rows.
FA_HD int64_t slot_count(const Sequence& s, int batch, int length, int each, int block) {
  if (s.cu_seqlens != nullptr) return quotient(s.total * each, block) + batch;
  return batch * ceil_div(int64_t{length} * each, int64_t{block});
}

// The first slot of packed sequence b, whatever stands in cu_seqlens.
FA_HD int64_t first_slot(const Sequence& s, int b, int each, int block) {
  return quotient(clamp_to(int64_t{s.cu_seqlens[b]}, int64_t{0}, s.total) * each, block) + b;
}

FA_HD TileSlot
find_slot(const Sequence& s, int batch, int length, int each, int block, int64_t slot) {
  if (s.cu_seqlens == nullptr) {
    const int64_t tiles = ceil_div(int64_t{length} * each, int64_t{block});
    return {static_cast<int>(slot / tiles), static_cast<int>(slot % tiles)};
  }
  int low = 0, high = batch;  // first_slot(low) <= slot < first_slot(high)
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    (first_slot(s, middle, each, block) <= slot ? low : high) = middle;
  }
  return {low, static_cast<int>(slot - first_slot(s, low, each, block))};
}

}  // namespace flash_attn
