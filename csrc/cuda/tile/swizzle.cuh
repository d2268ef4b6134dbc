// SPDX-License-Identifier: BSD-3-Clause
// Where element chunks of a tile lie in shared memory: panels of 64 columns (128 bytes a row), the
// eight 16-byte chunks of a row permuted by its number, so that ldmatrix (eight rows of one chunk)
// and 16-byte stores along a row both touch every bank once.
#pragma once

#include <cstdint>

#include "core/types.h"

namespace flash_attn {

constexpr int kChunk = 8;          // 16-bit elements in 16 bytes
constexpr int kPanelColumns = 64;  // 128 bytes
constexpr int kPanelChunks = kPanelColumns / kChunk;

// Byte offset of (row, chunk) in a tile of kRows rows.
template <int kRows>
__device__ __forceinline__ uint32_t tile_offset(int row, int chunk) {
  const int panel = chunk / kPanelChunks, inside = chunk % kPanelChunks;
  return static_cast<uint32_t>(((panel * kRows + row) * kPanelChunks + (inside ^ (row & 7))) * 16);
}

__device__ __forceinline__ uint32_t smem_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

}  // namespace flash_attn
