// SPDX-License-Identifier: BSD-3-Clause
// From S^T = K Q^T to probabilities, when lse is known: what the backward kernel does to a warp's
// scores, stage by stage, so that nothing branches inside a stage. Keys down, queries across:
// element c of s[r][n] is row 16 r + 8 (c / 2) + lane / 4 and query 8 n + 2 (lane % 4) + c % 2 of
// the warp's part. Rows are keys in order, or KeysByLane (tile/key_order.cuh).
#pragma once

#include "core/mask.h"
#include "core/philox.h"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/shuffle.cuh"
#include "cuda/sm80/backward_state.cuh"
#include "cuda/support/backward_prepare.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/operand.cuh"
#include "plan/kernel_list.h"

namespace flash_attn::sm80 {

template <int kRowBlocks, int kColumnBlocks>
using Fragment = float[kRowBlocks][kColumnBlocks][4];

// What the stages know of a warp's part of a tile.
struct ScoreTile {
  const AttnParams& p;
  const ScoreNumbers& numbers;
  int batch, head;
  int query, key;          // of the first column and row
  int query_end, key_end;  // queries and keys from here on are not this tile's
  int low, high;           // low <= key - query < high is visible (core/mask.h)
  int distance;            // seqlen_k - seqlen_q
  // Of each query of the head where lse has no room for log(l) (then m is what is called lse
  // below), else null.
  const RowWeight* rows;
  int lane_keys, key_step;  // from lane / 4 to the next, and from row to row of a lane

  // A lane's first; it has lane_key() + key_step * (2 * r + c / 2).
  __device__ __forceinline__ int lane_key() const { return key + threadIdx.x % 32 / 4 * lane_keys; }
  __device__ __forceinline__ int lane_query() const { return query + threadIdx.x % 4 * 2; }
};

// ---- bias

__device__ __forceinline__ float bias_number(bool visible) {
  return visible ? 0.0f : -INFINITY;
}
template <class Number>
__device__ __forceinline__ float bias_number(Number x) {
  return to_float(x);
}

template <class Number, int kRowBlocks, int kColumnBlocks>
__device__ __forceinline__ void add_numbers(Fragment<kRowBlocks, kColumnBlocks>& s,
                                            const ScoreTile& tile,
                                            const void* numbers,
                                            float factor) {
  const Bias& bias = tile.p.bias;
  const int64_t down = here(bias.row), across = here(bias.col);
  const Number* from = static_cast<const Number*>(numbers) + tile.batch * bias.batch +
                       tile.head * bias.head + tile.lane_query() * down + tile.lane_key() * across;
  const bool inside = tile.query + 8 * kColumnBlocks <= tile.query_end &&
                      tile.key + 16 * kRowBlocks <= tile.key_end;
  if (inside && bias.col == 1) {
#pragma unroll
    for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const Number* row = from + (8 * n + c) * down;
#pragma unroll
        for (int k = 0; k < 2 * kRowBlocks; ++k) {
          float& x = s[k / 2][n][k % 2 * 2 + c];
          x = fmaf(bias_number(row[tile.key_step * k]), factor, x);
        }
      }
    }
    return;
  }
#pragma unroll
  for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const Number* row = from + (8 * n + c) * down;
      const bool live = tile.lane_query() + 8 * n + c < tile.query_end;
#pragma unroll
      for (int k = 0; k < 2 * kRowBlocks; ++k) {
        float& x = s[k / 2][n][k % 2 * 2 + c];
        if (live && tile.lane_key() + tile.key_step * k < tile.key_end)
          x = fmaf(bias_number(row[tile.key_step * k * across]), factor, x);
      }
    }
  }
}

// s += bias * factor; a boolean mask is 0 or -inf.
template <int kRowBlocks, int kColumnBlocks>
__device__ __forceinline__ void add_bias(Fragment<kRowBlocks, kColumnBlocks>& s,
                                         const ScoreTile& tile,
                                         float factor) {
  const Bias& bias = tile.p.bias;
  if (bias.boolean) {
    add_numbers<bool>(s, tile, bias.ptr, 1.0f);
  } else if (bias.dtype == DType::kBF16) {
    add_numbers<bf16>(s, tile, bias.ptr, factor);
  } else if (bias.dtype == DType::kF16) {
    add_numbers<f16>(s, tile, bias.ptr, factor);
  } else {
    add_numbers<float>(s, tile, bias.ptr, factor);
  }
}

