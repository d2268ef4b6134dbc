// SPDX-License-Identifier: BSD-3-Clause
// The bias of a warp's scores, any dtype and strides, from global memory. A thread reads the
// neighbouring keys that KeysByThread gives it many at a time.
#pragma once

#include "cuda/ptx/load.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/key_order.cuh"
#include "cuda/tile/masking.cuh"

namespace flash_attn {

// How the bias lies for a whole tile: runs of neighbouring keys aligned to 16 bytes (or to the
// whole run, where it is shorter); runs at least; or anything, and tiles that reach past the end.
enum class BiasLayout : uint8_t { kAligned, kRuns, kAny };

// A thread's bias of one row as it lies in memory: of kKeys keys of a tile, kKeys / 4 elements of
// kBytes bytes.
template <int kKeys, int kBytes>
struct BiasRow {
  using Order = KeysByThread<kKeys>;
  static constexpr int kEach = 4 / kBytes;  // elements in a word
  static constexpr int kRunWords = ceil_div(Order::kRun, kEach),
                       kWords = ceil_div(kKeys / 4, kEach);
  uint32_t word[kWords];

  // at: the thread's first element.
  __device__ __forceinline__ void load_aligned(const uint8_t* at) {
    constexpr int kWide = min_of(kRunWords, 4);
#pragma unroll
    for (int w = 0; w < kWords; w += kWide) {
      const uint8_t* from = at + w / kRunWords * (Order::kGroup * kBytes) + w % kRunWords * 4;
      if constexpr (kWide == 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(from);
        word[w] = four.x, word[w + 1] = four.y, word[w + 2] = four.z, word[w + 3] = four.w;
      } else if constexpr (kWide == 2) {
        const uint2 two = *reinterpret_cast<const uint2*>(from);
        word[w] = two.x, word[w + 1] = two.y;
      } else {
        word[w] = *reinterpret_cast<const uint32_t*>(from);
      }
    }
  }

  // The same into the L2 cache.
  __device__ __forceinline__ static void prefetch(const uint8_t* at) {
#pragma unroll
    for (int run = 0; run < kWords / kRunWords; ++run)
      ptx::prefetch_l2(at + run * (Order::kGroup * kBytes));
  }

  // Words around the run, shifted: the last may hold elements past it.
  __device__ __forceinline__ void load_runs(const uint8_t* at) {
    const int past = static_cast<int>(reinterpret_cast<uintptr_t>(at) % 4);
#pragma unroll
    for (int run = 0; run < kWords / kRunWords; ++run) {
      const uint32_t* from =
          reinterpret_cast<const uint32_t*>(at - past + run * (Order::kGroup * kBytes));
      uint32_t raw[kRunWords + 1];
#pragma unroll
      for (int w = 0; w < kRunWords; ++w)
        raw[w] = from[w];
      raw[kRunWords] = past != 0 ? from[kRunWords] : 0;
#pragma unroll
      for (int w = 0; w < kRunWords; ++w)
        word[run * kRunWords + w] = __funnelshift_r(raw[w], raw[w + 1], 8 * past);
    }
  }

  // Element by element: those of keys from `live` on (counted from the thread's first) are not
  // read. col: bytes from key to key.
  __device__ __forceinline__ void load_any(const uint8_t* at, int64_t col, int live) {
    uint32_t all[kWords];  // in local memory: registers have no index
#pragma unroll 1
    for (int w = 0; w < kWords; ++w) {
      uint32_t value = 0;
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const int element = w * kEach + e, key = Order::column_key(element / 2) + element % 2;
        value |= (key < live ? element_at(at + key * col) : 0) << (8 * kBytes * e % 32);
      }
      all[w] = value;
    }
#pragma unroll
    for (int w = 0; w < kWords; ++w)
      word[w] = all[w];
  }

  // Element e of booleans.
  __device__ __forceinline__ bool hides(int e) const {
    return (word[e / kEach] >> (e % 4 * 8) & 0xffu) == 0;
  }
  // Element e of numbers.
  __device__ __forceinline__ float value(int e, DType type) const {
    const uint32_t w = word[e / kEach];
    if constexpr (kBytes == 4) return __uint_as_float(w);
    if (type == DType::kBF16) return __uint_as_float(e % 2 == 0 ? w << 16 : w & 0xffff0000u);
    const __half2 pair = *reinterpret_cast<const __half2*>(&w);
    return e % 2 == 0 ? __low2float(pair) : __high2float(pair);
  }

