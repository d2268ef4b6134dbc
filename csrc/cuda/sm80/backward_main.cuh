// SPDX-License-Identifier: BSD-3-Clause
// dK, dV and the sum of dQ in 16 bits (backward_block.cuh), and dq from that sum, by the kernel's
// last blocks (support/backward_ring.cuh) or by one of its own, which makes dk and dv as well where
// they came in slices (support/backward_finish.cuh).
#pragma once

#include <type_traits>

#include "core/slots.h"
#include "cuda/launch.h"
#include "cuda/sm80/backward_block.cuh"
#include "cuda/tile/store.cuh"
#include "plan/plan.h"

namespace flash_attn::sm80 {

// Which keys of which sequence a slot is; by 32-bit division when not packed.
__device__ __forceinline__ TileSlot key_slot(const AttnParams& p,
                                             const BackwardGrid& grid,
                                             uint32_t slot) {
  if (p.seq_k.cu_seqlens == nullptr) {
    const uint32_t batch = grid.by_sequence_slots(slot);
    return {static_cast<int>(batch), static_cast<int>(slot - batch * grid.sequence_slots)};
  }
  return find_slot(p.seq_k, p.batch, p.seqlen_k, 1, grid.block_n, slot);
}

// Usual: sequences are all alike, there are no slices, rows are whole chunks. The kernel of
// BackwardTile::kUsual is told so.
template <class Element>
bool is_usual(const AttnParams& p, const BackwardGrid& grid) {
  const Sequence &q = p.seq_q, &k = p.seq_k;
  const bool alike = q.cu_seqlens == nullptr && k.cu_seqlens == nullptr && k.used == nullptr &&
                     k.leftpad == nullptr && k.cache_batch_idx == nullptr &&
                     p.pages.table == nullptr;
  return alike && grid.splits == 1 && p.dropout.philox == nullptr &&
         copies_whole_chunks<Element>(p.q, p.head_dim) &&
         copies_whole_chunks<Element>(p.k, p.head_dim) &&
         copies_whole_chunks<Element>(p.v, p.head_dim_v) &&
         copies_whole_chunks<Element>(p.grad.dout, p.head_dim_v) &&
         copies_whole_chunks<Element>(p.grad.dk, p.head_dim) &&
         copies_whole_chunks<Element>(p.grad.dv, p.head_dim_v);
}
__device__ __forceinline__ void assume_usual(const AttnParams& p, const BackwardGrid& grid) {
  __builtin_assume(p.seq_q.cu_seqlens == nullptr);
  __builtin_assume(p.seq_k.cu_seqlens == nullptr);
  __builtin_assume(p.seq_k.used == nullptr);
  __builtin_assume(p.seq_k.leftpad == nullptr);
  __builtin_assume(p.seq_k.cache_batch_idx == nullptr);
  __builtin_assume(p.pages.table == nullptr);
  __builtin_assume(p.dropout.philox == nullptr);
  __builtin_assume(grid.splits == 1);
}

template <class Element, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    backward_kernel(const __grid_constant__ AttnParams p,
                    const __grid_constant__ BackwardGrid grid) {
  extern __shared__ __align__(1024) uint8_t smem[];
  if constexpr (Tile::kUsual) assume_usual(p, grid);
  const uint32_t splits = grid.splits;
  const uint32_t block_index = splits == 1 ? blockIdx.x : blockIdx.x / splits;
  const uint32_t split = blockIdx.x - block_index * splits;
  const uint32_t head_k = grid.by_slots(block_index);
  const TileSlot slot = key_slot(p, grid, block_index - head_k * grid.slots);
  const SeqInfo seq(p, slot.batch);
  const int64_t begin = int64_t{slot.tile} * grid.block_n;
  if (begin < 0 || begin >= seq.k_len) return;
  const int key = static_cast<int>(begin), head = static_cast<int>(head_k);
  using State = BackwardState<Element, Tile>;
  static_assert(sizeof(State) <= Tile::kStateBytes);
  State& state = *reinterpret_cast<State*>(smem + Tile::kState);
  BackwardBlock<Element, Tile> block(p, grid, state, smem_address(smem));
  if (threadIdx.x == 0) {  // while the other warps ask for the keys
    // In registers first: nothing waits for shared memory then. One copy of the code.
    const BackwardFindings found = *grid.findings;
    State first(p, grid, seq, slot.batch, head, key, static_cast<int>(split));
#pragma unroll 1
    for (int to = 0; to < 2; ++to)
      first.advance(p, grid, state.steps[to]);
    state.take(first, found);
  }
  __syncwarp();
  block.load_keys(seq, head, key);
  block.barrier_all();
  if (block.warp < Tile::kRoleWarps) {
    block.template run<0>();
  } else {
    block.template run<1>();
  }
  if (!block.has_ring()) return;
  block.barrier_all();
  if (state.last) block.finish_group();
}

// What the main kernel works with beside the tensors; all of it device memory.
struct MainWork {
  // From launch_prepare: {huge_lse, …}, and what stands for lse.
  const BackwardFindings* findings;
  const RowWeight* rows;
  // (rows of lse or lines of the ring, head_dim rounded up to 16), zero; null: no dq.
  float* dq_accum;
  DqRing ring;
  float *dk_partial, *dv_partial;  // (num_splits, key_rows, …), zero; null when num_splits is 1
};

// Whether there is nothing but dropout, in tiles as BackwardTile::kDropout wants them.
inline bool only_dropout(const AttnParams& p) {
  return p.dropout.philox != nullptr && p.bias.ptr == nullptr && p.alibi.slopes == nullptr &&
         p.softcap == 0 && p.mask.block_q % 16 == 0 && p.mask.block_k % 32 == 0;
}

// With the narrower tile where the mask's blocks leave warps of this one without keys.
template <class Element, class Tile>
cudaError_t launch_tiles(const AttnParams& p, const BackwardGrid& grid, cudaStream_t stream) {
  if constexpr (!std::is_void_v<typename Tile::Narrow>) {
    using Narrow = BackwardTile<typename Tile::Narrow, Tile::kScore, Tile::kDropout>;
    if (grid.block_n <= Narrow::kBlockN) return launch_tiles<Element, Narrow>(p, grid, stream);
  }
  if constexpr (Tile::kScore == Score::kGeneral && !std::is_void_v<typename Tile::Dropout>) {
    using Dropout = BackwardTile<typename Tile::Dropout, Score::kPlain, true>;
    static_assert(Dropout::kSmemBytes <= Tile::kSmemBytes);
    if (only_dropout(p)) return launch_tiles<Element, Dropout>(p, grid, stream);
  }
  BackwardGrid own = grid;
  own.even =
      p.mask.blocks_t.index == nullptr && grid.tile_splits == 1 && grid.block_m == Tile::kBlockM;
  if constexpr (Tile::kScore == Score::kPlain && !std::is_void_v<typename Tile::Usual>) {
    using Usual = BackwardTile<typename Tile::Usual, Score::kPlain>;
    if (p.seqlen_q <= Tile::kMostUsual && (own.even || !Usual::kEven) && is_usual<Element>(p, own))
      return launch_tiles<Element, Usual>(p, grid, stream);
  }
  own.by_lane = Tile::kScore == Score::kGeneral && bias_by_lane<Tile::kWarpKeys>(p, grid.block_n);
  return launch_shared(backward_kernel<Element, Tile>,
                       int64_t{grid.slots} * p.heads_k * grid.splits, Tile::kThreads,
                       Tile::kSmemBytes, stream, p, own);
}

// dk, dv and dq, those that are wanted; dq by a sum whose order is that of the blocks.
template <class Element, class Tile>
cudaError_t launch_main_kernel(const AttnParams& p,
                               const Plan& plan,
                               const MainWork& work,
                               cudaStream_t stream) {
  const int64_t slots = slot_count(p.seq_k, p.batch, p.seqlen_k, 1, plan.block_n);
  if (slots * p.heads_k * plan.num_splits > INT32_MAX) return cudaErrorInvalidConfiguration;
  BackwardGrid grid = {};
  grid.numbers = ScoreNumbers(p);
  grid.dq_accum = work.dq_accum;
  grid.ring = work.ring;
  grid.ring.lines = ring_lines(p);
  grid.dq_columns = round_up(p.head_dim, 16);
  grid.slots = static_cast<uint32_t>(slots);
  grid.sequence_slots = grid.slots / static_cast<uint32_t>(max_of(p.batch, 1));
  grid.by_slots = Divisor(static_cast<int>(max_of(slots, int64_t{1})));
  grid.by_sequence_slots = Divisor(static_cast<int>(max_of(grid.sequence_slots, 1u)));
  grid.group = p.group_size();
  grid.block_m = plan.block_m;
  grid.block_n = plan.block_n;
  grid.findings = work.findings;
  grid.rows = work.rows;
  grid.tile_splits = max_of(1, plan.num_splits / p.group_size());
  grid.splits = grid.tile_splits * min_of(plan.num_splits, p.group_size());
  grid.ring.blocks = static_cast<int>(grid.sequence_slots) * grid.splits;
  grid.dk_partial = work.dk_partial;
  grid.dv_partial = work.dv_partial;
  cudaError_t error = launch_tiles<Element, Tile>(p, grid, stream);
  if (error == cudaSuccess && work.dq_accum != nullptr && work.ring.places == 0)
    error = launch_finish<Element>(query_target(p), work.dq_accum, 1, stream);
  if (grid.splits == 1) return error;
  if (error == cudaSuccess && p.grad.dk.ptr != nullptr)
    error = launch_finish<Element>(key_target(p, false), work.dk_partial, grid.splits, stream);
  if (error == cudaSuccess && p.grad.dv.ptr != nullptr)
    error = launch_finish<Element>(key_target(p, true), work.dv_partial, grid.splits, stream);
  return error;
}

}  // namespace flash_attn::sm80
