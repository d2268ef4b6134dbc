// SPDX-License-Identifier: BSD-3-Clause
// The product that every step of attention on the CPU is made of:
//
//   C[m][lane] (op)= sum_k A(m, k) * B[k][lane]     lane < kPanel, m < a multiple of kRows
//
// B is a panel: kPanel values a row, contiguous, vector loads. A is read one value at a time and
// broadcast, so any strides do: keys stay as they lie, P^T and dS^T serve as they were computed. A
// Number says what a value is: float, double, or a pair of bf16 (two steps of k in one 32-bit unit)
// for vdpbf16ps.
#pragma once

#include "cpu/simd.h"

namespace flash_attn::cpu {

struct F64 {
  using Acc = double;
  using Unit = double;
  static constexpr int kPair = 1, kDegree = 6;
};
struct F32 {
  using Acc = float;
  using Unit = float;
  static constexpr int kPair = 1, kDegree = 6;
};
struct Bf16 {
  using Acc = float;
  using Unit = uint32_t;  // elements 2k (low half) and 2k + 1
  static constexpr int kPair = 2, kDegree = 4;
};

template <class Arch, class Number>
struct Shape {
  using Acc = typename Number::Acc;
  using V = Vec<Acc, Arch>;
  static constexpr int kLane = kLanes<V>;
  static constexpr int kPanel = Arch::kVectors * kLane;
  static constexpr int kRows = Arch::kRows;
};

#if defined(__x86_64__)
template <class V, class U>
[[gnu::always_inline]] inline V dot_pairs(V acc, U a, U b) {
  return (V)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
}
#endif
template <class Number, class V, class U>
[[gnu::always_inline]] inline V multiply_add(V acc, U a, U b) {
  if constexpr (Number::kPair == 1) {
    return acc + a * b;
  } else {
    return dot_pairs(acc, a, b);
  }
}

// What happens to a finished row of accumulators. `c` is the row, kPanel wide.
struct StoreScaled {  // C = factor * acc
  double factor;
  template <class V, int kVectors, class Acc>
  [[gnu::always_inline]] void operator()(Acc* c, const V (&acc)[kVectors]) const {
    for (int v = 0; v < kVectors; ++v)
      store(c + v * kLanes<V>, acc[v] * static_cast<Acc>(factor));
  }
};
struct Accumulate {  // C += acc
  template <class V, int kVectors, class Acc>
  [[gnu::always_inline]] void operator()(Acc* c, const V (&acc)[kVectors]) const {
    for (int v = 0; v < kVectors; ++v)
      store(c + v * kLanes<V>, load<V>(c + v * kLanes<V>) + acc[v]);
  }
};
template <class Acc>
struct Rescale {  // C = C * alpha[lane] + acc
  const Acc* alpha;
  template <class V, int kVectors>
  [[gnu::always_inline]] void operator()(Acc* c, const V (&acc)[kVectors]) const {
    for (int v = 0; v < kVectors; ++v) {
      const V a = load<V>(alpha + v * kLanes<V>);
      store(c + v * kLanes<V>, load<V>(c + v * kLanes<V>) * a + acc[v]);
    }
  }
};

// rows: a multiple of kRows. k: steps, in units. a_row, a_k: strides of A in units. b_k: from one
// row of B to the next, kPanel when it is a panel by itself. C rows lie kPanel apart.
template <class Arch, class Number, class Epilogue>
inline void gemm(int rows,
                 int k,
                 const typename Number::Unit* a,
                 int64_t a_row,
                 int64_t a_k,
                 const typename Number::Unit* b,
                 int64_t b_k,
                 typename Number::Acc* c,
                 const Epilogue& epilogue) {
  using S = Shape<Arch, Number>;
  using V = typename S::V;
  using U = Vec<typename Number::Unit, Arch>;
  for (int row = 0; row < rows; row += S::kRows) {
    V acc[S::kRows][Arch::kVectors] = {};
    const typename Number::Unit* a_at = a + row * a_row;
    const typename Number::Unit* b_at = b;
    for (int step = 0; step < k; ++step) {
      U bv[Arch::kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < Arch::kVectors; ++v)
        bv[v] = load<U>(b_at + v * S::kLane);
#pragma GCC unroll 16
      for (int m = 0; m < S::kRows; ++m) {
        const U av = splat<U>(a_at[m * a_row]);
#pragma GCC unroll 4
        for (int v = 0; v < Arch::kVectors; ++v)
          acc[m][v] = multiply_add<Number>(acc[m][v], av, bv[v]);
      }
      a_at += a_k;
      b_at += b_k;
    }
#pragma GCC unroll 16
    for (int m = 0; m < S::kRows; ++m)
      epilogue(c + (row + m) * S::kPanel, acc[m]);
  }
}

}  // namespace flash_attn::cpu
