// SPDX-License-Identifier: BSD-3-Clause
// Copies of a tile's rows into the forms that gemm.h reads: rows widened to units and padded with
// zeros, pairs of rows interleaved (bf16), and rows transposed into panels. Whatever is past a
// sequence's end becomes zero here and is never read.
#pragma once

#include "cpu/gemm.h"

namespace flash_attn::cpu {

// Units that `dim` values take as the inner (k) side of a product.
template <class Number>
constexpr int units_of(int dim) {
  return ceil_div(dim, Number::kPair);
}

// rows[r] (dim values each; null: a row of zeros) -> dst (padded_rows, ld) units, zero past dim and
// count.
template <class Arch, class Number, class Elem>
void pack_rows(typename Number::Unit* dst,
               const Elem* const* rows,
               int count,
               int padded_rows,
               int dim,
               int ld) {
  using Unit = typename Number::Unit;
  for (int r = 0; r < padded_rows; ++r) {
    Unit* out = dst + int64_t{r} * ld;
    const bool live = r < count && rows[r] != nullptr;
    int filled = 0;
    if (live) {
      if constexpr (Number::kPair == 1) {
        widen<Arch>(out, rows[r], dim);
        filled = dim;
      } else {
        filled = units_of<Number>(dim);
        if (dim % 2) out[filled - 1] = 0;
        std::memcpy(out, rows[r], sizeof(Elem) * dim);
      }
    }
    for (int c = filled; c < ld; ++c)
      out[c] = 0;
  }
}

// dst unit (r, c) of (padded_rows / 2, ld): values c of rows 2r and 2r + 1, so that k runs over
// rows. From packed bf16 rows of src_ld units. For numbers without pairs the packed rows serve as
// they are.
template <class Arch>
void interleave_rows(
    uint32_t* dst, const uint32_t* src, int padded_rows, int src_ld, int dim, int ld) {
  for (int r = 0; r < padded_rows / 2; ++r) {
    const uint16_t* low = reinterpret_cast<const uint16_t*>(src + int64_t{2 * r} * src_ld);
    const uint16_t* high = low + 2 * src_ld;
    uint32_t* out = dst + int64_t{r} * ld;
    int c = 0;
#if defined(__x86_64__)
    for (; c + 16 <= dim; c += 16) {
      const __m512i a = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(low + c)));
      const __m512i b = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(high + c)));
      _mm512_storeu_si512(out + c, _mm512_or_si512(a, _mm512_slli_epi32(b, 16)));
    }
#endif
    for (; c < dim; ++c)
      out[c] = low[c] | uint32_t{high[c]} << 16;
    for (; c < ld; ++c)
      out[c] = 0;
  }
}

// dst unit (r, lane) of (keys / 2, kPanel): rows 2r and 2r + 1 of src (keys, kPanel), rounded to
// bf16.
template <class Arch>
void pack_key_pairs(uint32_t* dst, const float* src, int keys) {
#if defined(__x86_64__)
  constexpr int kPanel = Shape<Arch, Bf16>::kPanel;
  // From (low row, high row), 16 each, to alternating ones.
  __m512i order;
  for (int l = 0; l < 16; ++l)
    reinterpret_cast<uint32_t*>(&order)[l] = static_cast<uint32_t>(l | (16 + l) << 16);
  for (int r = 0; r < keys; r += 2) {
    const float* row = src + r * kPanel;
    for (int l = 0; l < kPanel; l += 16) {
      const __m512bh both =
          _mm512_cvtne2ps_pbh(_mm512_loadu_ps(row + kPanel + l), _mm512_loadu_ps(row + l));
      _mm512_storeu_si512(dst + r / 2 * kPanel + l, _mm512_permutexvar_epi16(order, (__m512i)both));
    }
  }
#endif
}

// src (keys, kPanel) -> dst (keys, kPanel / 2): lanes 2l and 2l + 1 as a pair, rounded to bf16.
template <class Arch>
void pack_lane_pairs(uint32_t* dst, const float* src, int keys) {
#if defined(__x86_64__)
  for (int e = 0; e < keys * Shape<Arch, Bf16>::kPanel; e += 32) {
    const __m512bh both =
        _mm512_cvtne2ps_pbh(_mm512_loadu_ps(src + e + 16), _mm512_loadu_ps(src + e));
    _mm512_storeu_si512(dst + e / 2, (__m512i)both);
  }
#endif
}

// kLane x kLane transpose in registers: log2(kLane) rounds of interleaving row i with row i + kLane
// / 2.
template <class V>
[[gnu::always_inline]] inline void transpose_square(V (&x)[kLanes<V>]) {
  constexpr int kN = kLanes<V>;
  using I = Vec<Int<std::conditional_t<sizeof(Lane<V>) == 8, double, float>>,
                std::conditional_t<sizeof(V) == 64, Avx512Arch,
                                   std::conditional_t<sizeof(V) == 32, Avx2Arch, ScalarArch>>>;
  I low, high;
  for (int l = 0; l < kN; ++l) {
    low[l] = l / 2 + (l % 2) * kN;
    high[l] = low[l] + kN / 2;
  }
#pragma GCC unroll 4
  for (int round = 1; round < kN; round *= 2) {
    V y[kN];
#pragma GCC unroll 16
    for (int i = 0; i < kN / 2; ++i) {
      y[2 * i] = __builtin_shuffle(x[i], x[i + kN / 2], low);
      y[2 * i + 1] = __builtin_shuffle(x[i], x[i + kN / 2], high);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kN; ++i)
      x[i] = y[i];
  }
}

// src (kPanel rows, ld) -> dst (columns, kPanel): one panel. `columns` is rounded up to whole
// squares, so dst has room for round_up(columns, kLane) rows and src for as many columns.
template <class Arch, class Number>
void transpose_panel(typename Number::Unit* dst,
                     const typename Number::Unit* src,
                     int columns,
                     int ld) {
  using S = Shape<Arch, Number>;
  using V = Vec<typename Number::Unit, Arch>;
  for (int c = 0; c < columns; c += S::kLane) {
    for (int v = 0; v < Arch::kVectors; ++v) {
      V x[S::kLane];
#pragma GCC unroll 16
      for (int r = 0; r < S::kLane; ++r)
        x[r] = load<V>(src + int64_t{v * S::kLane + r} * ld + c);
      transpose_square(x);
#pragma GCC unroll 16
      for (int r = 0; r < S::kLane; ++r)
        store(dst + (c + r) * S::kPanel + v * S::kLane, x[r]);
    }
  }
}

// src (columns, kPanel) -> dst (kPanel rows, ld), columns rounded up to whole squares: the way
// back.
template <class Arch, class Number>
void transpose_to_rows(typename Number::Acc* dst,
                       const typename Number::Acc* src,
                       int columns,
                       int ld) {
  using S = Shape<Arch, Number>;
  using V = typename S::V;
  for (int c = 0; c < columns; c += S::kLane) {
    for (int v = 0; v < Arch::kVectors; ++v) {
      V x[S::kLane];
#pragma GCC unroll 16
      for (int r = 0; r < S::kLane; ++r)
        x[r] = load<V>(src + (c + r) * S::kPanel + v * S::kLane);
      transpose_square(x);
#pragma GCC unroll 16
      for (int r = 0; r < S::kLane; ++r)
        store(dst + int64_t{v * S::kLane + r} * ld + c, x[r]);
    }
  }
}

}  // namespace flash_attn::cpu
