// SPDX-License-Identifier: BSD-3-Clause
// A swizzled tile in shared memory -> rows in global memory.
#pragma once

#include "cuda/ptx/shared.cuh"
#include "cuda/tile/key_order.cuh"
#include "cuda/tile/swizzle.cuh"

namespace flash_attn {

// The first `rows` of kRows rows at `tile`, which lie in a tile of kTileRows, their first `dim`
// columns, by kThreads threads that count from a multiple of kThreads on. What they read must have
// been synchronised. Row r of the tile is row order.row_key(r).
template <int kTileRows,
          int kRows,
          int kDim,
          int kThreads,
          class Element,
          class Order = KeysInOrder>
__device__ __forceinline__ void store_tile_rows(uint32_t tile,
                                                Element* to,
                                                int64_t stride,
                                                int rows,
                                                int dim,
                                                bool whole_chunks,
                                                Order order = {}) {
  constexpr int kChunks = kDim / kChunk;
#pragma unroll 4
  for (int at = threadIdx.x % kThreads; at < kRows * kChunks; at += kThreads) {
    const int row = at / kChunks, chunk = at % kChunks, column = chunk * kChunk;
    const int key = order.row_key(row);
    if (key >= rows || column >= dim) continue;
    const uint4 value = ptx::load_shared_16(tile + tile_offset<kTileRows>(row, chunk));
    Element* address = to + key * stride + column;
    if (whole_chunks && column + kChunk <= dim) {
      *reinterpret_cast<uint4*>(address) = value;
      continue;
    }
    const uint32_t word[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
    for (int e = 0; e < kChunk; ++e) {
      if (column + e >= dim) continue;
      const uint16_t bits = static_cast<uint16_t>(word[e / 2] >> (e % 2 * 16));
      reinterpret_cast<uint16_t*>(address)[e] = bits;
    }
  }
}

// The same where all rows and `dim` are whole chunks.
template <int kTileRows, int kRows, int kDim, int kThreads, class Element>
__device__ __forceinline__ void store_whole_rows(
    uint32_t tile, Element* to, int64_t stride, int rows, int dim) {
  constexpr int kChunks = kDim / kChunk, kEven = kChunks & -kChunks;  // a power of two
  constexpr int kLine = kEven < kThreads ? kEven : kThreads;
  constexpr int kStep = kThreads / kLine;  // rows at once
  static_assert(kRows % kStep == 0 && kChunks % kLine == 0 && kThreads % kLine == 0);
  const int thread = threadIdx.x % kThreads, first = thread / kLine;
  Element* line = to + first * stride + thread % kLine * kChunk;
#pragma unroll
  for (int r = 0; r < kRows; r += kStep) {
#pragma unroll
    for (int c = 0; c < kChunks; c += kLine) {
      const int chunk = thread % kLine + c;
      if (first + r < rows && chunk * kChunk < dim) {
        *reinterpret_cast<uint4*>(line + c * kChunk) =
            ptx::load_shared_16(tile + tile_offset<kTileRows>(first + r, chunk));
      }
    }
    line += kStep * stride;
  }
}

}  // namespace flash_attn
