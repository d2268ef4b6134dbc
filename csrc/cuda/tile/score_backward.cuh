// SPDX-License-Identifier: BSD-3-Clause
// What backward kernels do to a 16 x 16 chunk of scores, two neighbouring accumulators of mma,
// beside the products: bias, mask, dropout, the score gradient. A chunk lies with its keys or with
// its queries down; a thread holds eight elements of it, element e being c[e % 4] of the left (e <
// 4) or the right accumulator.
#pragma once

#include "core/mask.h"
#include "core/philox.h"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/fragment.cuh"

namespace flash_attn {

__device__ __forceinline__ int chunk_row(int e) {
  return static_cast<int>(threadIdx.x) % 32 / 4 + e / 2 % 2 * 8;
}
__device__ __forceinline__ int chunk_column(int e) {
  return threadIdx.x % 4 * 2 + e % 2 + e / 4 * 8;
}
struct KeysDown {
  __device__ __forceinline__ static int key(int e) { return chunk_row(e); }
  __device__ __forceinline__ static int query(int e) { return chunk_column(e); }
  // Which of the thread's queries of a chunk element e has, and how many there are.
  static constexpr int kQueries = 4;
  __device__ __forceinline__ static constexpr int query_number(int e) { return e / 4 * 2 + e % 2; }
};
struct QueriesDown {
  __device__ __forceinline__ static int key(int e) { return chunk_column(e); }
  __device__ __forceinline__ static int query(int e) { return chunk_row(e); }
  static constexpr int kQueries = 2;
  __device__ __forceinline__ static constexpr int query_number(int e) { return e / 2 % 2; }
};

// ---- visibility

// What the elements of a partly visible tile must meet: low <= key - query < high (core/mask.h),
// keys below key_end, queries below query_end, and a bit tile (negative: none). Left padding has no
// backward pass.
struct Visible {
  const MaskSpec& spec;
  int low, high, key_end, query_end, bits;
};

// Bit e is set where the bit tile hides element e of a chunk. A loop: few tiles have one.
template <class Layout>
__device__ __noinline__ uint32_t bits_hidden(const uint32_t* bits,
                                             int block_q,
                                             int block_k,
                                             int query,
                                             int key,
                                             int query_end,
                                             int key_end) {
  const int words = (block_k + 31) / 32, first_query = query % block_q, first_key = key % block_k;
  uint32_t hidden = 0;
#pragma unroll 1
  for (int e = 0; e < 8; ++e) {
    const int i = Layout::query(e), j = first_key + Layout::key(e);
    if (query + i >= query_end || key + Layout::key(e) >= key_end) continue;
    if ((bits[(first_query + i) * words + j / 32] >> (j % 32) & 1u) == 0) hidden |= 1u << e;
  }
  return hidden;
}

// What is not visible of a chunk that begins at (query, key) becomes `hidden_as`.
template <class Layout>
__device__ __forceinline__ void hide(
    float (&x)[8], const Visible& v, int query, int key, float hidden_as = 0) {
  const uint32_t first = static_cast<uint32_t>(key - query - v.low);
  const uint32_t width = static_cast<uint32_t>(v.high - v.low);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    if (first + Layout::key(e) - Layout::query(e) >= width) x[e] = hidden_as;
  }
  if (key + 16 > v.key_end || query + 16 > v.query_end) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if (key + Layout::key(e) >= v.key_end || query + Layout::query(e) >= v.query_end)
        x[e] = hidden_as;
    }
  }
  if (v.bits < 0 || v.bits >= v.spec.bit_tiles) return;
  const int words = (v.spec.block_k + 31) / 32;
  const uint32_t* bits = v.spec.block_bits + int64_t{v.bits} * v.spec.block_q * words;
  const uint32_t hidden =
      bits_hidden<Layout>(bits, v.spec.block_q, v.spec.block_k, query, key, v.query_end, v.key_end);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    if (hidden >> e & 1u) x[e] = hidden_as;
  }
}

// ---- features

// The features of one query head. `distance`: seqlen_k - seqlen_q. Elements at keys from key_end or
// queries from query_end on are not read of the bias.
struct HeadFeatures {
  const AttnParams& p;
  int batch, head, distance, key_end, query_end;
};

template <class Layout, class Read>
__device__ __forceinline__ void read_bias(
    float (&to)[8], const HeadFeatures& f, int query, int key, const Read& read) {
  const Bias& bias = f.p.bias;
  const int64_t base = f.batch * bias.batch + f.head * bias.head;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const int i = query + Layout::query(e), j = key + Layout::key(e);
    const bool inside = i < f.query_end && j < f.key_end;
    to[e] = inside ? read(base + i * bias.row + j * bias.col) : 0.0f;
  }
}

// The bias of a chunk: 0 or -inf from a boolean mask.
template <class Layout>
__device__ __forceinline__ void load_bias(float (&to)[8],
                                          const HeadFeatures& f,
                                          int query,
                                          int key) {
  const void* ptr = f.p.bias.ptr;
  if (f.p.bias.boolean) {
    read_bias<Layout>(to, f, query, key, [=](int64_t at) {
      return static_cast<const uint8_t*>(ptr)[at] ? 0.0f : -INFINITY;
    });
  } else if (f.p.bias.dtype == DType::kBF16) {
    read_bias<Layout>(to, f, query, key,
                      [=](int64_t at) { return to_float(static_cast<const bf16*>(ptr)[at]); });
  } else if (f.p.bias.dtype == DType::kF16) {
    read_bias<Layout>(to, f, query, key,
                      [=](int64_t at) { return to_float(static_cast<const f16*>(ptr)[at]); });
  } else {
    read_bias<Layout>(to, f, query, key,
                      [=](int64_t at) { return static_cast<const float*>(ptr)[at]; });
  }
}

