// SPDX-License-Identifier: BSD-3-Clause
// Three warps of a persistent block (persistent.cuh) find the tasks that it does, ahead of the
// others, and bring their Q: asked for with the first keys, it came late.
#pragma once

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/sm90/key_boxes.cuh"
#include "cuda/sm90/persistent_state.cuh"

namespace flash_attn::sm90 {

constexpr int kSchedulers = 96;  // threads

__device__ __forceinline__ void schedulers_sync() {
  ptx::barrier_sync(1, kSchedulers);
}

struct PersistentMaps : KeyMaps {
  CUtensorMap q;
  bool boxes;  // the copy engine fetches Q as well
};

// The boxes of Q of a task. One thread.
template <class Tile>
__device__ __forceinline__ void load_query_boxes(const PersistentMaps& maps,
                                                 const TaskState<Tile>& state,
                                                 uint32_t to,
                                                 uint32_t barrier) {
  const PackedRows& rows = state.task.rows;
  const int first = static_cast<int>(state.seq.q_row) + rows.position(state.task.begin);
  const int head = rows.head_first / rows.group, batch = static_cast<int>(state.seq.q_batch);
  ptx::mbarrier_expect(barrier, PersistentSizes<Tile>::kQBytes);
#pragma unroll
  for (int panel = 0; panel < Tile::kHeadDim / 64; ++panel) {
    ptx::load_box(to + panel * Tile::kBlockM * 128, &maps.q, panel * 64, 0, first, head, batch,
                  barrier);
  }
}

// Q's rows of a task -> shared memory, where they are no boxes. Rows that do not exist are zero.
template <class Element, class Tile>
__device__ __forceinline__ void load_queries(int thread,
                                             const AttnParams& p,
                                             const TaskState<Tile>& state,
                                             uint32_t smem) {
  constexpr int kChunks = Tile::kHeadDim / kChunk;  // of a row
  const QueryRows<Element> rows(p.q, state.seq, state.task.rows);
  const bool whole = copies_whole_chunks<Element>(p.q, p.head_dim);
#pragma unroll 1
  for (int c = thread; c < Tile::kBlockM * kChunks; c += kSchedulers) {
    const int row = c / kChunks, chunk = c % kChunks, packed = state.task.begin + row;
    const Element* source = packed < state.task.end ? rows(packed) : nullptr;
    const uint32_t to = smem + tile_offset<Tile::kBlockM>(row, chunk);
    const int left = p.head_dim - chunk * kChunk;  // columns from here on
    if (whole) {
      const bool exists = source != nullptr && left > 0;
      ptx::copy_async_16(to, exists ? source + chunk * kChunk : rows.base, exists ? 16 : 0);
    } else {
      load_chunk_slowly(to, source == nullptr ? nullptr : source + chunk * kChunk, left);
    }
  }
  ptx::copy_async_commit();
  ptx::copy_async_wait<0>();
  ptx::proxy_fence();
}

// By kSchedulers threads.
template <class Element, class Tile>
__device__ __forceinline__ void schedule(const AttnParams& p,
                                         const ForwardGrid& grid,
                                         const PersistentMaps& maps,
                                         uint32_t smem,
                                         const typename PersistentSizes<Tile>::Pipe& pipe,
                                         TaskState<Tile>* states) {
  using T = PersistentSizes<Tile>;
  const int thread = threadIdx.x - T::kConsumerThreads - 32;
  typename T::Tasks turn;
  unsigned x = blockIdx.x, place = x;  // of this block in the round that x is in
  while (true) {
    TaskState<Tile>& state = states[turn.stage()];
    const bool exists = x < grid.tasks;
    // Another place in each round: those of a tile are the same in many rounds.
    unsigned next = x - place + gridDim.x;
    place = place + 1 == gridDim.x ? 0 : place + 1;
    next += place;
    if (thread == 0 && exists && grid.next != nullptr) next = gridDim.x + atomicAdd(grid.next, 1u);
    ForwardTask task(p, grid, exists ? x : 0);
    const SeqInfo seq(p, task.batch);
    const bool live = !exists || task.cut(seq, grid.block_m);
    ptx::mbarrier_wait(pipe.task_empty(turn.stage()), turn.parity() ^ 1);
    if (exists && live) state.fill(thread, p, grid, task, seq);
    if (thread == 0) state.exists = exists, state.next = next;
    schedulers_sync();
    x = state.next;
    if (!live) {
      schedulers_sync();  // before it is written again
      continue;
    }
    if (thread == 0) ptx::mbarrier_arrive(pipe.task_full(turn.stage()));
    if (!exists) return;
    const typename T::Queries queries = {turn.use};
    const uint32_t to = smem + queries.stage() * T::kQBytes, full = pipe.q_full(queries.stage());
    if (!maps.boxes || thread == 0)
      ptx::mbarrier_wait(pipe.q_empty(queries.stage()), queries.parity() ^ 1);
    if (maps.boxes) {
      if (thread == 0) load_query_boxes<Tile>(maps, state, to, full);
    } else {
      load_queries<Element>(thread, p, state, to);
      schedulers_sync();
      if (thread == 0) ptx::mbarrier_arrive(full);
    }
    turn.advance();
  }
}

}  // namespace flash_attn::sm90
