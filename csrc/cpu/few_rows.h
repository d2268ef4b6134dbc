// SPDX-License-Identifier: BSD-3-Clause
// A forward step for a handful of query rows (decoding): a panel would leave most of its lanes
// empty. Here vectors run along head_dim, K and V are read where they lie, and each row has its own
// loop:
//
//   s_j = scale q . k_j;   m, alpha as in panel.h;   p_j = exp(s_j - m);   o = o alpha + sum_j p_j
//   v_j
//
// For scores without features, whose mask is one interval of keys a row.
#pragma once

#include <algorithm>

#include "cpu/panel.h"

namespace flash_attn::cpu {

// Up to this many rows the loops below beat a panel (AMD EPYC, 2026-11, head_dim 64 and 128).
constexpr int kFewRows = 6;
// With fewer keys there is little to win, and the products of a panel add up as the backward pass's
// do: a single key has weight 1 to the bit.
constexpr int kFewRowsLeastKeys = 64;

template <class V>
[[gnu::always_inline]] inline Lane<V> sum_lanes(V x) {
#if defined(__x86_64__)
  if constexpr (kIsAvx512<V> && sizeof(Lane<V>) == 4) return _mm512_reduce_add_ps((__m512)x);
#endif
  Lane<V> sum = 0;
  for (int l = 0; l < kLanes<V>; ++l)
    sum += x[l];
  return sum;
}

// Values [first, first + n) of a row of K or V as Acc: where they lie, or widened into `room`.
// Whole vectors may be read; past n they are zeros, which `room` holds there from the start.
template <class Arch, class Acc, class Elem>
[[gnu::always_inline]] inline const Acc* row_values(const Elem* row, Acc* room, int first, int n) {
  if constexpr (std::is_same_v<Elem, Acc>) {
    if (n % (Arch::kBytes / int{sizeof(Acc)}) == 0) return row + first;
  }
  widen<Arch>(room, row + first, n);
  return room;
}

// Scratch of one worker: scores of a tile; a row of K and one of V, zero past head_dim and
// head_dim_v.
template <class Acc>
struct FewRowsScratch {
  static constexpr int kValues = 4 * 16;  // the widest piece of a row of V at a time
  Acc *s = nullptr, *k = nullptr, *v = nullptr;

  FewRowsScratch() = default;
  FewRowsScratch(Carver& c, int64_t keys, int head_dim)
      : s(c.take<Acc>(keys + 16)),
        k(c.take<Acc>(round_up(head_dim, 16))),
        v(c.take<Acc>(kValues)) {}

  void clear(int head_dim) const {
    std::fill_n(k, round_up(head_dim, 16), Acc(0));
    std::fill_n(v, kValues, Acc(0));
  }
};

// out [first, first + n), n <= kCount vectors: out * alpha + sum over keys [begin, end) of weight *
// V.
template <int kCount, class Arch, class V, class Acc, class Elem>
void weigh_values(Acc* out,
                  Acc alpha,
                  const Acc* weights,
                  const Elem* const* v_rows,
                  int begin,
                  int end,
                  int first,
                  int n,
                  Acc* room) {
  V sum[kCount];
#pragma GCC unroll 4
  for (int u = 0; u < kCount; ++u)
    sum[u] = load<V>(out + first + u * kLanes<V>) * alpha;
  for (int j = begin; j < end; ++j) {
    if (v_rows[j] == nullptr) continue;
    const Acc* v = row_values<Arch>(v_rows[j], room, first, n);
#pragma GCC unroll 4
    for (int u = 0; u < kCount; ++u)
      sum[u] += load<V>(v + u * kLanes<V>) * weights[j];
  }
#pragma GCC unroll 4
  for (int u = 0; u < kCount; ++u)
    store(out + first + u * kLanes<V>, sum[u]);
}

// Rows of one head lie far apart, so the processor does not fetch ahead by itself.
template <class Elem>
[[gnu::always_inline]] inline void prefetch_row(const Elem* row, int dim) {
  for (int c = 0; c < dim; c += 64 / int{sizeof(Elem)})
    __builtin_prefetch(row + c);
}

// q: row r at q + r * q_ld, zero past head_dim. o: row r at o + r * v_ld. keys: row pointers of the
// keys [span.begin, span.end), null for a page that does not exist.
template <class Arch, class Number, class Elem>
void few_rows_step(const AttnParams& p,
                   const Mask& mask,
                   const PackedRows& rows,
                   int begin,
                   int count,
                   const KeySpan& span,
                   const Elem* const* k_rows,
                   const Elem* const* v_rows,
                   const typename Number::Acc* q,
                   int q_ld,
                   typename Number::Acc* m,
                   typename Number::Acc* l,
                   typename Number::Acc* o,
                   int v_ld,
                   const FewRowsScratch<typename Number::Acc>& scratch) {
  using Acc = typename Number::Acc;
  using V = typename Shape<Arch, Number>::V;
  constexpr int kLane = kLanes<V>;
  constexpr Acc kLowest = -std::numeric_limits<Acc>::infinity();
  const Acc scale = static_cast<Acc>(p.softmax_scale);
  for (int r = 0; r < count; ++r) {
    const int i = rows.position(begin + r);
    const int first = max_of(span.begin, mask.first_key(i)) - span.begin;
    const int end = min_of(span.end, mask.end_key(i)) - span.begin;
    if (first >= end) continue;
    Acc most = m[r];
    for (int j = first; j < end; ++j) {
      scratch.s[j] = kLowest;
      if (k_rows[j] == nullptr) continue;
      if (r == 0) {
        constexpr int kAhead = 8;
        if (j + kAhead < end) prefetch_row(k_rows[j + kAhead], p.head_dim);
        prefetch_row(v_rows[j], p.head_dim_v);
      }
      const Acc* k = row_values<Arch>(k_rows[j], scratch.k, 0, p.head_dim);
      V sum[2] = {};
      int c = 0;
      for (; c + 2 * kLane <= p.head_dim; c += 2 * kLane) {
        sum[0] += load<V>(q + r * q_ld + c) * load<V>(k + c);
        sum[1] += load<V>(q + r * q_ld + c + kLane) * load<V>(k + c + kLane);
      }
      for (; c < p.head_dim; c += kLane)
        sum[0] += load<V>(q + r * q_ld + c) * load<V>(k + c);
      scratch.s[j] = sum_lanes<V>(sum[0] + sum[1]) * scale;
      most = scratch.s[j] > most || scratch.s[j] != scratch.s[j] ? scratch.s[j] : most;
    }
    if (most == kLowest) continue;
    const Acc alpha = std::exp(m[r] - most);
    V total = {};
    const int padded = first + round_up(end - first, kLane);
    for (int j = end; j < padded; ++j)
      scratch.s[j] = kLowest;
    for (int j = first; j < padded; j += kLane) {
      const V weight = vexp<Number::kDegree>(load<V>(scratch.s + j) - most);
      store(scratch.s + j, weight);
      total += weight;
    }
    m[r] = most;
    l[r] = l[r] * alpha + sum_lanes<V>(total);
    Acc* out = o + r * v_ld;
    int c = 0;
    for (; c + 4 * kLane <= p.head_dim_v; c += 4 * kLane)
      weigh_values<4, Arch, V>(out, alpha, scratch.s, v_rows, first, end, c, 4 * kLane, scratch.v);
    for (; c < p.head_dim_v; c += kLane) {
      weigh_values<1, Arch, V>(out, alpha, scratch.s, v_rows, first, end, c,
                               min_of(kLane, p.head_dim_v - c), scratch.v);
    }
  }
}

}  // namespace flash_attn::cpu