// Whether the bias is what the product of K and Q is added to, so that its loads are under way
// together. Not a huge one, which huge lse betray.
__device__ __forceinline__ bool bias_first(const ScoreTile& tile) {
  return tile.numbers.inverse != 0 && tile.rows == nullptr;
}

// ---- features

// x -> cap tanh(scale x / cap), by tanh y = 1 - 2 / (e^2y + 1) of |y|. Calls keep(r, n, slopes)
// with 1 - tanh^2 of row block r, columns 16 n …, as an A operand.
template <class Element, int kRowBlocks, int kColumnBlocks, class Keep>
__device__ __forceinline__ void cap_scores(Fragment<kRowBlocks, kColumnBlocks>& s,
                                           float scale,
                                           float cap,
                                           const Keep& keep) {
  const float twice = scale / cap * 2.885390082f;  // 2 log2 e
#pragma unroll
  for (int n = 0; n < kColumnBlocks / 2; ++n) {
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
      uint32_t slopes[4];
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        float* x = &s[r][2 * n + pair / 2][pair % 2 * 2];
        float slope[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float y = x[c] * twice;
          const float inverse = ptx::reciprocal_approx(ptx::exp2_approx(fabsf(y)) + 1);
          slope[c] = 4 * inverse * (1 - inverse);
          x[c] = copysignf(fmaf(-2 * cap, inverse, cap), y);
        }
        slopes[pair] = pack_pair(Element(), slope[0], slope[1]);
      }
      keep(r, n, slopes);
    }
  }
}

// s -= slope * |i + seqlen_k - seqlen_q - j|.
template <int kRowBlocks, int kColumnBlocks>
__device__ __forceinline__ void add_alibi(Fragment<kRowBlocks, kColumnBlocks>& s,
                                          const ScoreTile& tile) {
  const Alibi& alibi = tile.p.alibi;
  const float slope = alibi.slopes[tile.batch * alibi.batch + tile.head];
  const float away = static_cast<float>(tile.lane_query() + tile.distance - tile.lane_key());
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
    for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float from_lane = static_cast<float>(8 * n + c % 2 - tile.key_step * (2 * r + c / 2));
        s[r][n][c] = fmaf(-slope, fabsf(away + from_lane), s[r][n][c]);
      }
    }
  }
}

// ---- visibility

// Bit 8 k + e of the result is set where the bit tile hides element e of the k-th 16 x 16 chunk of
// row blocks r, r + 1 … and columns 16 n …, kChunks of them in that order. Out of line: few tiles
// have bits.
template <int kColumnBlocks>
static __device__ __noinline__ uint32_t hidden_bits(const uint32_t* bits,
                                                    int block_q,
                                                    int block_k,
                                                    int query,
                                                    int lane_key,
                                                    int key_step,
                                                    int query_end,
                                                    int key_end,
                                                    int first_chunk) {
  constexpr int kAcross = kColumnBlocks / 2;
  const int words = (block_k + 31) / 32, lane = threadIdx.x % 32;
  uint32_t hidden = 0;
#pragma unroll 1
  for (int at = 0; at < 32; ++at) {
    const int chunk = first_chunk + at / 8, e = at % 8;
    const int i = query + chunk % kAcross * 16 + e / 4 * 8 + lane % 4 * 2 + e % 2;
    const int j = lane_key + key_step * (chunk / kAcross * 2 + e / 2 % 2);
    if (i >= query_end || j >= key_end) continue;
    const int in_block = j % block_k;
    const uint32_t word = bits[i % block_q * words + in_block / 32];
    hidden |= (~(word >> (in_block % 32)) & 1u) << at;
  }
  return hidden;
}

// The same of all chunks of a warp's part: bit e % 32 of word e / 32.
template <int kRowBlocks, int kColumnBlocks>
struct HiddenBits {
  static constexpr int kWords = (kRowBlocks * kColumnBlocks + 7) / 8;
  uint32_t word[kWords];

  // A tile that does not exist (-1 above all) hides nothing.
  __device__ __forceinline__ bool find(const ScoreTile& tile, int bit_tile) {
    const MaskSpec& spec = tile.p.mask;
    if (bit_tile < 0 || bit_tile >= spec.bit_tiles) return false;
    const int words = (spec.block_k + 31) / 32;
    const uint32_t* bits = spec.block_bits + int64_t{bit_tile} * spec.block_q * words;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      word[w] =
          hidden_bits<kColumnBlocks>(bits, spec.block_q, spec.block_k, tile.query, tile.lane_key(),
                                     tile.key_step, tile.query_end, tile.key_end, 4 * w);
    }
    return true;
  }

  __device__ __forceinline__ void apply(Fragment<kRowBlocks, kColumnBlocks>& prob) const {
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
      for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int bit = (r * kColumnBlocks / 2 + n / 2) * 8 + n % 2 * 4 + c;
          if (word[bit / 32] >> (bit % 32) & 1u) prob[r][n][c] = 0;
        }
      }
    }
  }
};

