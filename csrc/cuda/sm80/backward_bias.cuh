// SPDX-License-Identifier: BSD-3-Clause
// The bias in the backward kernel where keys lie by lane: a thread's neighbouring keys are read at
// once, and that of a warp's next part while it works on this one.
#pragma once

#include "cuda/sm80/backward_scores.cuh"

namespace flash_attn::sm80 {

__host__ __device__ constexpr int bias_bytes(const Bias& bias) {
  return bias.boolean ? 1 : bias.dtype == DType::kF32 ? 4 : 2;
}

// Whether keys shall lie by lane for it: numbers of 16 bits or booleans, in aligned runs, of which
// a warp's kWarpKeys keys make 8; and no dropout, whose calls each serve keys eight apart.
template <int kWarpKeys>
bool bias_by_lane(const AttnParams& p, int block_n) {
  constexpr int kRun = kWarpKeys / 8;
  const Bias& bias = p.bias;
  if (bias.ptr == nullptr || bias.col != 1 || p.dropout.philox != nullptr) return false;
  const int64_t bytes = bias_bytes(bias);
  const int64_t bits =
      reinterpret_cast<int64_t>(bias.ptr) | (bias.batch | bias.head | bias.row) * bytes;
  return kRun >= 4 && bytes < 4 && bits % (kRun * bytes) == 0 && block_n % kRun == 0;
}

// Elsewhere nothing is held.
struct NoHeldBias {
  static constexpr bool kByLane = false;
};
template <int kRowBlocks, int kColumnBlocks>
struct HeldBias {
  static constexpr bool kByLane = true;
  static constexpr int kRun = 2 * kRowBlocks;  // keys of a lane
  static constexpr int kWords = ceil_div(kRun, 2);
  uint32_t word[2 * kColumnBlocks][kWords];  // of query 8 n + 2 (lane % 4) + c: word[2 n + c]
  bool held = false;                         // all lanes alike

  // Whether all of the part's bias exists.
  __device__ __forceinline__ static bool inside(const ScoreTile& tile) {
    return tile.query + 8 * kColumnBlocks <= tile.query_end &&
           tile.key + 16 * kRowBlocks <= tile.key_end;
  }

  __device__ __forceinline__ void load(const ScoreTile& tile) {
    const Bias& bias = tile.p.bias;
    const int64_t first = tile.batch * bias.batch + tile.head * bias.head +
                          tile.lane_query() * here(bias.row) + tile.lane_key();
    const uint8_t* from = static_cast<const uint8_t*>(bias.ptr) + first * bias_bytes(bias);
    const int64_t down = here(bias.row) * bias_bytes(bias);
    if (bias.boolean) {
      read<kRun>(from, down);
    } else {
      read<2 * kRun>(from, down);
    }
    held = true;
  }

  // s = bias * factor; 0 or -inf of a boolean.
  __device__ __forceinline__ void take(Fragment<kRowBlocks, kColumnBlocks>& s,
                                       const Bias& bias,
                                       float factor) const {
    if (bias.boolean) {
      each(s,
           [&](int q, int k) { return bias_number((word[q][k / 4] >> (k % 4 * 8) & 0xffu) != 0); });
    } else if (bias.dtype == DType::kBF16) {
      each(s, [&](int q, int k) {
        const uint32_t w = word[q][k / 2];
        return __uint_as_float(k % 2 == 0 ? w << 16 : w & 0xffff0000u) * factor;
      });
    } else {
      each(s, [&](int q, int k) {
        const float2 pair = unpack_pair(f16(), word[q][k / 2]);
        return (k % 2 == 0 ? pair.x : pair.y) * factor;
      });
    }
  }

 private:
  template <int kBytes>
  __device__ __forceinline__ void read(const uint8_t* from, int64_t down) {
#pragma unroll
    for (int q = 0; q < 2 * kColumnBlocks; ++q) {
      const uint8_t* at = from + (q / 2 * 8 + q % 2) * down;
      if constexpr (kBytes == 16) {
        const uint4 four = *reinterpret_cast<const uint4*>(at);
        word[q][0] = four.x, word[q][1] = four.y, word[q][2] = four.z, word[q][3] = four.w;
      } else if constexpr (kBytes == 8) {
        const uint2 two = *reinterpret_cast<const uint2*>(at);
        word[q][0] = two.x, word[q][1] = two.y;
      } else {
        word[q][0] = *reinterpret_cast<const uint32_t*>(at);
      }
    }
  }

  template <class Value>
  __device__ __forceinline__ static void each(Fragment<kRowBlocks, kColumnBlocks>& s,
                                              const Value& value) {
#pragma unroll
    for (int q = 0; q < 2 * kColumnBlocks; ++q) {
#pragma unroll
      for (int k = 0; k < kRun; ++k)
        s[k / 2][q / 2][k % 2 * 2 + q % 2] = value(q, k);
    }
  }
};

}  // namespace flash_attn::sm80
