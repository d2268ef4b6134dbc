// SPDX-License-Identifier: BSD-3-Clause
// The forward kernel (forward.cuh) for many short tasks: a block fills a multiprocessor and stays
// there, doing one task after another, so that what one begins with and what another ends with is
// done beside products. For scores without features, since it is fast as long as its code is short:
// all warps walk all of it in each task; for the same reason block lists have an instance of their
// own (Hides).
//
// A task is block_m packed rows of one key head. Each role goes on to the next as soon as it has
// done its part of this one. Of the last warpgroup three warps find the tasks and
// bring their Q (persistent_schedule.cuh), and one produces; the others consume:
//
//   producer, one thread               consumers, a warpgroup of 64 rows each
//   for each key tile:                 1 wait for the task and for Q
//     wait until its stage is empty    2 wait for K;  S = Q K^T
//     which tile it is; K on its way   3 out += P V of the tile before, at the same time
//     wait; V on its way               4 S is there: K's stage is empty;  mask; m, l and P
//                                      5 out is there: V's stage is empty;  out to the new m
//                                      6 after the last: Q's stage is empty;  out += P V;  sink,
//                                        out / l and lse, from registers
//
// Shared memory: Q, kQStages of (kBlockM, head_dim) | K, kStages of (kBlockN, head_dim) | V |
// TaskState, kTasks | barriers: of each stage, full and empty | tiles.
#pragma once

#include <type_traits>

#include "cuda/launch.h"
#include "cuda/sm90/key_boxes.cuh"
#include "cuda/sm90/persistent_consumer.cuh"
#include "cuda/sm90/persistent_schedule.cuh"