// Zeroes what is not visible. Only edges that the warp's part meets are looked at.
template <int kRowBlocks, int kColumnBlocks>
__device__ __forceinline__ void hide(Fragment<kRowBlocks, kColumnBlocks>& prob,
                                     const ScoreTile& tile) {
  constexpr int kRows = 16 * kRowBlocks, kColumns = 8 * kColumnBlocks;
  // key - query - low must lie in [0, width).
  const uint32_t width = static_cast<uint32_t>(tile.high - tile.low);
  const int corner = tile.key - tile.query - tile.low;
  if (corner < kColumns - 1 || corner + kRows > static_cast<int>(width)) {
    const int first = tile.lane_key() - tile.lane_query() - tile.low;
#pragma unroll
    for (int e = 0; e < kRowBlocks * kColumnBlocks * 4; ++e) {
      const int r = e / 4 / kColumnBlocks, n = e / 4 % kColumnBlocks, c = e % 4;
      const int key = tile.key_step * (2 * r + c / 2);
      if (static_cast<uint32_t>(first + key - 8 * n - c % 2) >= width) prob[r][n][c] = 0;
    }
  }
  if (tile.key + kRows <= tile.key_end && tile.query + kColumns <= tile.query_end) return;
  const int keys = tile.key_end - tile.lane_key(), queries = tile.query_end - tile.lane_query();
#pragma unroll
  for (int e = 0; e < kRowBlocks * kColumnBlocks * 4; ++e) {
    const int r = e / 4 / kColumnBlocks, n = e / 4 % kColumnBlocks, c = e % 4;
    const int key = tile.key_step * (2 * r + c / 2);
    if (key >= keys || 8 * n + c % 2 >= queries) prob[r][n][c] = 0;
  }
}

// ---- dropout

// Bit e is set where element e of a 16 x 16 chunk is dropped, wherever the chunk begins.
static __device__ __noinline__ uint32_t dropped_slowly(DropoutMask mask, int query, int key) {
  uint32_t dropped = 0;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int e = 0; e < 8; ++e) {
    const int i = query + e / 4 * 8 + lane % 4 * 2 + e % 2, j = key + e / 2 % 2 * 8 + lane / 4;
    const int at = dropout_lane(i, j);
    const Philox4 all = mask.lanes(i, j);
    const uint32_t low = at & 2 ? all.word[1] : all.word[0];
    const uint32_t high = at & 2 ? all.word[3] : all.word[2];
    const uint32_t value = (at & 4 ? high : low) >> (at % 2 * 16) & 0xffffu;
    dropped |= uint32_t{value >= mask.keep_below} << e;
  }
  return dropped;
}

// Marks dropped probabilities by their sign (-0 is dropped too). mask: of head 0. A call of Philox
// serves queries i, i + 8 and keys j, j + 8, j + 16, j + 24, which are a thread's. Tiles that begin
// between multiples of 16 queries or 32 keys, which odd block masks make, go element by element;
// kAligned: there are none.
template <bool kAligned, int kRowBlocks, int kColumnBlocks>
__device__ __forceinline__ void mark_dropped(Fragment<kRowBlocks, kColumnBlocks>& prob,
                                             const ScoreTile& tile,
                                             DropoutMask mask) {
  mask.seed_low = ptx::uniform(mask.seed_low);
  mask.seed_high = ptx::uniform(mask.seed_high);
  mask.plane += tile.head;
  const bool second = kRowBlocks == 1 && tile.key % 32 == 16;  // half of a call's keys
  if (!kAligned && (tile.query % 16 != 0 || (tile.key % 32 != 0 && !second))) {
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
      for (int n = 0; n < kColumnBlocks; n += 2) {
        const uint32_t dropped = dropped_slowly(mask, tile.query + 8 * n, tile.key + 16 * r);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          float& x = prob[r][n + e / 4][e % 4];
          if (dropped >> e & 1u) x = -x;
        }
      }
    }
    return;
  }
  // A lane as the high half of a word, whatever the low half is.
  const uint32_t limit = mask.keep_below << 16;
  const uint32_t rows = tile.query / 2 + threadIdx.x % 4 * 2;
  const uint32_t columns = tile.key / 32 * 8 + threadIdx.x % 32 / 4;