 private:
  __device__ __forceinline__ static uint32_t element_at(const uint8_t* at) {
    if constexpr (kBytes == 4) return *reinterpret_cast<const uint32_t*>(at);
    if constexpr (kBytes == 2) return *reinterpret_cast<const uint16_t*>(at);
    return *at;
  }
};

// scores of this thread in row h of a 16-row block: s * unit + bias, or hidden by a boolean, which
// leaves the others alone. -inf hides even a score that is inf.
template <int kBytes, int kColumns>
__device__ __forceinline__ void add_bias_row(float (&s)[kColumns][4],
                                             int h,
                                             const BiasRow<8 * kColumns, kBytes>& row,
                                             float unit,
                                             DType type) {
#pragma unroll
  for (int e = 0; e < 2 * kColumns; ++e) {
    float& x = s[e / 2][2 * h + e % 2];
    if constexpr (kBytes == 1) {
      if (row.hides(e)) x = -INFINITY;
    } else {
      x = fmaf(ptx::min_or_nan(x, 3.4e38f), unit, row.value(e, type));
    }
  }
}

template <int kBytes, int kRowBlocks, int kColumns>
__device__ __forceinline__ void add_bias_as(float (&s)[kRowBlocks][kColumns][4],
                                            const Bias& bias,
                                            float unit,
                                            const WarpRows& rows,
                                            int batch,
                                            int key,
                                            int end) {
  using Row = BiasRow<8 * kColumns, kBytes>;
  constexpr int kAlign = min_of(16, Row::Order::kRun * kBytes);
  const int64_t bits = reinterpret_cast<int64_t>(bias.ptr) |
                       (bias.batch | bias.head | bias.row | key) * int64_t{kBytes};
  const bool words = Row::Order::kRun * kBytes % 4 == 0;  // in a run
  // load_runs reads whole words.
  const int past = key + 8 * kColumns + (bits % kAlign == 0 ? 0 : 4 / kBytes - 1);
  const BiasLayout layout = bias.col != 1 || !words || past > end ? BiasLayout::kAny
                            : bits % kAlign == 0                  ? BiasLayout::kAligned
                                                                  : BiasLayout::kRuns;
  const int first = key + Row::Order::thread_key();
  constexpr int kTogether = kBytes == 4 ? 2 : 2 * kRowBlocks;  // rows, by registers
#pragma unroll
  for (int r = 0; r < 2 * kRowBlocks; r += kTogether) {
    Row row[kTogether];
#pragma unroll
    for (int t = 0; t < kTogether; ++t) {
      const RowPlace place = rows((r + t) / 2, (r + t) % 2);
      const uint8_t* at =
          static_cast<const uint8_t*>(bias.ptr) + (batch * bias.batch + place.head * bias.head +
                                                   place.position * bias.row + first * bias.col) *
                                                      kBytes;
      if (layout == BiasLayout::kAligned) {
        row[t].load_aligned(at);
      } else if (layout == BiasLayout::kRuns) {
        row[t].load_runs(at);
      } else {
        row[t].load_any(at, bias.col * kBytes, end - first);
      }
    }
#pragma unroll
    for (int t = 0; t < kTogether; ++t) {
      const int b = (r + t) / 2, h = (r + t) % 2;
      if (kBytes == 2 && bias.dtype == DType::kF16) {
        add_bias_row<kBytes>(s[b], h, row[t], unit, DType::kF16);
      } else {
        add_bias_row<kBytes>(s[b], h, row[t], unit, DType::kBF16);
      }
    }
  }
}

