// SPDX-License-Identifier: BSD-3-Clause
// Dropout as a pure function of (seed, offset, batch, head, i, j): Philox4x32 with 7 rounds, so
// every device, kernel and tile size drops the same elements, in the backward pass too.
//
//   key      (low 32 bits of seed, high 32 bits of seed)
//   counter  (i / 16 * 8 + i % 8,  j / 32 * 8 + j % 8,  batch * heads_q + head,  offset), each mod
//   2^32 lane l   bits 16 * (l % 2) … + 15 of output word l / 2, l = 0 … 7 element  lane 4 * (i / 8
//   % 2) + (j / 8 % 4) is its own: kept where lane < keep_below
//
// i and j count inside the sequence; batch is the sequence's index. One call serves rows {i0, i0 +
// 8} x columns {j0, j0 + 8, j0 + 16, j0 + 24}: what one thread holds of an mma or wgmma
// accumulator. Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3"
// (2011).
#pragma once

#include "core/params.h"

namespace flash_attn {

constexpr int kPhiloxRounds = 7;
constexpr uint32_t kPhiloxMul0 = 0xD2511F53u, kPhiloxMul1 = 0xCD9E8D57u;  // words 0 and 2
constexpr uint32_t kPhiloxAdd0 = 0x9E3779B9u, kPhiloxAdd1 = 0xBB67AE85u;  // to the key, each round

struct Philox4 {
  uint32_t word[4];

  FA_HD uint32_t lane(int l) const { return (word[l >> 1] >> (16 * (l & 1))) & 0xffffu; }
};

FA_HD Philox4 philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p0 = uint64_t{kPhiloxMul0} * c0;
    const uint64_t p1 = uint64_t{kPhiloxMul1} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += kPhiloxAdd0;
    k1 += kPhiloxAdd1;
  }
  return {{c0, c1, c2, c3}};
}

// The lane of a call's result that belongs to element (i, j).
FA_HD constexpr int dropout_lane(int i, int j) {
  return 4 * (i / 8 % 2) + j / 8 % 4;
}

// The dropout mask of one (batch, head). Reads seed and offset once, where they live.
struct DropoutMask {
  uint32_t seed_low, seed_high, offset, plane, keep_below;

  DropoutMask() = default;
  FA_HD DropoutMask(const AttnParams& p, int batch, int head)
      : seed_low(static_cast<uint32_t>(p.dropout.philox[0])),
        seed_high(static_cast<uint32_t>(static_cast<uint64_t>(p.dropout.philox[0]) >> 32)),
        offset(static_cast<uint32_t>(p.dropout.philox[1])),
        plane(static_cast<uint32_t>(batch) * static_cast<uint32_t>(p.heads_q) +
              static_cast<uint32_t>(head)),
        keep_below(p.dropout.keep_below) {}

  // A call by the two words of its counter that are its own.
  FA_HD Philox4 call(uint32_t rows, uint32_t columns) const {
    return philox(rows, columns, plane, offset, seed_low, seed_high);
  }
  // The eight lanes of the call that (i, j) belongs to.
  FA_HD Philox4 lanes(int i, int j) const { return call(i / 16 * 8 + i % 8, j / 32 * 8 + j % 8); }
  FA_HD bool keep(int i, int j) const { return lanes(i, j).lane(dropout_lane(i, j)) < keep_below; }
};

}  // namespace flash_attn
