// SPDX-License-Identifier: BSD-3-Clause
// Which key each row of a key tile in shared memory holds, and so which keys a thread has in its
// accumulators: element c of the n-th eight columns is key thread_key() + column_key(n) + c of the
// tile. The products do not care, as long as K and V agree.
#pragma once

#include "core/types.h"

namespace flash_attn {

// Row r holds key r: a thread has pairs of keys, eight apart.
struct KeysInOrder {
  static constexpr int kRun = 0;  // no more than pairs

  FA_HD static constexpr int row_key(int r) { return r; }
  __device__ __forceinline__ static int thread_key() { return threadIdx.x % 4 * 2; }
  FA_HD static constexpr int column_key(int n) { return 8 * n; }
};

// A thread has kRun neighbouring keys of each group of 4 * kRun, so that it reads their bias at
// once. A permutation of the bits of r, so that row_key(a + b) = row_key(a) + row_key(b) where a
// and b have no bit in common.
template <int kKeys>
struct KeysByThread {
  static constexpr int kGroup = kKeys % 32 == 0 ? 32 : min_of(kKeys, 16), kRun = kGroup / 4;
  static_assert(kKeys % kGroup == 0);

  FA_HD static constexpr int row_key(int r) {
    return r / kGroup * kGroup + r % 8 / 2 * kRun + r % kGroup / 8 * 2 + r % 2;
  }
  __device__ __forceinline__ static int thread_key() { return threadIdx.x % 4 * kRun; }
  FA_HD static constexpr int column_key(int n) {
    return n / (kRun / 2) * kGroup + n % (kRun / 2) * 2;
  }
};

// Of the backward pass, where keys go down and each kKeys of them are a warp's: a thread has
// kKeys / 8 neighbouring ones, for the same reason. Additive as above.
template <int kKeys>
struct KeysByLane {
  FA_HD static constexpr int row_key(int r) {
    return r / kKeys * kKeys + r % 8 * (kKeys / 8) + r % kKeys / 8;
  }
};

// That one or none.
template <int kKeys>
struct KeysByLaneOrNot {
  bool by_lane;

  __device__ __forceinline__ int row_key(int r) const {
    return by_lane ? KeysByLane<kKeys>::row_key(r) : r;
  }
};

// KeysByThread or KeysInOrder, as the problem asks for.
template <int kKeys>
struct KeysEither {
  bool by_thread;

  __device__ __forceinline__ int row_key(int r) const {
    return by_thread ? KeysByThread<kKeys>::row_key(r) : r;
  }
};

}  // namespace flash_attn
