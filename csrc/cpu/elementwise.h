// SPDX-License-Identifier: BSD-3-Clause
// For the small operators that go through rows once (append, rotary, delta): storage types by
// dtype, and rows shared out among workers.
#pragma once

#include <type_traits>

#include "cpu/simd.h"
#include "plan/kernel_list.h"

namespace flash_attn::cpu {

// What is computed in: fp32, for fp64 rows fp64.
template <class Elem>
using AccumulatorOf = std::conditional_t<std::is_same_v<Elem, double>, double, float>;

// Calls body(Elem{}) with the storage type of a dtype.
template <class Body>
void with_element(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kF64: body(double{}); break;
    case DType::kF32: body(float{}); break;
    case DType::kF16: body(Half{}); break;
    case DType::kBF16: body(BFloat{}); break;
  }
}

// Work of `rows` equal rows of `values` elements, cut for as many workers as it is worth: starting
// a thread costs about what 16,384 elements do.
inline int useful_workers(int64_t rows, int64_t values, int workers) {
  const int64_t worth = rows * values / 16384;
  return static_cast<int>(worth < 1 ? 1 : worth < workers ? worth : workers);
}

// The rows of worker w.
struct RowRange {
  int64_t begin, end;
};
inline RowRange rows_of_worker(int64_t rows, int workers, int w) {
  return {rows * w / workers, rows * (w + 1) / workers};
}

}  // namespace flash_attn::cpu