// unit: of the scores, while those with the bias are in natural units; a boolean leaves the unit.
// Keys [key, key + 8 * kColumns) in the order KeysByThread; nothing from `end` on is read.
template <int kRowBlocks, int kColumns>
__device__ __forceinline__ void add_bias(float (&s)[kRowBlocks][kColumns][4],
                                         const Bias& bias,
                                         float unit,
                                         const WarpRows& rows,
                                         int batch,
                                         int key,
                                         int end) {
  if (bias.boolean) {
    add_bias_as<1>(s, bias, unit, rows, batch, key, end);
  } else if (bias.dtype == DType::kF32) {
    add_bias_as<4>(s, bias, unit, rows, batch, key, end);
  } else {
    add_bias_as<2>(s, bias, unit, rows, batch, key, end);
  }
}

// Whether the bias of every whole tile can be read in aligned runs, tiles beginning at multiples of
// kKeys keys.
template <int kKeys>
__host__ inline bool bias_is_aligned(const Bias& bias) {
  const int64_t bytes = bias.boolean ? 1 : bias.dtype == DType::kF32 ? 4 : 2;
  const int64_t bits =
      reinterpret_cast<int64_t>(bias.ptr) | (bias.batch | bias.head | bias.row) * bytes;
  return bias.col == 1 && bits % min_of(int64_t{16}, KeysByThread<kKeys>::kRun * bytes) == 0;
}

// The bias of a warp's rows where it is aligned and tiles are whole: read a tile ahead, or fp32, of
// which there would be too much for the registers, brought to the L2 cache.
template <int kRowBlocks, int kColumns>
struct BiasAhead {
  static constexpr bool kHides = true;
  static constexpr int kKeys = 8 * kColumns, kRows = 2 * kRowBlocks;
  const uint8_t* row[kRows];  // the thread's first key of tile 0
  BiasRow<kKeys, 2> held[kRows];

  __device__ __forceinline__ BiasAhead(const Bias& bias, const WarpRows& rows, int batch) {
    const int bytes = bytes_of(bias);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const RowPlace place = rows(r / 2, r % 2);
      row[r] = static_cast<const uint8_t*>(bias.ptr) +
               (batch * bias.batch + place.head * bias.head + place.position * bias.row +
                KeysByThread<kKeys>::thread_key()) *
                   bytes;
    }
  }

  __device__ __forceinline__ void load(const Bias& bias, int key) {
    if (bias.boolean) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        BiasRow<kKeys, 1> bytes;
        bytes.load_aligned(row[r] + key);
#pragma unroll
        for (int w = 0; w < BiasRow<kKeys, 1>::kWords; ++w)
          held[r].word[w] = bytes.word[w];
      }
    } else if (bias.dtype != DType::kF32) {
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        held[r].load_aligned(row[r] + int64_t{key} * 2);
    } else {
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        BiasRow<kKeys, 4>::prefetch(row[r] + int64_t{key} * 4);
    }
  }

  // Of the tile that was loaded, at `key`.
  __device__ __forceinline__ void add(float (&s)[kRowBlocks][kColumns][4],
                                      const Bias& bias,
                                      float unit,
                                      int key) const {
    if (bias.boolean) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        BiasRow<kKeys, 1> bytes;
#pragma unroll
        for (int w = 0; w < BiasRow<kKeys, 1>::kWords; ++w)
          bytes.word[w] = held[r].word[w];
        add_bias_row<1>(s[r / 2], r % 2, bytes, unit, DType::kF32);
      }
    } else if (bias.dtype == DType::kF32) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        BiasRow<kKeys, 4> numbers;
        numbers.load_aligned(row[r] + int64_t{key} * 4);
        add_bias_row<4>(s[r / 2], r % 2, numbers, unit, DType::kF32);
      }
    } else {
      if (bias.dtype == DType::kF16) {
#pragma unroll
        for (int r = 0; r < kRows; ++r)
          add_bias_row<2>(s[r / 2], r % 2, held[r], unit, DType::kF16);
      } else {
#pragma unroll
        for (int r = 0; r < kRows; ++r)
          add_bias_row<2>(s[r / 2], r % 2, held[r], unit, DType::kBF16);
      }
    }
  }

 private:
  __device__ __forceinline__ static int bytes_of(const Bias& bias) {
    return bias.boolean ? 1 : bias.dtype == DType::kF32 ? 4 : 2;
  }
};

}  // namespace flash_attn
