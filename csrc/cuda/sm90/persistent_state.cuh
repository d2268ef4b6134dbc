// SPDX-License-Identifier: BSD-3-Clause
// What the warps of the persistent kernel (persistent.cuh) hand to each other in shared memory:
// tasks, made ahead by three warps, and tiles.
#pragma once

#include "core/tiles.h"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/sm90/tile_config.h"
#include "cuda/tile/forward_state.cuh"

namespace flash_attn::sm90 {

// A task as the warps look it up.
template <class Tile>
struct alignas(16) TaskState {
  ForwardTask task;
  SeqInfo seq;
  KvTiles walk;  // the producer's
  void* out;     // of the sequence's first row and head
  float* lse;    // the same
  int key_head;
  bool exists;                       // false: there is no further task, and nothing else is set
  unsigned next;                     // number of the task after it
  int2 some_keys[Tile::kWarps / 4];  // [first, end) of those that some row of a warpgroup sees
  int2 all_keys[Tile::kWarps];       // and of those that all rows of a warp see
  RowPlace rows[Tile::kBlockM];

  // Whether some row of the tile's 64-row part `group` sees one of the keys [key, key + width);
  // whether all of a warp see all. Of the first, every lane knows that all know the same.
  __device__ __forceinline__ bool sees(uint32_t group, int key, int width) const {
    const int2 keys = some_keys[group];
    return keys.y > key && keys.x < key + width;
  }
  __device__ __forceinline__ bool sees_all(uint32_t warp, int key, int width) const {
    const int2 keys = all_keys[warp];
    return keys.x <= key && keys.y >= key + width;
  }

  // The rows of a warp, `warp_row` its first in the tile.
  __device__ __forceinline__ WarpRows warp_rows(int warp_row) const {
    return {rows + warp_row, task.begin + warp_row, task.rows.group};
  }

  // By three warps, `thread` of them: the first what there is once, the others the rows.
  __device__ __forceinline__ void fill(int thread,
                                       const AttnParams& p,
                                       const ForwardGrid& grid,
                                       const ForwardTask& of,
                                       const SeqInfo& its) {
    if (thread < 32) {
      if (thread != 0) return;
      task = of, seq = its, walk = key_walk(p, grid, its, of);
      key_head = grid.by_group(of.rows.head_first);
      out = static_cast<char*>(p.out.ptr) + its.q_offset(p.out, 0, 0) * dtype_bytes(p.dtype);
      lse = static_cast<float*>(p.lse) + its.lse_offset(p, 0, 0);
      return;
    }
    const Mask mask(p.mask, its);
    const int first = of.begin, last = of.end - 1;
    const auto position = [&](int row) { return of.rows.position(min(first + row, last)); };
#pragma unroll 1
    for (int r = thread - 32; r < Tile::kBlockM; r += 64) {
      const int i = position(r);
      rows[r] = {i, of.rows.head(min(first + r, last)), mask.first_key(i), mask.end_key(i)};
    }
    const int part = thread - 32;
    if (part < Tile::kWarps) {
      const int row = 16 * part;
      all_keys[part] = {mask.first_key(position(row + 15)), mask.end_key(position(row))};
    } else if (part >= 32 && part < 32 + Tile::kWarps / 4) {
      const int row = 64 * (part - 32);
      some_keys[part - 32] = {mask.first_key(position(row)),
                              first + row <= last ? mask.end_key(position(row + 63)) : 0};
    }
  }
};

// A stage's tile. n is negative where a task has none.
struct alignas(16) StageTile : KvTile {
  bool last;  // of the task
};

// Uses of the stages of a ring, one after the other: the stage, and the parity of the phase that
// ends when this use of it is there. One number where two are not needed: registers are few.
template <int kStages, bool kPowerOf2 = (kStages & (kStages - 1)) == 0>
struct Uses {
  uint32_t use = 0;
  __device__ __forceinline__ uint32_t stage() const { return use % kStages; }
  __device__ __forceinline__ uint32_t parity() const { return use / kStages % 2; }
  __device__ __forceinline__ void advance() { ++use; }
};
template <int kStages>
struct Uses<kStages, false> {
  uint32_t at = 0, phase = 0;
  __device__ __forceinline__ uint32_t stage() const { return at; }
  __device__ __forceinline__ uint32_t parity() const { return phase; }
  __device__ __forceinline__ void advance() {
    if (++at == kStages) at = 0, phase ^= 1;
  }
};

// Barriers and tile numbers in shared memory. Each stage has one barrier that ends a phase when it
// is filled, and one that does when all who read it are done.
template <int kStages, int kQStages, int kTasks>
struct TaskPipeline {
  static constexpr int kBarriers = 4 * kStages + 2 * kQStages + 2 * kTasks;
  static constexpr int kBytes = round_up(8 * kBarriers, 16) + 16 * kStages;
  uint32_t base;