#pragma unroll
  for (int r = 0; r < kRowBlocks; r += 2) {
#pragma unroll
    for (int n = 0; n < kColumnBlocks; n += 2) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        Philox4 lanes = mask.call(rows + 4 * n + c, columns + 4 * r);
        if (second) lanes.word[0] = lanes.word[1], lanes.word[2] = lanes.word[3];
#pragma unroll
        for (int e = 0; e < 4 * min_of(2, kRowBlocks); ++e) {
          constexpr int kKeys = min_of(4, 2 * kRowBlocks);
          const int half = e / kKeys, k = e % kKeys;  // of the queries; of the keys, eight apart
          const uint32_t word = lanes.word[2 * half + k / 2];
          float& x = prob[r + k / 2][n + half][k % 2 * 2 + c];
          if ((k % 2 == 0 ? word << 16 : word) >= limit) x = -x;
        }
      }
    }
  }
}

// ---- all of it

// q . k (and the bias, where it comes first) -> scores in natural units, once multiplied by the
// factor that is returned. keep: cap_scores.
template <class Element, int kRowBlocks, int kColumnBlocks, class Keep>
__device__ __forceinline__ float to_scores(Fragment<kRowBlocks, kColumnBlocks>& s,
                                           const ScoreTile& tile,
                                           const Keep& keep) {
  const AttnParams& p = tile.p;
  const float scale = tile.numbers.scale, cap = tile.numbers.cap;
  const bool bias_last = p.bias.ptr != nullptr && !bias_first(tile);
  if (cap == 0 && p.alibi.slopes == nullptr && !bias_last) return scale;
  if (cap > 0) {
    cap_scores<Element>(s, scale, cap, keep);
  } else {
#pragma unroll
    for (int e = 0; e < kRowBlocks * kColumnBlocks * 4; ++e)
      s[e / 4 / kColumnBlocks][e / 4 % kColumnBlocks][e % 4] *= scale;
  }
  if (p.alibi.slopes != nullptr) add_alibi(s, tile);
  if (bias_last) add_bias(s, tile, 1.0f);
  return 1;
}

// Scores, of which each is to be multiplied by `factor`, -> probabilities. lse: of the lane's
// queries 8 n + 2 (lane % 4) + c % 2, in units of log2, +inf for those that see nothing.
template <int kRowBlocks, int kColumnBlocks>
__device__ __forceinline__ void to_probabilities(Fragment<kRowBlocks, kColumnBlocks>& s,
                                                 const float2 (&lse)[kColumnBlocks],
                                                 float factor) {
  const float to_log2 = factor * kLog2e;
#pragma unroll
  for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float base = c % 2 == 0 ? lse[n].x : lse[n].y;
        s[r][n][c] = ptx::exp2_approx(fmaf(s[r][n][c], to_log2, -base));
      }
    }
  }
}

// The same where lse has no room for log(l): it is m, in natural units.
template <int kRowBlocks, int kColumnBlocks>
__device__ __forceinline__ void to_huge_probabilities(Fragment<kRowBlocks, kColumnBlocks>& s,
                                                      const float2 (&m)[kColumnBlocks],
                                                      const ScoreTile& tile,
                                                      float factor) {
#pragma unroll
  for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int i = tile.lane_query() + 8 * n + c;
      const float weight = i < tile.query_end ? tile.rows[i].weight : 0.0f;
      const float base = c == 0 ? m[n].x : m[n].y;
#pragma unroll
      for (int k = 0; k < 2 * kRowBlocks; ++k) {
        float& x = s[k / 2][n][k % 2 * 2 + c];
        x = ptx::exp2_approx((__fmul_rn(x, factor) - base) * kLog2e) * weight;
      }
    }
  }
}

// One element of dS under dropout from what role 0 sent (a probability, times the slope of the
// softcap, negative where dropped), dP and delta. `scale`: of dropout.
__device__ __forceinline__ float dropped_gradient(float sent, float dp, float delta, float scale) {
  const float kept = fmaf(dp, scale, -delta);
  return fabsf(sent) * (signbit(sent) ? -delta : kept);
}

}  // namespace flash_attn::sm80
