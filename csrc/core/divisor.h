// SPDX-License-Identifier: BSD-3-Clause
// Division by a number that the host knows, in two instructions of a GPU.
#pragma once

#include "core/types.h"

namespace flash_attn {

// x / d for 0 <= x < 2^31: floor(2 x m / 2^(32 + s)) with 2^s >= d > 2^(s-1) and m = floor(2^(31+s)
// / d) + 1, which exceeds 2^(31+s) / d by at most 1 and so, times x / 2^(31+s), by less than 1 / d.
struct Divisor {
  uint32_t factor = 0x80000001u;
  int shift = 0;

  Divisor() = default;
  explicit Divisor(int d) {
    while (int64_t{1} << shift < d)
      ++shift;
    factor = static_cast<uint32_t>((uint64_t{1} << (31 + shift)) / static_cast<uint32_t>(d) + 1);
  }

  FA_HD unsigned operator()(unsigned x) const {
#if defined(__CUDA_ARCH__)
    return __umulhi(2 * x, factor) >> shift;
#else
    return static_cast<unsigned>(uint64_t{2 * x} * factor >> 32) >> shift;
#endif
  }
};

}  // namespace flash_attn