  __device__ __forceinline__ uint32_t k_full(uint32_t stage) const { return at(0, stage); }
  __device__ __forceinline__ uint32_t k_empty(uint32_t stage) const { return at(kStages, stage); }
  __device__ __forceinline__ uint32_t v_full(uint32_t stage) const {
    return at(2 * kStages, stage);
  }
  __device__ __forceinline__ uint32_t v_empty(uint32_t stage) const {
    return at(3 * kStages, stage);
  }
  __device__ __forceinline__ uint32_t q_full(uint32_t stage) const {
    return at(4 * kStages, stage);
  }
  __device__ __forceinline__ uint32_t q_empty(uint32_t stage) const {
    return at(4 * kStages + kQStages, stage);
  }
  __device__ __forceinline__ uint32_t task_full(uint32_t stage) const {
    return at(4 * kStages + 2 * kQStages, stage);
  }
  __device__ __forceinline__ uint32_t task_empty(uint32_t stage) const {
    return at(4 * kStages + 2 * kQStages + kTasks, stage);
  }
  // Of the tile in K's stage. `barriers`: the same place as base.
  __device__ __forceinline__ StageTile* tile(uint8_t* barriers, uint32_t stage) const {
    return reinterpret_cast<StageTile*>(barriers + round_up(8 * kBarriers, 16)) + stage;
  }

  // By one thread.
  __device__ __forceinline__ void init(int consumer_warps) const {
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(k_full(stage), 1);
      ptx::mbarrier_init(v_full(stage), 1);
      ptx::mbarrier_init(k_empty(stage), consumer_warps);
      ptx::mbarrier_init(v_empty(stage), consumer_warps);
    }
    for (int stage = 0; stage < kQStages; ++stage) {
      ptx::mbarrier_init(q_full(stage), 1);
      ptx::mbarrier_init(q_empty(stage), consumer_warps);
    }
    for (int stage = 0; stage < kTasks; ++stage) {
      ptx::mbarrier_init(task_full(stage), 1);
      ptx::mbarrier_init(task_empty(stage), consumer_warps + 1);  // the producer reads it as well
    }
    ptx::mbarrier_init_fence();
  }

 private:
  __device__ __forceinline__ uint32_t at(int first, uint32_t stage) const {
    return base + 8 * (first + stage);
  }
};

// Sizes that follow from a tile's.
template <class Tile>
struct PersistentSizes : Tile {
  static constexpr int kConsumers = Tile::kWarps / 4, kConsumerThreads = 32 * Tile::kWarps;
  static constexpr int kThreads = kConsumerThreads + 128;
  // Tasks that are made ahead. Four were slower: blocks that have taken tasks keep others idle at
  // the end, and at 192 x 80 there was no room for a second Q.
  static constexpr int kTasks = 2;
  static constexpr uint32_t kQBytes = 2 * Tile::kBlockM * Tile::kHeadDim;
  static constexpr uint32_t kKBytes = 2 * Tile::kBlockN * Tile::kHeadDim;
  static constexpr uint32_t kVBytes = 2 * Tile::kBlockN * Tile::kHeadDimV;
  static constexpr uint32_t kStateBytes = kTasks * sizeof(TaskState<Tile>);
  // The next task's Q comes beside this one's where there is room.
  static constexpr uint32_t kRest = Tile::kStages * (kKBytes + kVBytes) + kStateBytes + 512;
  static constexpr int kQStages = 2 * kQBytes + kRest <= 227 * 1024 ? 2 : 1;
  static constexpr uint32_t kK = kQStages * kQBytes, kV = kK + Tile::kStages * kKBytes;
  static constexpr uint32_t kState = kV + Tile::kStages * kVBytes;
  static constexpr uint32_t kBarriers = kState + kStateBytes;
  using Tasks = Uses<kTasks>;
  using Queries = Uses<kQStages>;
  using Pipe = TaskPipeline<Tile::kStages, kQStages, kTasks>;
  static constexpr int kBytes = kBarriers + Pipe::kBytes;
  static_assert(kBytes <= 227 * 1024, "what a block of sm_90 may have");
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 232;
};

}  // namespace flash_attn::sm90
