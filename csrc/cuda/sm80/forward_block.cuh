// SPDX-License-Identifier: BSD-3-Clause
// What the blocks of the forward kernels (forward.cuh, forward_pair.cuh) have in common beside
// tile/forward_task.cuh and tile/forward_state.cuh: sizes, the walk over key tiles, loads.
#pragma once

#include "cuda/sm80/gemm.cuh"
#include "cuda/sm80/tile_config.h"
#include "cuda/tile/forward_state.cuh"

namespace flash_attn::sm80 {

template <class Element, class Tile>
constexpr int forward_smem_bytes() {
  return forward_tile_bytes<Tile>(sizeof(Element)) +
         static_cast<int>(sizeof(ForwardState<Element, Tile>));
}

// sm_75 has room for one block's shared memory: no use in keeping registers for more.
template <class Tile>
constexpr int blocks_per_sm() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  return 1;
#else
  return Tile::kBlocksPerSm;
#endif
}

// 2. Steps to the next tile of the walk; from the next barrier on state.tiles[stage] says which it
// is. All threads keep the position, kWalked when there is no further tile.
constexpr int kWalked = -1;

template <class Element, class Tile>
__device__ __forceinline__ bool next_tile(
    ForwardState<Element, Tile>& state, KvTiles walk, int& position, KvTile& tile, int stage) {
  walk.walk.resume(position);
  if (!walk.next(tile)) {
    position = kWalked;
    return false;
  }
  position = walk.walk.position();
  if (threadIdx.x == 0) state.tiles[stage] = tile;
  return true;
}

// Keys or values of tile n -> shared memory, values from `column0` on. Asynchronous.
template <class Tile, class Element, class Order = KeysInOrder>
__device__ __forceinline__ void load_k(const AttnParams& p,
                                       const ForwardGrid& grid,
                                       const KeySide<Element>& keys,
                                       int n,
                                       uint32_t smem,
                                       Order order = {}) {
  const int key = n * grid.block_n;
  const KeyRows<Element> rows = {p, p.k, keys.k, keys.batch, keys.first, keys.end};
  load_tile<Tile::kBlockN, Tile::kHeadDim, Tile::kWarps * 32>(smem, rows, key, key + grid.block_n,
                                                              p.head_dim, keys.k_whole, order);
}
template <class Tile, class Element, class Order = KeysInOrder>
__device__ __forceinline__ void load_v(const AttnParams& p,
                                       const ForwardGrid& grid,
                                       const KeySide<Element>& keys,
                                       int column0,
                                       int n,
                                       uint32_t smem,
                                       Order order = {}) {
  const int key = n * grid.block_n;
  const KeyRows<Element> rows = {p, p.v, keys.v + column0, keys.batch, keys.first, keys.end};
  load_tile<Tile::kBlockN, Tile::kHeadDimV, Tile::kWarps * 32>(
      smem, rows, key, key + grid.block_n, p.head_dim_v - column0, keys.v_whole, order);
}

}  // namespace flash_attn::sm80