namespace flash_attn::sm90 {

// ---- producer, one thread

// The box of k or v with its first key in `row`.
template <class Tile, int kDim>
__device__ __forceinline__ void load_key_box(
    const CUtensorMap& map, int row, int head, int batch, uint32_t to, uint32_t barrier) {
  ptx::mbarrier_expect(barrier, 2 * Tile::kBlockN * kDim);
#pragma unroll
  for (int panel = 0; panel < kDim / 64; ++panel) {
    ptx::load_box(to + panel * Tile::kBlockN * 128, &map, panel * 64, row, head, batch, barrier);
  }
}

template <class Element, class Tile>
__device__ __forceinline__ void produce_tasks(const AttnParams& p,
                                              const PersistentMaps& maps,
                                              TaskState<Tile>* states,
                                              uint32_t smem,
                                              const typename PersistentSizes<Tile>::Pipe& pipe,
                                              uint8_t* barriers) {
  using T = PersistentSizes<Tile>;
  typename T::Tasks turn;
  Uses<Tile::kStages> keys, values;
  while (true) {
    TaskState<Tile>& state = states[turn.stage()];
    ptx::mbarrier_wait(pipe.task_full(turn.stage()), turn.parity());
    if (!state.exists) return;
    const int head = state.key_head;
    const int row = static_cast<int>(state.seq.k_row), batch = static_cast<int>(state.seq.k_batch);
    // Its own where registers allow: each step reads and writes most of it.
    std::conditional_t<(T::kProducerRegisters < 40), KvTiles&, KvTiles> walk = state.walk;
    StageTile tile, after;
    bool more = walk.next(after);
    if (!more) after.n = -1;
    for (bool first = true; first || more; first = false) {
      tile = after;
      more = more && walk.next(after);
      tile.last = !more;
      ptx::mbarrier_wait(pipe.k_empty(keys.stage()), keys.parity() ^ 1);
      *pipe.tile(barriers, keys.stage()) = tile;
      const int key = row + tile.n * Tile::kBlockN;
      if (tile.n >= 0) {
        load_key_box<Tile, Tile::kHeadDim>(
            maps.k, key, p.k.head == 0 ? 0 : head, p.k.batch == 0 ? 0 : batch,
            smem + T::kK + keys.stage() * T::kKBytes, pipe.k_full(keys.stage()));
      } else {
        ptx::mbarrier_arrive(pipe.k_full(keys.stage()));
      }
      keys.advance();
      if (tile.n < 0) break;
      ptx::mbarrier_wait(pipe.v_empty(values.stage()), values.parity() ^ 1);
      load_key_box<Tile, Tile::kHeadDimV>(
          maps.v, key, p.v.head == 0 ? 0 : head, p.v.batch == 0 ? 0 : batch,
          smem + T::kV + values.stage() * T::kVBytes, pipe.v_full(values.stage()));
      values.advance();
    }
    ptx::mbarrier_arrive(pipe.task_empty(turn.stage()));
    turn.advance();
  }
}

template <class Element, class Tile, Hides kHides>
__global__ void __launch_bounds__(PersistentSizes<Tile>::kThreads, 1)
    persistent_kernel(const __grid_constant__ AttnParams p,
                      const __grid_constant__ ForwardGrid grid,
                      const __grid_constant__ PersistentMaps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using T = PersistentSizes<Tile>;
  extern __shared__ __align__(1024) uint8_t smem[];
  TaskState<Tile>* states = reinterpret_cast<TaskState<Tile>*>(smem + T::kState);
  uint8_t* barriers = smem + T::kBarriers;
  const typename T::Pipe pipe = {smem_address(barriers)};
  if (threadIdx.x == T::kConsumerThreads) pipe.init(Tile::kWarps);
  __syncthreads();

  if (threadIdx.x >= T::kConsumerThreads) {
    ptx::give_registers<T::kProducerRegisters>();
    if (threadIdx.x == T::kConsumerThreads)
      produce_tasks<Element, Tile>(p, maps, states, smem_address(smem), pipe, barriers);
    else if (threadIdx.x / 32 > Tile::kWarps)
      schedule<Element, Tile>(p, grid, maps, smem_address(smem), pipe, states);
  } else {
    ptx::take_registers<T::kConsumerRegisters>();
    TaskConsumer<Element, Tile, kHides> self(p, grid, states, smem_address(smem), pipe, barriers,
                                             uniform(threadIdx.x / 128));
    consume_tasks(self);
  }
#else
  __trap();  // code without Hopper's own instructions counts as older (code_architecture)
#endif
}

// ---- host

inline bool has_window(const AttnParams& p) {
  return p.mask.window_left >= 0 || p.mask.window_right >= 0;
}

// Whether tasks may differ in length: then a block that is free takes the next one, else each has
// its own.
inline bool tasks_differ(const AttnParams& p) {
  return has_window(p) || p.mask.blocks.index != nullptr || p.seq_q.cu_seqlens != nullptr ||
         p.seq_k.cu_seqlens != nullptr || p.seq_k.used != nullptr || p.seq_k.leftpad != nullptr;
}

// Bytes of the counter of tasks.
inline int64_t persistent_workspace(const AttnParams& p) {
  return tasks_differ(p) ? sizeof(unsigned) : 0;
}

// The blocks that stay, of a problem that the kernel takes and is fast for; 0: it is not one.
// `grid`: unsplit. `keys`: that a row sees on average.
template <class Element, class Tile>
int persistent_blocks(const AttnParams& p, const ForwardGrid& grid, int keys) {
  const bool aligned = p.head_dim_v % kChunk == 0 && copies_whole_chunks<Element>(p.out);
  if (p.pages.table != nullptr || grid.splits > 1 || !aligned || !has_small_steps(p)) return 0;
  if (has_window(p) && keys > Tile::kMostKeys) return 0;
  const int64_t listed = int64_t{p.mask.blocks.width} * p.mask.block_k;
  if (p.mask.blocks.index != nullptr && (!Tile::kAnyBlocks || listed > Tile::kMostListed)) return 0;
  int count = 0;
  if (count_multiprocessors(&count) != cudaSuccess) return 0;
  return grid.tasks > count ? count : 0;
}

// `keys`: the maps of k and v, of whole tiles.
template <class Element, class Tile>
cudaError_t launch_persistent(const AttnParams& p,
                              ForwardGrid grid,
                              const KeyMaps& keys,
                              int blocks,
                              void* workspace,
                              cudaStream_t stream) {
  using T = PersistentSizes<Tile>;
  PersistentMaps maps = {};
  static_cast<KeyMaps&>(maps) = keys;
  maps.boxes =
      grid.block_m % grid.group == 0 && make_query_map(&maps.q, p, grid.group, Tile::kBlockM);
  if (tasks_differ(p)) {
    grid.next = static_cast<unsigned*>(workspace);
    const cudaError_t error = cudaMemsetAsync(workspace, 0, sizeof(unsigned), stream);
    if (error != cudaSuccess) return error;
  }
  const auto launch = [&](auto kernel) {
    return launch_shared(kernel, blocks, T::kThreads, T::kBytes, stream, p, grid, maps);
  };
  if constexpr (Tile::kAnyBlocks) {
    if (p.mask.blocks.index != nullptr)
      return launch(persistent_kernel<Element, Tile, Hides::kLists>);
  }
  return launch(persistent_kernel<Element, Tile, Hides::kWindows>);
}

}  // namespace flash_attn::sm90
