// SPDX-License-Identifier: BSD-3-Clause
// Evenly spaced rows of global memory -> a swizzled tile in shared memory, by all threads of a
// block: what the backward pass loads (no pages, one head a tile).
#pragma once

#include "cuda/ptx/cp_async.cuh"
#include "cuda/tile/load.cuh"
#include "cuda/tile/operand.cuh"
#include "cuda/tile/swizzle.cuh"

namespace flash_attn {

// Rows that are not aligned.
template <int kRows, int kDim, int kThreads, class Element, class Order = KeysInOrder>
__device__ __forceinline__ void load_rows_slowly(
    uint32_t smem, const Element* source, int64_t stride, int live, int dim, Order order = {}) {
  constexpr int kChunks = kDim / kChunk;
#pragma unroll 1
  for (int at = static_cast<int>(here(threadIdx.x)) % kThreads; at < kRows * kChunks;
       at += kThreads) {
    const int row = at / kChunks, chunk = at % kChunks;
    const int key = order.row_key(row);
    const Element* from = key < live ? source + key * stride + chunk * kChunk : nullptr;
    load_chunk_slowly(smem + tile_offset<kRows>(row, chunk), from, dim - chunk * kChunk);
  }
}

// Rows [0, live) at `source`, `stride` elements apart, -> a (kRows, kDim) tile; the other rows, and
// columns from `dim` on, become zero and are not read. Asynchronous: the caller commits and waits.
// Row r of the tile is row order.row_key(r).
template <int kRows, int kDim, int kThreads, class Element, class Order = KeysInOrder>
__device__ __forceinline__ void load_rows(uint32_t smem,
                                          const Element* source,
                                          int64_t stride,
                                          int live,
                                          int dim,
                                          bool whole_chunks,
                                          Order order = {}) {
  if (!whole_chunks) {
    load_rows_slowly<kRows, kDim, kThreads>(smem, source, stride, live, dim, order);
    return;
  }
  constexpr int kStep = kThreads / kPanelChunks;  // rows of a panel at once
  static_assert(kRows % kStep == 0 && kStep % 8 == 0, "the swizzle of a row depends on row % 8");
  const int thread = static_cast<int>(here(threadIdx.x));
  const int chunk = thread % kPanelChunks, first = thread / kPanelChunks;
  const int first_key = order.row_key(first);
  const Element* from = source + first_key * stride + chunk * kChunk;
  const uint32_t to = smem + tile_offset<kRows>(first, chunk);
#pragma unroll
  for (int r = 0; r < kRows; r += kStep) {
#pragma unroll
    for (int panel = 0; panel < kDim / kPanelColumns; ++panel) {
      ptx::copy_async_16_if(
          true, to + panel * (kRows * 128) + r * 128, from + panel * kPanelColumns,
          first_key + order.row_key(r) < live && panel * kPanelColumns < dim - chunk * kChunk);
    }
    from += (order.row_key(r + kStep) - order.row_key(r)) * stride;
  }
}

// The same in pieces, a copy of 16 bytes a thread each, for loads that are spread over other work:
// a multiprocessor takes in about 40 bytes a clock, and who asks for more at once waits. kThreads
// threads, which count from a multiple of kThreads on, take part. Rows are whole chunks.
template <int kRows, int kDim, int kThreads, class Element>
struct RowPieces {
  static constexpr int kStep = kThreads / kPanelChunks, kPanels = kDim / kPanelColumns;
  static constexpr int kPieces = kRows / kStep * kPanels;
  static_assert(kRows % kStep == 0 && kStep % 8 == 0);

  const Element* from;
  int64_t step;  // elements from a piece's row to that of the next row's piece
  uint32_t to;
  int live, dim;  // rows and columns from this thread's first on
  bool wanted;

  // Pieces from `skipped` on, whole rows of them before.
  __device__ __forceinline__ RowPieces(uint32_t smem,
                                       const Element* source,
                                       int64_t stride,
                                       int live_rows,
                                       int columns,
                                       int skipped,
                                       bool wanted_)
      : step(kStep * stride), wanted(wanted_) {
    const uint32_t thread = here(threadIdx.x) % kThreads;
    const int chunk = thread % kPanelChunks, row = thread / kPanelChunks;
    const int first = row + skipped / kPanels * kStep;
    from = source + first * stride + chunk * kChunk;
    to = smem + tile_offset<kRows>(first, chunk);
    live = live_rows - first;
    dim = columns - chunk * kChunk;
  }

  // In ascending order.
  __device__ __forceinline__ void issue(int index) {
    const int row = index / kPanels * kStep, panel = index % kPanels;
    ptx::copy_async_16_if(wanted, to + panel * (kRows * 128) + row * 128,
                          from + panel * kPanelColumns, row < live && panel * kPanelColumns < dim);
    if (panel == kPanels - 1) from += step;
  }
};

}  // namespace flash_attn
