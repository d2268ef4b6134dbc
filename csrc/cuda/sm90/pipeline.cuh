// SPDX-License-Identifier: BSD-3-Clause
// How a block's producer and consumers hand tiles to each other, and where these lie.
#pragma once

#include "core/tiles.h"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/sm90/forward_features.cuh"
#include "cuda/sm90/tile_config.h"
#include "plan/kernel_list.h"

namespace flash_attn::sm90 {

// Sizes that follow from a tile's.
template <class Tile>
struct ForwardSizes : Tile {
  static constexpr int kConsumers = Tile::kWarps / 4, kConsumerThreads = 32 * Tile::kWarps;
  static constexpr int kThreads = kConsumerThreads + 128;
  static constexpr uint32_t kQBytes = 2 * Tile::kBlockM * Tile::kHeadDim;
  static constexpr uint32_t kKBytes = 2 * Tile::kBlockN * Tile::kHeadDim;
  static constexpr uint32_t kVBytes = 2 * Tile::kBlockN * Tile::kHeadDimV;
  static constexpr uint32_t kK = kQBytes, kV = kK + Tile::kStages * kKBytes;
  static constexpr uint32_t kState = kV + Tile::kStages * kVBytes;
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 24;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 240;
  template <class Element>
  static constexpr uint32_t barriers() {
    return round_up<uint32_t>(kState + sizeof(ForwardState<Element, Tile>), 16);
  }
  template <class Element>
  static constexpr uint32_t pages() {  // KeyBoxes::pages
    return barriers<Element>() + 4 * Tile::kStages * 8 + 16 * Tile::kStages;
  }
  // Of kGeneral.
  template <class Element>
  static constexpr uint32_t features() {
    return round_up<uint32_t>(smem_bytes<Element, Score::kPlain>(), 1024);
  }
  template <class Element, Score kScore>
  static constexpr int smem_bytes() {
    if (kScore == Score::kGeneral) return features<Element>() + kFeatureBytes<Element, Tile>;
    return pages<Element>() + 4 * Tile::kBlockN;
  }
};

// Stages of a ring, one after the other, and the parity of the phase that ends when this use of the
// stage is there.
template <int kStages>
struct Ring {
  uint32_t stage = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// Barriers and tile numbers in shared memory.
template <int kStages>
struct Pipeline {
  uint32_t base;
  __device__ __forceinline__ uint32_t k_full(uint32_t stage) const { return base + 8 * stage; }
  __device__ __forceinline__ uint32_t k_empty(uint32_t stage) const {
    return base + 8 * (kStages + stage);
  }
  __device__ __forceinline__ uint32_t v_full(uint32_t stage) const {
    return base + 8 * (2 * kStages + stage);
  }
  __device__ __forceinline__ uint32_t v_empty(uint32_t stage) const {
    return base + 8 * (3 * kStages + stage);
  }
  // Of the tile in K's stage; n is negative after the last.
  __device__ __forceinline__ KvTile* tile(uint8_t* smem_base, uint32_t stage) const {
    return reinterpret_cast<KvTile*>(smem_base + 32 * kStages) + stage;
  }

  __device__ __forceinline__ void init(int consumer_warps) const {
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(k_full(stage), 1);
      ptx::mbarrier_init(v_full(stage), 1);
      ptx::mbarrier_init(k_empty(stage), consumer_warps);
      ptx::mbarrier_init(v_empty(stage), consumer_warps);
    }
    ptx::mbarrier_init_fence();
  }
};

}  // namespace flash_attn::sm90
