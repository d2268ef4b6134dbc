// SPDX-License-Identifier: BSD-3-Clause
// Backward attention with mma.sync and cp.async, for every GPU from sm_75 up.
//
//   1 delta = rowsum(out * dout) - dlse, and whether something is unusual  support/backward_prepare
//   2 dK, dV and the sum of dQ                                             backward_block
//   3 dq, and dk, dv where the query tiles were split                      support/backward_finish
#pragma once

#include <new>

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
    const uint32_t tiles = grid.slots / static_cast<uint32_t>(p.batch);
    return {static_cast<int>(slot / tiles), static_cast<int>(slot % tiles)};
  }
  return find_slot(p.seq_k, p.batch, p.seqlen_k, 1, grid.block_n, slot);
}

template <class Element, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    backward_kernel(const __grid_constant__ AttnParams p,
                    const __grid_constant__ BackwardGrid grid) {
  extern __shared__ __align__(1024) uint8_t smem[];
  const uint32_t split = blockIdx.x % grid.splits, block_index = blockIdx.x / grid.splits;
  const TileSlot slot = key_slot(p, grid, block_index % grid.slots);
  const int head_k = static_cast<int>(block_index / grid.slots);
  const SeqInfo seq(p, slot.batch);
  const int64_t begin = int64_t{slot.tile} * grid.block_n;
  if (begin < 0 || begin >= seq.k_len) return;
  const int key = static_cast<int>(begin);
  using State = BackwardState<Element>;
  static_assert(sizeof(State) <= Tile::kStateBytes);
  State& state = *reinterpret_cast<State*>(smem + Tile::kState);
  BackwardBlock<Element, Tile> block(p, grid, state, smem_address(smem));
  block.load_keys(seq, head_k, key);
  if (threadIdx.x == 0) {
    new (&state) State(p, grid, seq, slot.batch, head_k, key, static_cast<int>(split));
    block.advance(0);
    block.advance(1);
  }
  block.barrier_all();
  if (block.warp < Tile::kRoleWarps) {
    block.template run<0>();
  } else {
    block.template run<1>();
  }
}

// What the main kernel works with beside the tensors; all of it device memory.
struct MainWork {
  // {huge_lse, …}, from launch_prepare; and {m, 1 / l} of every row, read if huge_lse was found.
  const BackwardFindings* findings;
  const float2* rows;
  float* dq_accum;                 // (rows of lse, head_dim rounded up to 16), zero; null: no dq
  float *dk_partial, *dv_partial;  // (num_splits, key_rows, …), zero; null when num_splits is 1
};

// dk, dv and dq, those that are wanted; dq by a sum whose order is that of the blocks.
template <class Element, class Tile>
cudaError_t launch_main_kernel(const AttnParams& p,
                               const Plan& plan,
                               const MainWork& work,
                               cudaStream_t stream) {
  const int64_t slots = slot_count(p.seq_k, p.batch, p.seqlen_k, 1, plan.block_n);
  if (slots * p.heads_k * plan.num_splits > INT32_MAX) return cudaErrorInvalidConfiguration;
  BackwardGrid grid = {};
  grid.dq_accum = work.dq_accum;
  grid.dq_columns = round_up(p.head_dim, 16);
  grid.slots = static_cast<uint32_t>(slots);
  grid.block_m = plan.block_m;
  grid.block_n = plan.block_n;
  grid.findings = work.findings;
  grid.rows = work.rows;
  grid.splits = plan.num_splits;
  grid.dk_partial = work.dk_partial;
  grid.dv_partial = work.dv_partial;
  cudaError_t error = launch_shared(backward_kernel<Element, Tile>, slots * p.heads_k * grid.splits,
                                    Tile::kThreads, Tile::kSmemBytes, stream, p, grid);
  if (error == cudaSuccess && work.dq_accum != nullptr)
    error = launch_finish<Element>(query_target(p), work.dq_accum, 1, stream);
  if (grid.splits == 1) return error;
  if (error == cudaSuccess && p.grad.dk.ptr != nullptr)
    error = launch_finish<Element>(key_target(p, false), work.dk_partial, grid.splits, stream);
  if (error == cudaSuccess && p.grad.dv.ptr != nullptr)
    error = launch_finish<Element>(key_target(p, true), work.dv_partial, grid.splits, stream);
  return error;
}

// The workspace: what is zero before comes first. Every part begins at a multiple of 256 bytes.
struct BackwardWorkspace {
  char *findings, *dq_accum, *dk_partial, *dv_partial, *rows;
  int64_t bytes = 0, zero_bytes = 0;

  BackwardWorkspace(const AttnParams& p, int num_splits, void* base) {
    const auto take = [&](int64_t size) {
      char* at = static_cast<char*>(base) + bytes;
      bytes += round_up(size, int64_t{256});
      return at;
    };
    const bool sum_dq = p.grad.dq.ptr != nullptr && !p.grad.deterministic;
    findings = take(sizeof(BackwardFindings));
    dq_accum = take(sum_dq ? lse_rows(p) * round_up(p.head_dim, 16) * 4 : 0);
    const int64_t keys = num_splits > 1 ? num_splits * key_rows(p) * 4 : 0;
    dk_partial = take(keys * round_up(p.head_dim, 16));
    dv_partial = take(keys * round_up(p.head_dim_v, 16));
    zero_bytes = bytes;
    rows = take(lse_rows(p) * sizeof(float2));
  }

  MainWork main_work(const AttnParams& p) const {
    const bool sum_dq = p.grad.dq.ptr != nullptr && !p.grad.deterministic;
    return {reinterpret_cast<const BackwardFindings*>(findings),
            reinterpret_cast<const float2*>(rows),
            sum_dq ? reinterpret_cast<float*>(dq_accum) : nullptr,
            reinterpret_cast<float*>(dk_partial), reinterpret_cast<float*>(dv_partial)};
  }
};

inline int64_t backward_workspace(const AttnParams& p, int, int num_splits) {
  return BackwardWorkspace(p, num_splits, nullptr).bytes;
}

template <class Element, class Tile>
int launch_backward(const AttnParams& p, const Plan& plan, void* workspace, void* stream) {
  cudaStream_t on = static_cast<cudaStream_t>(stream);
  const BackwardWorkspace work(p, plan.num_splits, workspace);
  cudaError_t error = cudaMemsetAsync(work.findings, 0, work.zero_bytes, on);
  if (error == cudaSuccess)
    error = launch_prepare<Element>(p, reinterpret_cast<BackwardFindings*>(work.findings), on);
  if (error == cudaSuccess)
    error = launch_main_kernel<Element, Tile>(p, plan, work.main_work(p), on);
  return error;
}

// `arch`: the oldest it runs on, compute capability * 10.
template <class Element, class Numbers, Score kScore>
constexpr KernelRow backward_row(const char* name, int arch) {
  using Tile = BackwardTile<Numbers, kScore>;
  KernelRow row = {};
  row.name = name;
  row.family = "sm80";
  row.pass = Pass::kBackward;
  row.arch = arch;
  row.dtype = ElementTraits<Element>::kDType;
  row.head_dim = Tile::kHeadDim;
  row.head_dim_v = Tile::kHeadDimV;
  row.score = kScore;
  row.block_m = Tile::kBlockM;
  row.block_n = Tile::kBlockN;
  row.smem_bytes = Tile::kSmemBytes;
  row.shared_bytes = backward_workspace;
  row.cuda = launch_backward<Element, Tile>;
  return row;
}

}  // namespace flash_attn::sm80
