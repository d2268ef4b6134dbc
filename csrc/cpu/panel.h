// SPDX-License-Identifier: BSD-3-Clause
// A panel: kPanel query rows side by side in vector lanes, the unit of work of forward.h and
// backward.h. Scores of a panel are kept transposed, (keys, kPanel), so that maxima, sums and
// exponentials run down the lanes and never across them. This file holds who the lanes are, and
// what happens to their scores between the two products: features in spec.md's order, then the
// mask.
#pragma once

#include "core/mask.h"
#include "core/pages.h"
#include "core/philox.h"
#include "core/rows.h"
#include "cpu/pack.h"

namespace flash_attn::cpu {

// Takes arrays out of one block of scratch, each at a multiple of 64 bytes. With a null base it
// counts.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<char*>(base)) {}
  template <class T>
  T* take(int64_t n) {
    T* p = reinterpret_cast<T*>(base_ + used_);
    used_ += round_up<int64_t>(n * int64_t{sizeof(T)}, 64);
    return p;
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

// The lanes: rows [row, row + count) of the packed rows of one key head. Lanes past count repeat
// the last row; what they compute is not stored.
template <class Arch, class Number>
struct Panel {
  using Acc = typename Number::Acc;
  static constexpr int kPanel = Shape<Arch, Number>::kPanel;

  int count = 0;
  int first = 0, last = 0;  // query positions of the first and the last live lane
  Int<Acc> position[kPanel];
  int head[kPanel];

  Panel(const PackedRows& rows, int64_t row, int count_) : count(count_) {
    for (int l = 0; l < kPanel; ++l) {
      const int64_t r = row + min_of(l, count - 1);
      position[l] = rows.position(r);
      head[l] = rows.head(r);
    }
    first = static_cast<int>(position[0]);
    last = static_cast<int>(position[count - 1]);
  }
};

// Elements of lse.
static inline int64_t lse_rows(const AttnParams& p) {
  const bool packed = p.seq_q.cu_seqlens != nullptr;
  return (packed ? p.seq_q.total : int64_t{p.batch} * p.seqlen_q) * p.heads_q;
}

// The part [begin, end) of a key tile that a panel may see; `full` when it sees all of it. bits:
// the bit tile of the tile's block (core/mask.h), -1 when there is none.
struct KeySpan {
  int begin, end;
  bool full;
  int bits;
};

static inline KeySpan key_span(
    const Mask& mask, int first, int last, int key_begin, int key_end, int bits) {
  KeySpan span;
  span.begin = max_of(key_begin, mask.first_key(first));
  span.end = min_of(key_end, mask.end_key(last));
  span.full = bits < 0 && mask.first_key(last) <= span.begin && span.end <= mask.end_key(first);
  span.bits = bits;
  return span;
}

// ---- features

static inline bool has_features(const AttnParams& p) {
  return p.softcap > 0 || p.bias.ptr != nullptr || p.alibi.slopes != nullptr;
}

template <class Acc>
Acc bias_value(const Bias& bias, int64_t at) {
  if (bias.boolean) {
    return static_cast<const uint8_t*>(bias.ptr)[at] ? 0 : -std::numeric_limits<Acc>::infinity();
  }
  switch (bias.dtype) {
    case DType::kF16: return to_float(static_cast<const Half*>(bias.ptr)[at]);
    case DType::kBF16: return to_float(static_cast<const BFloat*>(bias.ptr)[at]);
    case DType::kF64: return static_cast<Acc>(static_cast<const double*>(bias.ptr)[at]);
    default: return static_cast<const float*>(bias.ptr)[at];
  }
}

// The bias of one lane for keys [key, key + n) -> dst.
template <class Arch, class Acc>
void load_bias(Acc* dst, const Bias& bias, int64_t at, int n) {
  if constexpr (sizeof(Acc) == 4) {
    if (bias.col == 1 && !bias.boolean && bias.dtype != DType::kF64) {
      if (bias.dtype == DType::kF32) {
        widen<Arch>(dst, static_cast<const float*>(bias.ptr) + at, n);
      } else if (bias.dtype == DType::kBF16) {
        widen<Arch>(dst, static_cast<const BFloat*>(bias.ptr) + at, n);
      } else {
        widen<Arch>(dst, static_cast<const Half*>(bias.ptr) + at, n);
      }
      return;
    }
  }
  for (int c = 0; c < n; ++c, at += bias.col)
    dst[c] = bias_value<Acc>(bias, at);
}

// Offset of (batch, head, query i, key j) in the bias.
static inline int64_t bias_offset(const Bias& b, int batch, int head, int64_t i, int j) {
  return batch * b.batch + head * b.head + i * b.row + j * b.col;
}

// Scratch for a tile's bias: rows as they lie, then transposed.
template <class Acc>
struct BiasTile {
  Acc *rows, *transposed;  // (kPanel, block_n rounded up), (block_n rounded up, kPanel)
};

// tile (keys, kPanel) <- bias of keys [key, key + keys), the last of them hidden or padding past
// `end`.
template <class Arch, class Number, class Acc>
void bias_tile(const BiasTile<Acc>& tile,
               const AttnParams& p,
               const Panel<Arch, Number>& panel,
               int batch,
               int key,
               int keys,
               int end) {
  using Plain = std::conditional_t<sizeof(Acc) == 8, F64, F32>;
  constexpr int kLane = Shape<Arch, Plain>::kLane;
  const int ld = round_up(keys, kLane);
  for (int l = 0; l < panel.kPanel; ++l) {
    Acc* row = tile.rows + int64_t{l} * ld;
    const int live = l < panel.count ? min_of(end - key, keys) : 0;
    if (live > 0) {
      const int64_t at = bias_offset(p.bias, batch, panel.head[l], panel.position[l], key);
      load_bias<Arch>(row, p.bias, at, live);
    }
    for (int c = max_of(live, 0); c < ld; ++c)
      row[c] = 0;
  }
  transpose_panel<Arch, Plain>(tile.transposed, tile.rows, keys, ld);
}

// scores (keys, kPanel), scale * (q . k): softcap, ALiBi and bias. With `slope` non-null (backward)
// also the factor d(capped) / d(scaled), same shape.
template <class Arch, class Number>
void apply_features(typename Number::Acc* scores,
                    typename Number::Acc* slope,
                    const BiasTile<typename Number::Acc>& tile,
                    const AttnParams& p,
                    const Mask& mask,
                    const Panel<Arch, Number>& panel,
                    int batch,
                    int key,
                    int keys,
                    int end) {
  using Acc = typename Number::Acc;
  using S = Shape<Arch, Number>;
  using V = typename S::V;
  const V hidden = splat<V>(-std::numeric_limits<Acc>::infinity());
  if (p.bias.ptr != nullptr) bias_tile(tile, p, panel, batch, key, keys, end);
  for (int v = 0; v < Arch::kVectors; ++v) {
    V alibi = {}, distance = {};
    if (p.alibi.slopes != nullptr) {
      for (int l = 0; l < S::kLane; ++l) {
        const int lane = v * S::kLane + l;
        alibi[l] = p.alibi.slopes[batch * p.alibi.batch + panel.head[lane]];
        distance[l] = static_cast<Acc>(panel.position[lane] + mask.k_len - mask.q_len - key);
      }
    }
    Acc* at = scores + v * S::kLane;
    for (int r = 0; r < keys; ++r, at += S::kPanel) {
      V s = load<V>(at);
      if (p.softcap > 0) {
        const V t = vtanh(s * static_cast<Acc>(1 / p.softcap));
        s = t * static_cast<Acc>(p.softcap);
        if (slope != nullptr) store(slope + (at - scores), static_cast<Acc>(1) - t * t);
      }
      if (p.alibi.slopes != nullptr) {
        const V away = distance - static_cast<Acc>(r);
        s -= alibi * (away < 0 ? -away : away);
      }
      if (p.bias.ptr != nullptr) {
        const V bias = load<V>(tile.transposed + (at - scores));
        s = bias == hidden ? hidden : s + bias;  // hidden also where the score is +inf
      }
      store(at, s);
    }
  }
}

// ---- mask

// -inf wherever a lane does not see the key: keys [key, key + keys) of which [span.begin, span.end)
// may be seen. `missing` (null: none is) says of each key whether its page does not exist.
template <class Arch, class Number>
void apply_mask(typename Number::Acc* scores,
                const Mask& mask,
                const Panel<Arch, Number>& panel,
                const KeySpan& span,
                const uint8_t* missing,
                int key,
                int keys) {
  using Acc = typename Number::Acc;
  using S = Shape<Arch, Number>;
  using V = typename S::V;
  using I = Vec<Int<Acc>, Arch>;
  const V hidden = splat<V>(-std::numeric_limits<Acc>::infinity());
  for (int r = 0; r < keys; ++r) {
    const int j = key + r;
    Acc* at = scores + int64_t{r} * S::kPanel;
    const bool dead = j < span.begin || j >= span.end || (missing != nullptr && missing[r]);
    const int low = dead ? 1 : mask.first_query(j), high = dead ? 0 : mask.end_query(j);
    if (low <= panel.first && high > panel.last) continue;
    for (int v = 0; v < Arch::kVectors; ++v) {
      const I i = load<I>(panel.position + v * S::kLane);
      const V s = load<V>(at + v * S::kLane);
      store(at + v * S::kLane, (i >= low) & (i < high) ? s : hidden);
    }
  }
}

// -inf where bit tile `tile` says so: keys [key, key + keys) of one block, those past it untouched.
// The bits of 32 keys are one word of each lane's row, looked at one key at a time.
template <class Arch, class Number>
void apply_bits(typename Number::Acc* scores,
                const MaskSpec& spec,
                const Panel<Arch, Number>& panel,
                int tile,
                int key,
                int keys) {
  using Acc = typename Number::Acc;
  using S = Shape<Arch, Number>;
  using V = typename S::V;
  using I = Vec<Int<Acc>, Arch>;
  if (tile >= spec.bit_tiles) return;
  const V hidden = splat<V>(-std::numeric_limits<Acc>::infinity());
  const int words = ceil_div(spec.block_k, 32), first = key % spec.block_k;
  const uint32_t* bits = spec.block_bits + int64_t{tile} * spec.block_q * words;
  Int<Acc> lanes[S::kPanel];
  const int end = min_of(first + keys, spec.block_k);
  for (int k = first; k < end;) {
    const int next = min_of((k / 32 + 1) * 32, end);
    for (int l = 0; l < S::kPanel; ++l)
      lanes[l] = bits[panel.position[l] % spec.block_q * words + k / 32] >> (k % 32);
    for (; k < next; ++k) {
      Acc* at = scores + int64_t{k - first} * S::kPanel;
      for (int v = 0; v < Arch::kVectors; ++v) {
        const I word = load<I>(lanes + v * S::kLane);
        const V s = load<V>(at + v * S::kLane);
        store(at + v * S::kLane, (word & 1) != 0 ? s : hidden);
        store(lanes + v * S::kLane, word >> 1);
      }
    }
  }
}

// ---- scores

// The packed keys that a span needs, in whole rows of gemm.h: `keys` of them from key `key`, which
// is `skip` rows into a tile packed from key `base`. Those outside the span are there to be hidden.
template <class Arch, class Number>
struct PackedSpan {
  int skip, key, keys;

  PackedSpan(const KeySpan& span, int base) {
    constexpr int kRows = Shape<Arch, Number>::kRows;
    skip = (span.begin - base) / kRows * kRows;
    key = base + skip;
    keys = round_up(span.end - key, kRows);
  }
};

// scores (at.keys, kPanel) <- S^T of one panel after features and mask. k: packed tile, rows k_ld
// apart; qt: the panel's queries, transposed. slope: as in apply_features. missing: as in
// apply_mask, from the tile's first key.
template <class Arch, class Number>
void panel_scores(typename Number::Acc* scores,
                  typename Number::Acc* slope,
                  const BiasTile<typename Number::Acc>& bias,
                  const AttnParams& p,
                  const Mask& mask,
                  const Panel<Arch, Number>& panel,
                  int batch,
                  const KeySpan& seen,
                  const PackedSpan<Arch, Number>& at,
                  const uint8_t* missing,
                  const typename Number::Unit* k,
                  int k_ld,
                  const typename Number::Unit* qt) {
  gemm<Arch, Number>(at.keys, units_of<Number>(p.head_dim), k + int64_t{at.skip} * k_ld, k_ld, 1,
                     qt, panel.kPanel, scores, StoreScaled{p.softmax_scale});
  if (has_features(p))
    apply_features(scores, slope, bias, p, mask, panel, batch, at.key, at.keys, seen.end);
  if (!seen.full || at.key != seen.begin || at.key + at.keys != seen.end) {
    apply_mask(scores, mask, panel, seen, missing == nullptr ? nullptr : missing + at.skip, at.key,
               at.keys);
  }
  if (seen.bits >= 0) apply_bits(scores, p.mask, panel, seen.bits, at.key, at.keys);
}

// ---- softmax

// One step of the online softmax over `keys` rows of scores (keys, kPanel): running maximum m and
// sum l of each lane, the factor alpha that brings older sums to the new maximum, probabilities in
// place.
template <class Arch, class Number, class Acc>
void online_softmax(Acc* scores, Acc* m, Acc* l, Acc* alpha, int keys) {
  using S = Shape<Arch, Number>;
  using V = typename S::V;
  const V lowest = splat<V>(-std::numeric_limits<Acc>::infinity());
  for (int v = 0; v < Arch::kVectors; ++v) {
    Acc* s = scores + v * S::kLane;
    const V old = load<V>(m + v * S::kLane);
    V most[4] = {old, old, old, old};
    for (int r = 0; r < keys; r += 4) {
#pragma GCC unroll 4
      for (int u = 0; u < 4; ++u)
        most[u] = vmax(most[u], load<V>(s + (r + u) * S::kPanel));
    }
    const V now = vmax(vmax(most[0], most[1]), vmax(most[2], most[3]));
    const V base = now == lowest ? V{} : now;  // no key seen so far: every weight is exp(-inf) = 0
    const V factor = vexp<6>(old - base);
    V sum[4] = {};
    for (int r = 0; r < keys; r += 4) {
#pragma GCC unroll 4
      for (int u = 0; u < 4; ++u) {
        Acc* at = s + (r + u) * S::kPanel;
        const V p = vexp<Number::kDegree>(load<V>(at) - base);
        store(at, p);
        sum[u] += p;
      }
    }
    store(m + v * S::kLane, now);
    store(l + v * S::kLane,
          load<V>(l + v * S::kLane) * factor + ((sum[0] + sum[1]) + (sum[2] + sum[3])));
    store(alpha + v * S::kLane, factor);
  }
}

}  // namespace flash_attn::cpu
