// SPDX-License-Identifier: BSD-3-Clause
// How the producer of the forward kernel (forward.cuh) asks for the keys and values of a tile: as
// boxes of rows that follow each other in memory. A tile is one box, but of a paged cache as many
// as its pages ask for: a box lies in one page. A tile of fewer keys than the kernel's, because a
// block mask has smaller blocks, is filled with zeros: boxes asked for outside of the tensor, where
// nothing is read. So are those of a missing page and those past the last live key.
#pragma once

#include <numeric>

#include "core/pages.h"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/sm90/tensor_map.h"
#include "cuda/tile/forward_task.cuh"

namespace flash_attn::sm90 {

struct KeyMaps {
  CUtensorMap k, v;
  int box_rows, width;  // of a box; keys of a tile
  bool whole;           // a tile is one box
};

// ---- host

// Rows that follow each other: of a batch, of the packed tensor, of a page.
inline int64_t key_rows(const AttnParams& p) {
  if (p.pages.table != nullptr) return p.pages.page_size;
  return p.seq_k.cu_seqlens != nullptr ? p.seq_k.total : p.seqlen_k;
}

// How many such there are.
inline int64_t key_batches(const AttnParams& p) {
  if (p.pages.table != nullptr) return p.pages.num_pages;
  if (p.seq_k.cu_seqlens != nullptr) return 1;
  return p.seq_k.cache_batch_idx != nullptr ? p.seq_k.entries : p.batch;
}

// The largest number that divides a tile's rows, its keys and a page.
inline int key_box_rows(const AttnParams& p, int tile_rows, int block_n) {
  const int rows = std::gcd(tile_rows, block_n);
  return p.pages.table == nullptr ? rows : std::gcd(rows, p.pages.page_size);
}

// Whether the copy engine can read k or v: rows, heads and batches that begin at multiples of 16
// bytes. Heads and batches may repeat, rows not.
inline bool has_boxes(const TensorRef& t, const AttnParams& p) {
  const int64_t rows = key_rows(p), batches = key_batches(p);
  const int64_t strides =
      (rows > 1 ? t.row : 0) | (p.heads_k > 1 ? t.head : 0) | (batches > 1 ? t.batch : 0);
  return (rows <= 1 || t.row != 0) && strides % 8 == 0 &&
         reinterpret_cast<uintptr_t>(t.ptr) % 16 == 0;
}

// Without keys none are asked for; but pages may be missing.
inline bool has_keys(const AttnParams& p) {
  return key_rows(p) > 0 && key_batches(p) > 0;
}

inline bool has_boxes(const AttnParams& p) {
  if (!has_keys(p)) return p.pages.table == nullptr;
  return key_rows(p) <= INT32_MAX && has_boxes(p.k, p) && has_boxes(p.v, p);
}

// False where the driver refuses.
inline bool make_key_maps(KeyMaps* maps, const AttnParams& p, int tile_rows, int block_n) {
  maps->box_rows = key_box_rows(p, tile_rows, block_n);
  maps->width = block_n;
  maps->whole = p.pages.table == nullptr && block_n == tile_rows;
  if (!has_keys(p)) return true;
  const auto make = [&](CUtensorMap* map, const TensorRef& t, int dim) {
    return make_map(map, t, p.dtype, dim, key_rows(p), p.heads_k, key_batches(p), maps->box_rows);
  };
  return make(&maps->k, p.k, p.head_dim) && make(&maps->v, p.v, p.head_dim_v);
}

// ---- device, the producing warp

// Tiles that are one box each: as few instructions as can be, since the consumers need the issue
// slots. All lanes together.
template <class Tile>
struct WholeBoxes {
  const AttnParams& p;
  int batch, head, first_row;  // entry, key head and row of slot 0
  int row = 0;                 // of the tile's first key

  __device__ __forceinline__ WholeBoxes(
      const AttnParams& p_, const KeyMaps&, int*, const SeqInfo& seq, const ForwardTask& task)
      : p(p_),
        batch(static_cast<int>(seq.k_batch)),
        head(task.rows.head_first / p_.group_size()),
        first_row(static_cast<int>(seq.k_row)) {}

