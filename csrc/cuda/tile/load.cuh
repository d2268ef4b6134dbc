// SPDX-License-Identifier: BSD-3-Clause
// Global memory -> a swizzled tile in shared memory, by all threads of a block. Rows are asked for
// one by one, so packed, paged and grouped rows are all alike; a row that does not exist becomes
// zero and is not read. Columns past the tensor's own are zero.
#pragma once

#include <type_traits>

#include "core/pages.h"
#include "core/rows.h"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/shuffle.cuh"
#include "cuda/tile/key_order.cuh"
#include "cuda/tile/swizzle.cuh"

namespace flash_attn {

// Query-side rows of one head group: packed row r -> pointer.
template <class Element>
struct QueryRows {
  const Element* base;
  int64_t row, head;
  int group, end;  // rows [0, end) exist

  __device__ QueryRows(const TensorRef& t, const SeqInfo& seq, const PackedRows& rows)
      : base(static_cast<const Element*>(t.ptr) + seq.q_offset(t, 0, rows.head_first)),
        row(t.row),
        head(t.head),
        group(rows.group),
        end(static_cast<int>(rows.rows(seq.q_len))) {}

  // Rows [begin, end) lie `row` apart from `base`.
  static constexpr int first = 0;
  __device__ __forceinline__ bool even() const { return group == 1; }
  __device__ __forceinline__ int64_t stride() const { return row; }

  __device__ __forceinline__ const Element* operator()(int r) const {
    if (r >= end) return nullptr;
    if (group == 1) return base + r * row;
    return base + (r / group) * row + (r % group) * head;
  }
};

// Element of slot 0 of a key head; of row 0 of page 0 when paged.
template <class Element>
__device__ __forceinline__ const Element* key_base(const AttnParams& p,
                                                   const TensorRef& t,
                                                   const SeqInfo& seq,
                                                   int head) {
  const Element* base = static_cast<const Element*>(t.ptr) + head * t.head;
  return p.pages.table == nullptr ? base + seq.k_offset(t, 0, 0) : base;
}

// Key-side rows of one head: slot j -> pointer. Holds references into the kernel's parameters,
// which lie in constant memory.
template <class Element>
struct KeyRows {
  const AttnParams& p;
  const TensorRef& t;
  const Element* base;    // key_base
  int batch, first, end;  // of the sequence; the live slots [first, end)

  __device__ __forceinline__ bool even() const { return p.pages.table == nullptr; }
  __device__ __forceinline__ int64_t stride() const { return t.row; }

  __device__ __forceinline__ const Element* operator()(int j) const {
    if (j < first || j >= end) return nullptr;
    if (p.pages.table == nullptr) return base + j * t.row;
    const int64_t page = page_of(p.pages, batch, j);
    if (page == kNoRow) return nullptr;
    return base + page * t.batch + int64_t{j % p.pages.page_size} * t.row;
  }
};

// Whether 16-byte copies may be used: every row begins at a multiple of 16 bytes (and no two
// neighbours are so far apart that 32 bits would not hold the bytes between some rows of a tile).
template <class Element>
FA_HD bool copies_whole_chunks(const TensorRef& t) {
  constexpr int kEach = 16 / sizeof(Element);
  return ((reinterpret_cast<uintptr_t>(t.ptr) % 16) | (t.batch % kEach) | (t.row % kEach) |
          (t.head % kEach)) == 0 &&
         t.row < (1 << 22);
}

// The same for loads of `dim` columns: no chunk is cut. (A copy of 16 bytes reads all of them, as
// far as the memory checker is concerned, however few it is told to.)
template <class Element>
FA_HD bool copies_whole_chunks(const TensorRef& t, int dim) {
  return dim % (16 / static_cast<int>(sizeof(Element))) == 0 && copies_whole_chunks<Element>(t);
}

// Tiles of kRows evenly spaced rows, of whole chunks. What a thread copies of a tile is its chunk
// of every kStep-th row, in each panel. Row r of the tile is row begin + row_key(r).
template <class Element, int kRows, int kDim, int kThreads, class Order = KeysInOrder>
struct WholeTiles {
  static constexpr int kPanels = kDim / kPanelColumns, kStep = kThreads / kPanelChunks;
  static_assert(kDim % kPanelColumns == 0 && kRows % kStep == 0 && kStep % 8 == 0);
  const char* source;  // of row 0
  int stride, dim;     // bytes from row to row; columns from the thread's own on
  uint32_t to;         // offset in the tile

  __device__ __forceinline__ WholeTiles(const Element* base, int64_t stride_, int dim_)
      : stride(static_cast<int>(stride_ * sizeof(Element))) {
    const int thread = ptx::thread_index();
    const int row = thread / kPanelChunks, column = thread % kPanelChunks * kChunk;
    source = reinterpret_cast<const char*>(base + column) + int64_t{Order::row_key(row)} * stride;
    dim = dim_ - column;
    to = tile_offset<kRows>(row, thread % kPanelChunks);
  }

  // Rows [begin, begin + kRows), which all exist, -> shared memory, columns past dim zero.
  // Asynchronous.
  __device__ __forceinline__ void load(uint32_t smem, int begin) const {
    copy(smem, begin, [](int) { return true; });
  }

