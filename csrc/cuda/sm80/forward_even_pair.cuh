// SPDX-License-Identifier: BSD-3-Clause
// forward_even.cuh for pairs of warps (forward_pair.cuh). A block fills a multiprocessor, so nobody
// else works while its first tiles are on their way or out is written: blocks stay and do one task
// after another, and the Q and K of the next task are loaded beside the last tile of this one. Who
// is free takes the next task: under causal they differ in length.
#pragma once

#include "cuda/launch.h"
#include "cuda/sm80/forward_even.cuh"
#include "cuda/sm80/forward_pair.cuh"

namespace flash_attn::sm80 {

// In shared memory, in turns: a task, and the number of the one after it.
template <class Element, class Tile>
struct PairTasks {
  EvenTask<Element> task[2];
  WarpKeys keys[2][Tile::kWarps / 2];
  int n_end[2];  // EvenTask::tiles
  unsigned next[2];
};

// Shared memory of a block of either kernel.
template <class Element, class Tile>
constexpr int forward_even_bytes() {
  const size_t state =
      Tile::kPairs ? sizeof(PairTasks<Element, Tile>) : sizeof(EvenState<Element, Tile>);
  return forward_tile_bytes<Tile>(sizeof(Element)) + static_cast<int>(state);
}

template <class Element, class Tile>
__global__ void __launch_bounds__(Tile::kWarps * 32, 1)
    forward_even_pair_kernel(const __grid_constant__ AttnParams p,
                             const __grid_constant__ ForwardGrid grid) {
  static_assert(Tile::kPairs && Tile::kBlockM == Tile::kBlockN);
  constexpr int kThreads = Tile::kWarps * 32, kBlockM = Tile::kBlockM, kBlockN = Tile::kBlockN;
  constexpr int kDim = Tile::kHeadDim, kRowBlocks = 2;
  constexpr int kKeys = kBlockN / 2, kDimV = Tile::kHeadDimV / 2;  // of a warp
  constexpr uint32_t kBytes = sizeof(Element) * kBlockN * kDim;    // of Q, K and V alike
  using Keys = WholeTiles<Element, kBlockN, kDim, kThreads>;
  extern __shared__ __align__(1024) uint8_t smem[];
  PairTasks<Element, Tile>& state = *reinterpret_cast<PairTasks<Element, Tile>*>(
      smem + forward_tile_bytes<Tile>(sizeof(Element)));
  const uint32_t q_smem = smem_address(smem), k_smem = q_smem + kBytes, v_smem = k_smem + kBytes;
  const uint32_t p_smem = v_smem + kBytes;
  const WarpPair pair;
  const int pair_row = 32 * pair.id, own = pair.half * kKeys;  // of the tile
  const PairOperands at = {q_smem + pair_row * 128 + row_lane(), k_smem + own * 128 + column_lane(),
                           v_smem + pair.half * (kDimV / 64) * kBlockN * 128 + row_lane(), p_smem};

  const auto begin_task = [&](unsigned x, int turn) {
    const EvenTask<Element> task(p, grid, x);
    int n, n_end;
    task.template tiles<kBlockN>(kBlockM, n, n_end);
    WholeTiles<Element, kBlockM, kDim, kThreads>(task.q, p.q.row, p.head_dim)
        .load(q_smem, task.begin, task.q_len);
    Keys(task.k, p.k.row, p.head_dim).load(k_smem, n * kBlockN, task.k_len);
    const int thread = ptx::thread_index();
    if (thread == 0) state.task[turn] = task, state.n_end[turn] = n_end;
    if (thread % 64 == 0)
      state.keys[turn][pair.id] = task.keys_of(task.begin + pair_row, 16 * kRowBlocks);
  };
  const auto find_next = [&](int turn) {
    if (ptx::thread_index() != 0) return;
    state.next[turn] = gridDim.x + (grid.next == nullptr ? 0 : atomicAdd(grid.next, 1u));
  };
  begin_task(blockIdx.x, 0);
  ptx::copy_async_commit();
  find_next(0);
  __syncthreads();

  int turn = 0;
  do {
    const EvenTask<Element>& task = state.task[turn];
    int n, n_end;
    task.template tiles<kBlockN>(kBlockM, n, n_end);
    const auto window = [&]() -> WarpWindow<Element> {
      return {task, task.begin + pair_row, state.keys[turn][pair.id]};
    };
    float out[kRowBlocks][kDimV / 8][4] = {};
    Softmax<Element, kRowBlocks> softmax;
    for (; n >= state.n_end[turn]; --n) {
      ptx::copy_async_wait<0>();
      __syncthreads();
      Keys(task.v, p.v.row, p.head_dim_v).load(v_smem, n * kBlockN, task.k_len);
      ptx::copy_async_commit();
      const bool sees_own = window().sees(n * kBlockN + own, kKeys);
      const bool sees_other = window().sees(n * kBlockN + kKeys - own, kKeys);
      float s[kRowBlocks][kKeys / 8][4];
      if (sees_own) {
        warp_matmul_qk<Element, kDim, kKeys, kBlockN, kBlockM, Tile::kAhead>(s, at.q, at.k);
      } else {
#pragma unroll
        for (int e = 0; e < kRowBlocks * kKeys / 2; ++e)
          s[e / 4 / (kKeys / 8)][e / 4 % (kKeys / 8)][e % 4] = -INFINITY;
      }
      __syncthreads();
      if (n > state.n_end[turn]) {
        Keys(task.k, p.k.row, p.head_dim).load(k_smem, (n - 1) * kBlockN);
      } else {
        const unsigned x = state.next[turn];
        if (x < grid.tasks) begin_task(x, turn ^ 1);
      }
      ptx::copy_async_commit();
      if (sees_own) window().apply(s, n * kBlockN + own);
      ptx::copy_async_wait<1>();
      __syncthreads();
      if (sees_own || sees_other)
        pair_add<Element, Tile>(out, s, softmax, grid.scale, pair, at, sees_own, sees_other);
    }
    __syncthreads();  // V's place takes out
    softmax.finish();
    float theirs[kRowBlocks][2];
    pair.exchange(softmax.l, theirs, at.place(pair));
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b)
      softmax.l[b][0] += theirs[b][0], softmax.l[b][1] += theirs[b][1];
    store_even<kBlockM>(p, grid, task, task.begin + pair_row, softmax, out, pair.half * kDimV,
                        v_smem + (pair.half * (kDimV / 64) * kBlockM + pair_row) * 128);
    turn ^= 1;
    find_next(turn);
  } while (state.next[turn ^ 1] < grid.tasks);
}

// `counter`: one, of pairs alone.
template <class Element, class Tile>
cudaError_t launch_even(const AttnParams& p,
                        ForwardGrid grid,
                        unsigned* counter,
                        cudaStream_t stream) {
  fill_dense(p, grid);
  constexpr int kThreads = Tile::kWarps * 32, kBytes = forward_even_bytes<Element, Tile>();
  if constexpr (!Tile::kPairs) {
    auto* kernel = forward_even_kernel<Element, Tile, Walk::kRange>;
    if (p.mask.blocks.index != nullptr) kernel = forward_even_kernel<Element, Tile, Walk::kList>;
    return launch_shared(kernel, grid.tasks, kThreads, kBytes, stream, p, grid);
  } else {
    int blocks = 1;
    cudaError_t error = count_multiprocessors(&blocks);
    if (error == cudaSuccess && blocks < grid.tasks) {
      grid.next = counter;
      error = cudaMemsetAsync(counter, 0, sizeof(unsigned), stream);
    }
    if (error != cudaSuccess) return error;
    return launch_shared(forward_even_pair_kernel<Element, Tile>,
                         min_of(int64_t{blocks}, grid.tasks), kThreads, kBytes, stream, p, grid);
  }
}

}  // namespace flash_attn::sm80
