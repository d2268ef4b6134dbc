// SPDX-License-Identifier: BSD-3-Clause
// Where element chunks of a tile lie in shared memory: panels of 128 bytes a row (64 columns, 32 of
// fp32), the eight 16-byte chunks of a row permuted by its number, so that ldmatrix (eight rows of
// one chunk) and 16-byte stores along a row both touch every bank once.
#pragma once

#include <cstdint>

#include "core/types.h"

namespace flash_attn {

constexpr int kPanelChunks = 8;
template <class Element>
constexpr int kChunkOf = 16 / sizeof(Element);  // elements in 16 bytes
template <class Element>
constexpr int kPanelOf = kPanelChunks* kChunkOf<Element>;
constexpr int kChunk = 8;          // of 16-bit elements
constexpr int kPanelColumns = 64;  // of 16-bit elements

// Byte offset of (row, chunk) in a tile of kRows rows.
template <int kRows>
__device__ __forceinline__ uint32_t tile_offset(int row, int chunk) {
  const int panel = chunk / kPanelChunks, inside = chunk % kPanelChunks;
  return static_cast<uint32_t>(((panel * kRows + row) * kPanelChunks + (inside ^ (row & 7))) * 16);
}

// Rows `row` … (a multiple of 8), chunks 2 * k … of a tile of kRows rows. `lane`: the tile's
// address and the offset of a lane in its first fragment.
template <int kRows>
__device__ __forceinline__ uint32_t fragment_at(uint32_t lane, int row, int k) {
  return (lane ^ (k % 4 * 32)) + (k / 4 * kRows + row) * 128;
}

// The same number, of which the compiler knows nothing: what is computed from it stays where it is
// used, instead of taking a register for the whole of a loop.
__device__ __forceinline__ uint32_t here(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ __forceinline__ int64_t here(int64_t x) {
  asm volatile("" : "+l"(x));
  return x;
}

__device__ __forceinline__ uint32_t smem_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

}  // namespace flash_attn
