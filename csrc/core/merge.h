// SPDX-License-Identifier: BSD-3-Clause
// Merging two attention results over disjoint sets of keys, (out_a, lse_a) and (out_b, lse_b):
//
//   lse = log(exp(lse_a) + exp(lse_b)),  out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b
//
// The empty rule: lse == -inf is a side that saw no key. Its weight is exactly 0 and its out is not
// read, so (empty, x) is x to the bit, whatever the empty side holds, and (empty, empty) is (0,
// -inf).
#pragma once

#include <cmath>

#include "core/types.h"

namespace flash_attn {

template <class T>
struct MergeWeights {
  T a, b, lse;
};

template <class T>
FA_HD MergeWeights<T> merge_weights(T lse_a, T lse_b) {
  const T empty = static_cast<T>(-INFINITY);
  if (lse_b == empty) return {lse_a == empty ? T(0) : T(1), T(0), lse_a};
  if (lse_a == empty) return {T(0), T(1), lse_b};
  const T largest = lse_a < lse_b ? lse_b : lse_a;
  const T lse = largest + std::log(std::exp(lse_a - largest) + std::exp(lse_b - largest));
  return {std::exp(lse_a - lse), std::exp(lse_b - lse), lse};
}

// One element of out. A weight of 0 hides its side, NaN or not.
template <class T>
FA_HD T merge_out(const MergeWeights<T>& w, T out_a, T out_b) {
  if (w.b == T(0)) return w.a == T(0) ? T(0) : w.a * out_a;
  if (w.a == T(0)) return w.b * out_b;
  return w.a * out_a + w.b * out_b;
}

}  // namespace flash_attn