// x -> cap tanh(x / cap), in 16 bits by tanh y = 1 - 2 / (e^2y + 1) of |y|.
template <class Element>
__device__ __forceinline__ void cap_score(float& x, float& slope, float cap) {
  if constexpr (sizeof(Element) == 4) {
    const float t = tanhf(x / cap);
    x = cap * t;
    slope = 1 - t * t;
  } else {
    const float twice = fabsf(x) * (2.885390082f / cap);  // 2 log2 e
    const float inverse = ptx::reciprocal_approx(ptx::exp2_approx(twice) + 1);
    x = copysignf(fmaf(-2 * cap, inverse, cap), x);
    slope = 4 * inverse * (1 - inverse);
  }
}

// q . k -> scores of the specification but for the bias, in natural units; slope: d score / d
// (scale q . k).
template <class Element, class Layout>
__device__ __forceinline__ void exact_scores(
    float (&x)[8], float (&slope)[8], const HeadFeatures& f, int query, int key) {
  const AttnParams& p = f.p;
  const float scale = static_cast<float>(p.softmax_scale), cap = static_cast<float>(p.softcap);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    x[e] *= scale;
    slope[e] = 1;
  }
  if (cap > 0) {
#pragma unroll
    for (int e = 0; e < 8; ++e)
      cap_score<Element>(x[e], slope[e], cap);
  }
  if (p.alibi.slopes != nullptr) {
    const float alibi = p.alibi.slopes[f.batch * p.alibi.batch + f.head];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int away = query + Layout::query(e) + f.distance - key - Layout::key(e);
      x[e] -= alibi * static_cast<float>(abs(away));
    }
  }
}

// -inf hides even a score that is inf or NaN.
__device__ __forceinline__ float biased(float x, float bias) {
  return bias == -INFINITY ? -INFINITY : x + bias;
}

// The bias of a chunk, if there is one.
template <class Layout>
__device__ __forceinline__ void add_chunk_bias(float (&x)[8],
                                               const HeadFeatures& f,
                                               int query,
                                               int key) {
  if (f.p.bias.ptr == nullptr) return;
  float bias[8];
  load_bias<Layout>(bias, f, query, key);
#pragma unroll
  for (int e = 0; e < 8; ++e)
    x[e] = biased(x[e], bias[e]);
}

// ---- dropout

// The lanes of Philox for the chunks of 16 queries x 32 keys, or their half, that begin at (query,
// key): call c is for the columns 2t + c.
template <class Layout>
struct DropoutChunk {
  Philox4 call[2];

  __device__ __forceinline__ void draw(const DropoutMask& mask, int query, int key) {
#pragma unroll
    for (int c = 0; c < 2; ++c)
      call[c] = mask.lanes(query + Layout::query(c), key / 32 * 32 + Layout::key(c));
  }
  // Of element e of the first or the second chunk of the 32 keys.
  __device__ __forceinline__ uint32_t lane(int e, bool second) const {
    constexpr bool kDown = Layout::kQueries == 4;
    const int query_half = kDown ? e / 4 : e / 2 % 2, key_half = kDown ? e / 2 % 2 : e / 4;
    const uint32_t(&word)[4] = call[e % 2].word;
    const uint32_t pair = second ? word[2 * query_half + 1] : word[2 * query_half];
    return pair >> (16 * key_half) & 0xffffu;
  }
};

// Bit e is set where element e of a chunk is dropped, wherever the chunk begins. A loop: few do not
// begin at multiples of 16. Without an index into a call's words, which would lie in memory.
template <class Layout>
__device__ __forceinline__ uint32_t dropped_slowly(const DropoutMask& mask, int query, int key) {
  uint32_t dropped = 0;
#pragma unroll 1
  for (int e = 0; e < 8; ++e) {
    const int i = query + Layout::query(e), j = key + Layout::key(e), lane = dropout_lane(i, j);
    const Philox4 all = mask.lanes(i, j);
    const uint32_t low = lane & 2 ? all.word[1] : all.word[0];
    const uint32_t high = lane & 2 ? all.word[3] : all.word[2];
    const uint32_t value = (lane & 4 ? high : low) >> (lane % 2 * 16) & 0xffffu;
    dropped |= uint32_t{value >= mask.keep_below} << e;
  }
  return dropped;
}

// Marks dropped probabilities by their sign (-0 is dropped too). `drawn` is kept from the first to
// the second chunk of 32 keys. Tiles that begin between multiples of 16 queries or 16 keys, which
// odd block masks make, ask element by element.
template <class Layout>
__device__ __forceinline__ void mark_dropped(float (&prob)[8],
                                             DropoutChunk<Layout>& drawn,
                                             bool again,
                                             const HeadFeatures& f,
                                             int query,
                                             int key) {
  const AttnParams& p = f.p;
  if (query % 16 != 0 || key % 16 != 0) {
    const uint32_t dropped = dropped_slowly<Layout>(DropoutMask(p, f.batch, f.head), query, key);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if (dropped >> e & 1u) prob[e] = -prob[e];
    }
    return;
  }
  if (again || key % 32 == 0) drawn.draw(DropoutMask(p, f.batch, f.head), query, key);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    if (drawn.lane(e, key % 32 != 0) >= p.dropout.keep_below) prob[e] = -prob[e];
  }
}

// An element of dS from P, marked by mark_dropped, dP and delta. `scale`: of dropout.
__device__ __forceinline__ float score_gradient(float prob, float dp, float delta, float scale) {
  // Nothing where P is 0, even if dP is no number.
  if (prob == 0) return 0;
  return signbit(prob) ? prob * delta : prob * (dp * scale - delta);
}

}  // namespace flash_attn