  // The same where rows exist before `end`; the others become zero.
  __device__ __forceinline__ void load(uint32_t smem, int begin, int end) const {
    const int live = end - begin - Order::row_key(ptx::thread_index() / kPanelChunks);
    copy(smem, begin, [&](int r) { return Order::row_key(r) < live; });
  }

 private:
  template <class Exists>
  __device__ __forceinline__ void copy(uint32_t smem, int begin, const Exists& exists) const {
    const char* from = source + int64_t{begin} * stride;
#pragma unroll
    for (int r = 0; r < kRows; r += kStep) {
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        ptx::copy_async_16(smem + to + (panel * kRows + r) * 128,
                           from + int64_t{stride} * Order::row_key(r) + panel * 128,
                           panel * kPanelColumns < dim && exists(r) ? 16 : 0);
      }
    }
  }
};

// One chunk, element by element: for rows that are not aligned.
template <class Element>
__device__ __forceinline__ void load_chunk_slowly(uint32_t smem, const Element* source, int count) {
  using Bits = std::conditional_t<sizeof(Element) == 4, uint32_t, uint16_t>;
  constexpr int kEach = 4 / sizeof(Element);  // in a word
  uint32_t word[4] = {};
#pragma unroll
  for (int c = 0; c < 4 * kEach; ++c) {
    const bool live = source != nullptr && c < count;
    const uint32_t value = live ? reinterpret_cast<const Bits*>(source)[c] : 0;
    word[c / kEach] |= value << (c % kEach * 16);
  }
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(word[0]), "r"(word[1]),
               "r"(word[2]), "r"(word[3])
               : "memory");
}

// Rows [begin, begin + kRows) of `rows`, those before `limit`, -> the tile at `smem`, columns past
// `dim` zero. Asynchronous: the caller commits and waits. Eight neighbouring threads copy the 128
// bytes of a row that lie in one panel. Evenly spaced aligned rows, the usual case, take a path
// without branches. Row r of the tile is row begin + order.row_key(r).
template <int kRows, int kDim, int kThreads, class Rows, class Order = KeysInOrder>
__device__ __forceinline__ void load_tile(uint32_t smem,
                                          const Rows& rows,
                                          int begin,
                                          int limit,
                                          int dim,
                                          bool whole_chunks,
                                          Order order = {}) {
  using Element = std::remove_const_t<std::remove_pointer_t<decltype(rows.base)>>;
  constexpr int kEach = kChunkOf<Element>, kColumns = kPanelOf<Element>;  // of a chunk, of a panel
  constexpr int kPanels = kDim / kColumns, kStep = kThreads / kPanelChunks;
  constexpr uint32_t kPanelBytes = kRows * 128;
  static_assert(kDim % kColumns == 0);
  static_assert(kRows % kStep == 0 || kStep % kRows == 0);
  const int first = threadIdx.x / kPanelChunks, column = threadIdx.x % kPanelChunks * kEach;
  if (kStep > kRows && first >= kRows) return;
  // Of row first + r. The swizzle depends on row % 8, which steps of 8 rows leave alone.
  const uint32_t first_to = smem + tile_offset<kRows>(first, threadIdx.x % kPanelChunks);
  const auto to = [&](int r) {
    if constexpr (kStep % 8 == 0) return first_to + r * 128;
    return smem + tile_offset<kRows>(first + r, threadIdx.x % kPanelChunks);
  };
  const int end = min(rows.end, limit);
  if (__builtin_expect(whole_chunks && rows.even(), 1)) {
    const int stride = static_cast<int>(rows.stride());
    const int first_row = begin + order.row_key(first);
    const auto* source = rows.base + int64_t{first_row} * stride + column;
    // Rows [rows.first, end) exist, and of them the panels that begin before dim.
    const unsigned at = first_row - rows.first, span = max(end - rows.first, 0);
    unsigned live[kPanels];
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel)
      live[panel] = column + panel * kColumns < dim ? span : 0;
#pragma unroll
    for (int r = 0; r < kRows; r += kStep) {
      const int step = order.row_key(r);
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        ptx::copy_async_16(to(r) + panel * kPanelBytes,
                           source + int64_t{step * stride} + panel * kColumns,
                           at + step < live[panel] ? 16 : 0);
      }
    }
    return;
  }
#pragma unroll 1
  for (int r = 0; first + r < kRows; r += kStep) {
    const int row = begin + order.row_key(first + r);
    const auto* source = row < end ? rows(row) : nullptr;
    if (whole_chunks) {
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        const bool exists = source != nullptr && column + panel * kColumns < dim;
        ptx::copy_async_16(to(r) + panel * kPanelBytes,
                           exists ? source + column + panel * kColumns : rows.base,
                           exists ? 16 : 0);
      }
    } else {
#pragma unroll 1
      for (int from = column, panel = 0; panel < kPanels; from += kColumns, ++panel) {
        load_chunk_slowly(to(r) + panel * kPanelBytes, source == nullptr ? nullptr : source + from,
                          dim - from);
      }
    }
  }
}

}  // namespace flash_attn