  __device__ __forceinline__ void foresee(int) const {}
  __device__ __forceinline__ bool find(int n) {
    row = first_row + n * Tile::kBlockN;
    return true;
  }
  // The box of k or v -> the tile at `smem`; its bytes count at `barrier`.
  template <int kDim>
  __device__ __forceinline__ void ask(const CUtensorMap& map,
                                      const TensorRef& t,
                                      uint32_t smem,
                                      uint32_t barrier) const {
    if (!ptx::elect()) return;
    ptx::mbarrier_expect(barrier, 2 * Tile::kBlockN * kDim);
#pragma unroll
    for (int panel = 0; panel < kDim / 64; ++panel) {
      ptx::load_box(smem + panel * Tile::kBlockN * 128, &map, panel * 64, row,
                    t.head == 0 ? 0 : head, t.batch == 0 ? 0 : batch, barrier);
    }
  }
};

// Other tiles: a box lies in one page or in one block of a mask.
template <class Tile>
struct KeyBoxes {
  const AttnParams& p;
  const KeyMaps& maps;
  int* pages;            // (kBlockN), shared: of the tile's boxes; -1 for zeros
  int batch, head;       // of the problem; key head
  int place, first_row;  // entry and row of slot 0; not paged
  int end;               // of the live slots
  int key = 0;           // the tile's first
  int entry = -1;        // of the table, for this lane's box of the next tile

  __device__ __forceinline__ KeyBoxes(const AttnParams& p_,
                                      const KeyMaps& maps_,
                                      int* pages_,
                                      const SeqInfo& seq,
                                      const ForwardTask& task)
      : p(p_),
        maps(maps_),
        pages(pages_),
        batch(task.batch),
        head(task.rows.head_first / p_.group_size()),
        place(static_cast<int>(seq.k_batch)),
        first_row(static_cast<int>(seq.k_row)),
        end(seq.k_len) {}

  // Asks for what find() wants to know of tile n, to wait for it meanwhile. The first 32 boxes.
  __device__ __forceinline__ void foresee(int n) {
    if (p.pages.table == nullptr) return;
    entry = entry_of(n * maps.width, threadIdx.x % 32 * maps.box_rows);
  }

  // Looks up the boxes of the tile foreseen. Whether all of its rows are keys.
  __device__ __forceinline__ bool find(int n) {
    key = n * maps.width;
    const bool whole = maps.width == Tile::kBlockN;
    if (p.pages.table == nullptr) return whole;
    bool missing = false;
    __syncwarp();
#pragma unroll 1
    for (int at = threadIdx.x % 32 * maps.box_rows; at < Tile::kBlockN;) {
      const bool live = at < maps.width && key + at < end;
      const bool exists = live && entry >= 0 && entry < p.pages.num_pages;
      pages[at / maps.box_rows] = exists ? entry : -1;
      missing |= live && !exists;
      at += 32 * maps.box_rows;
      if (at < Tile::kBlockN) entry = entry_of(key, at);
    }
    return __all_sync(0xffffffffu, whole && !missing);
  }

  // The boxes found, of k or v, -> the tile at `smem`; its bytes count at `barrier`.
  template <int kDim>
  __device__ __forceinline__ void ask(const CUtensorMap& map,
                                      const TensorRef& t,
                                      uint32_t smem,
                                      uint32_t barrier) const {
    if (!ptx::elect()) return;
    ptx::mbarrier_expect(barrier, 2 * Tile::kBlockN * kDim);
    const bool paged = p.pages.table != nullptr;
    const int from_head = t.head == 0 ? 0 : head;
    int row = paged ? key % p.pages.page_size : first_row + key;
    int page = paged ? pages[0] : place;
#pragma unroll 1
    for (int box = 1, at = 0; at < Tile::kBlockN; ++box) {
      const int next = at + maps.box_rows;
      int next_page = next < maps.width ? place : -1;
      if (paged && next < Tile::kBlockN) next_page = pages[box];
#pragma unroll
      for (int panel = 0; panel < kDim / 64; ++panel) {
        ptx::load_box(smem + (panel * Tile::kBlockN + at) * 128, &map, panel * 64, row, from_head,
                      t.batch == 0 ? min(page, 0) : page, barrier);
      }
      row += maps.box_rows;
      if (paged && row == p.pages.page_size) row = 0;
      at = next, page = next_page;
    }
  }

 private:
  // Of the table, for row `at` of the tile with keys from `first` on; -1 where there is none.
  __device__ __forceinline__ int entry_of(int first, int at) const {
    const int column = (first + at) / p.pages.page_size;
    const bool live = at < maps.width && first + at < end && column < p.pages.max_pages;
    return live ? p.pages.table[batch * p.pages.table_stride + column] : -1;
  }
};

}  // namespace flash_attn::sm90
