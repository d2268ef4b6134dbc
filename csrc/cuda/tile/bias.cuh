// SPDX-License-Identifier: BSD-3-Clause
// The bias of a warp's scores, any dtype and strides: fetched from global memory into registers
// before the product Q K^T, so that the product hides the latency, and added after it.
#pragma once

#include "cuda/tile/masking.cuh"

namespace flash_attn {

// Raw bits of the bias of a warp's scores (16 * kRowBlocks, 8 * kColumns). A pair of neighbouring
// columns of 1 or 2 bytes an element lies in word[0], low half first; of fp32 in word[0], word[1].
template <int kRowBlocks, int kColumns>
struct BiasTile {
  uint32_t word[kRowBlocks][2][kColumns][2];

  // Keys [key, key + 8 * kColumns), nothing from `end` on is read.
  __device__ __forceinline__ void load(
      const Bias& bias, const WarpRows& rows, int batch, int key, int end) {
    if (bias.boolean) {
      load_as<uint8_t, uint16_t>(bias, rows, batch, key, end);
    } else if (bias.dtype == DType::kF32) {
      load_as<uint32_t, uint2>(bias, rows, batch, key, end);
    } else {
      load_as<uint16_t, uint32_t>(bias, rows, batch, key, end);
    }
  }

  // -inf hides even a score that is inf or NaN.
  __device__ __forceinline__ void add_to(float (&s)[kRowBlocks][kColumns][4],
                                         const Bias& bias) const {
    if (bias.boolean) {
      add(s, [](const uint32_t(&w)[2]) {
        return make_float2((w[0] & 0xffffu) != 0 ? 0.0f : -INFINITY,
                           (w[0] >> 16) != 0 ? 0.0f : -INFINITY);
      });
    } else if (bias.dtype == DType::kF32) {
      add(s, [](const uint32_t(&w)[2]) {
        return make_float2(__uint_as_float(w[0]), __uint_as_float(w[1]));
      });
    } else if (bias.dtype == DType::kBF16) {
      add(s, [](const uint32_t(&w)[2]) {
        return make_float2(__uint_as_float(w[0] << 16), __uint_as_float(w[0] & 0xffff0000u));
      });
    } else {
      add(s, [](const uint32_t(&w)[2]) {
        return __half22float2(*reinterpret_cast<const __half2*>(&w[0]));
      });
    }
  }

 private:
  template <class Decode>
  __device__ __forceinline__ void add(float (&s)[kRowBlocks][kColumns][4],
                                      const Decode& decode) const {
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float2 value = decode(word[b][h][n]);
          float &x = s[b][n][2 * h], &y = s[b][n][2 * h + 1];
          x = value.x == -INFINITY ? -INFINITY : x + value.x;
          y = value.y == -INFINITY ? -INFINITY : y + value.y;
        }
      }
    }
  }

  // Each an element, Pair two of them.
  template <class Each, class Pair>
  __device__ __forceinline__ void load_as(
      const Bias& bias, const WarpRows& rows, int batch, int key, int end) {
    const bool paired = bias.col == 1 && key + 8 * kColumns <= end && key % 2 == 0 &&
                        reinterpret_cast<uintptr_t>(bias.ptr) % sizeof(Pair) == 0 &&
                        ((bias.batch | bias.head | bias.row) & 1) == 0;
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int first = key + fragment_column(0);
        const Each* at = static_cast<const Each*>(bias.ptr) + batch * bias.batch +
                         rows(b, h).head * bias.head + rows(b, h).position * bias.row +
                         first * bias.col;
        if (paired) {
#pragma unroll
          for (int n = 0; n < kColumns; ++n)
            put(word[b][h][n], *reinterpret_cast<const Pair*>(at + 8 * n));
        } else {
#pragma unroll
          for (int n = 0; n < kColumns; ++n, at += 8 * bias.col) {
            const int j = first + 8 * n;
            const uint32_t x = j < end ? at[0] : 0;
            const uint32_t y = j + 1 < end ? at[bias.col] : 0;
            word[b][h][n][0] = sizeof(Each) == 4 ? x : x | y << 16;
            word[b][h][n][1] = y;
          }
        }
      }
    }
  }

  __device__ __forceinline__ static void put(uint32_t (&word)[2], uint16_t bytes) {
    word[0] = __byte_perm(bytes, 0, 0x4140);
  }
  __device__ __forceinline__ static void put(uint32_t (&word)[2], uint32_t halves) {
    word[0] = halves;
  }
  __device__ __forceinline__ static void put(uint32_t (&word)[2], uint2 values) {
    word[0] = values.x;
    word[1] = values.y;
  }
};

}  // namespace flash_attn
