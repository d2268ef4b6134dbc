// SPDX-License-Identifier: BSD-3-Clause
// Hides scores: window, lengths, bit tiles of a block mask and missing pages, all as one word of
// visible keys for each row and 32 columns. Only for tiles that are not full.
#pragma once

#include "core/mask.h"
#include "core/pages.h"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/key_order.cuh"

namespace flash_attn {

// What a row of a tile is, looked up in shared memory: few tiles ask, and registers are few.
struct alignas(16) RowPlace {
  int position, head;
  int first_key, end_key;  // that it sees, but for block masks
};

// The rows of a warp. Those past the sequence's end repeat its last row.
struct WarpRows {
  const RowPlace* place;  // in shared memory, by row of the warp
  int first, group;       // packed row of the first, query heads that share a tile

  // Row h of the 16-row block b, of this thread.
  __device__ __forceinline__ const RowPlace& operator()(int b, int h) const {
    return place[16 * b + fragment_row(2 * h)];
  }
};

// Bits [0, n).
__device__ __forceinline__ uint32_t low_bits(int n) {
  return n >= 32 ? 0xffffffffu : n <= 0 ? 0u : (1u << n) - 1;
}

// 32 bits of a bit tile's row from bit `at` on; nothing past `words` words is read.
__device__ __forceinline__ uint32_t bits_from(const uint32_t* row, int at, int words) {
  const int word = at / 32;
  const uint32_t low = word < words ? row[word] : 0;
  if (at % 32 == 0) return low;
  const uint32_t high = word + 1 < words ? row[word + 1] : 0;
  return __funnelshift_r(low, high, at % 32);
}

// What a tile of keys hides beside the window: columns past its width, of a block's bit tile, of
// missing pages. All lanes of the warp.
template <int kWords>
struct TileMask {
  int key, width;            // keys [key, key + width)
  int bits;                  // bit tile, -1 for none
  uint32_t present[kWords];  // bit by key: it has a page; all ones without pages
  bool missing = false;

  __device__ __forceinline__
  TileMask(const Pages& pages, int batch, int key_, int width_, int bits_)
      : key(key_), width(width_), bits(bits_) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      present[w] = 0xffffffffu;
      if (pages.table == nullptr) continue;
      const int j = key + 32 * w + threadIdx.x % 32;
      present[w] = __ballot_sync(0xffffffffu, page_of(pages, batch, j) != kNoRow);
      missing |= present[w] != 0xffffffffu;
    }
  }

  __device__ __forceinline__ bool some(int columns) const {
    return missing || bits >= 0 || width < columns;
  }
};

// scores of (16 * kRowBlocks, 8 * kColumns) -> -inf where a row does not see the key.
template <class Order = KeysInOrder, int kRowBlocks, int kColumns>
__device__ __forceinline__ void apply_mask(float (&s)[kRowBlocks][kColumns][4],
                                           const MaskSpec& spec,
                                           const WarpRows& rows,
                                           const TileMask<ceil_div(kColumns, 4)>& tile) {
  const bool has_bits = tile.bits >= 0 && tile.bits < spec.bit_tiles;
  const int words = has_bits ? ceil_div(spec.block_k, 32) : 0;
#pragma unroll
  for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const RowPlace row = rows(b, h);
      const int low = row.first_key - tile.key;
      const int high = min(row.end_key - tile.key, tile.width);
      const uint32_t* bit_row = nullptr;
      if (has_bits) {
        const int64_t line = int64_t{tile.bits} * spec.block_q + row.position % spec.block_q;
        bit_row = spec.block_bits + line * words;
      }
#pragma unroll
      for (int w = 0; w < ceil_div(kColumns, 4); ++w) {
        uint32_t seen = low_bits(high - 32 * w) & ~low_bits(low - 32 * w) & tile.present[w];
        if (has_bits) seen &= bits_from(bit_row, tile.key % spec.block_k + 32 * w, words);
        seen >>= Order::thread_key();
#pragma unroll
        for (int n = 4 * w; n < 4 * w + 4 && n < kColumns; ++n) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            if ((seen >> (Order::column_key(n) % 32 + c) & 1u) == 0) s[b][n][2 * h + c] = -INFINITY;
          }
        }
      }
    }
  }
}

// Of a thread's keys of a tile, how many of the first ones come before `key`, counted from its own
// first: of each 4 * run keys it has the first `run`.
template <class Order>
__device__ __forceinline__ int keys_before(int key) {
  constexpr int kRun = Order::kRun == 0 ? 2 : Order::kRun;
  key = max(key, 0);
  return key / (4 * kRun) * kRun + min(key % (4 * kRun), kRun);
}

// The same where nothing but windows and lengths hides keys; `key` is the tile's first. As one word
// of a row's visible keys: its bits become predicates several at a time.
template <class Order = KeysInOrder, int kRowBlocks, int kColumns>
__device__ __forceinline__ void apply_window(float (&s)[kRowBlocks][kColumns][4],
                                             const WarpRows& rows,
                                             int key) {
  static_assert(kColumns <= 16);
  const int first = key + Order::thread_key();
#pragma unroll
  for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const RowPlace row = rows(b, h);
      const uint32_t seen = low_bits(keys_before<Order>(row.end_key - first)) &
                            ~low_bits(keys_before<Order>(row.first_key - first));
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if ((seen >> (2 * n + c) & 1u) == 0) s[b][n][2 * h + c] = -INFINITY;
        }
      }
    }
  }
}

}  // namespace flash_attn
