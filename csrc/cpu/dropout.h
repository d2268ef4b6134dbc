// SPDX-License-Identifier: BSD-3-Clause
// core/philox.h for a panel: which elements of a (keys, kPanel) tile dropout keeps. The generator
// runs down the lanes, each with the counter of its own query, so that a vector of calls gives four
// keys to all of them.
#pragma once

#include "cpu/panel.h"

namespace flash_attn::cpu {

template <class U>
[[gnu::always_inline]] inline void multiply_wide(U a, uint32_t b, U& high, U& low) {
#if defined(__x86_64__)
  if constexpr (kIsAvx512<U>) {
    const __m512i m = _mm512_set1_epi32(static_cast<int>(b));
    const __m512i even = _mm512_mul_epu32((__m512i)a, m);
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)a, 32), m);
    high = (U)_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
    low = (U)_mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
    return;
  }
#endif
  for (int l = 0; l < kLanes<U>; ++l) {
    const uint64_t product = uint64_t{a[l]} * b;
    high[l] = static_cast<uint32_t>(product >> 32);
    low[l] = static_cast<uint32_t>(product);
  }
}

// keep (keys, kPanel) <- 1 where kept, 0 where dropped.
template <class Arch, class Number>
void dropout_tile(float* keep,
                  const AttnParams& p,
                  const Panel<Arch, Number>& panel,
                  int batch,
                  int key,
                  int keys) {
  using U = Vec<uint32_t, Arch>;
  constexpr int kPanel = Shape<Arch, Number>::kPanel, kLane = kLanes<U>;
  const DropoutMask seed(p, batch, 0);
  for (int l0 = 0; l0 < kPanel; l0 += kLane) {
    U row, plane, second;
    for (int l = 0; l < kLane; ++l) {
      const int lane = min_of(l0 + l, kPanel - 1);
      const uint32_t i = static_cast<uint32_t>(panel.position[lane]);
      row[l] = i / 16 * 8 + i % 8;
      plane[l] = seed.plane + static_cast<uint32_t>(panel.head[lane]);
      second[l] = i / 8 % 2;
    }
    const int lanes = min_of(kLane, kPanel - l0);
    for (int j = key / 32 * 32; j < key + keys; j += 32) {
      for (int column = 0; column < 8; ++column) {
        U c0 = row, c1 = splat<U>(static_cast<uint32_t>(j / 32 * 8 + column)), c2 = plane;
        U c3 = splat<U>(seed.offset);
        uint32_t k0 = seed.seed_low, k1 = seed.seed_high;
        for (int round = 0; round < kPhiloxRounds; ++round) {
          U high0, low0, high1, low1;
          multiply_wide(c0, kPhiloxMul0, high0, low0);
          multiply_wide(c2, kPhiloxMul1, high1, low1);
          c0 = high1 ^ c1 ^ k0;
          c1 = low1;
          c2 = high0 ^ c3 ^ k1;
          c3 = low0;
          k0 += kPhiloxAdd0;
          k1 += kPhiloxAdd1;
        }
        // Lane 4p + m of a call: words 2p and 2p + 1 hold m = 0, 1 and 2, 3.
        const U first = second != 0 ? c2 : c0, next = second != 0 ? c3 : c1;
        const U value[4] = {first & 0xffffu, first >> 16, next & 0xffffu, next >> 16};
        for (int m = 0; m < 4; ++m) {
          const int r = j + column + 8 * m - key;
          if (r < 0 || r >= keys) continue;
          for (int l = 0; l < lanes; ++l)
            keep[int64_t{r} * kPanel + l0 + l] = value[m][l] < p.dropout.keep_below ? 1.0f : 0.0f;
        }
      }
    }
  }
}

}  // namespace flash_attn::cpu
