// SPDX-License-Identifier: BSD-3-Clause
// Forward attention where the accumulators of 32 rows do not fit a warp (head_dim 256): two warps
// share 32 rows. Each takes half the keys of a tile in Q K^T and half the columns of out in P V, so
// that a fragment of K or V still serves 32 rows; P crosses over in shared memory. The rest is the
// kernel of forward.cuh (kPlain):
//
//   1 Q and the first K on their way
//   2 for each key tile:  wait; all threads past the last tile;  V on its way
//   3   S = Q K^T, half the keys;  all threads done with K: the next K on its way;  mask
//   4   the two warps raise m together;  P of half the keys, to registers and shared memory
//   5   wait for V; out += P V, half the columns: first the own keys, then the partner's
//   6 the two sums l meet; out / l and lse; or a partial result
//
// Shared memory: Q (kBlockM, head_dim) | K (kBlockN, head_dim) | V (kBlockN, head_dim_v) | P
// (kBlockM, kBlockN) | ForwardState. V's place takes out at the end; what else the warps of a pair
// tell each other passes through their rows of P's place.
#pragma once

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/sm80/forward_block.cuh"
#include "cuda/tile/operand.cuh"

namespace flash_attn::sm80 {

// The two warps of a pair: 64 threads with a barrier of their own.
struct WarpPair {
  int id, half;  // of the pair in the block; of the warp in the pair

  __device__ WarpPair() : id(threadIdx.x / 64), half(threadIdx.x / 32 % 2) {}
  __device__ __forceinline__ void sync() const { ptx::barrier_sync(1 + id, 64); }
  __device__ __forceinline__ bool any(bool yes) const { return ptx::barrier_any(1 + id, 64, yes); }

  // What the partner holds for the same rows. `place`: 2 * 16 * kRowBlocks floats of the pair,
  // free again for other uses after the next sync.
  template <int kRowBlocks>
  __device__ __forceinline__ void exchange(const float (&mine)[kRowBlocks][2],
                                           float (&theirs)[kRowBlocks][2],
                                           uint32_t place) const {
    constexpr int kRows = 16 * kRowBlocks;
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (threadIdx.x % 4 == 0) {
          ptx::store_shared_4(place + 4 * (half * kRows + 16 * b + fragment_row(2 * h)),
                              __float_as_uint(mine[b][h]));
        }
    }
    sync();
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        theirs[b][h] =
            ptx::load_shared_4(place + 4 * ((half ^ 1) * kRows + 16 * b + fragment_row(2 * h)));
    }
  }
};

// 4. Raises m where a score of either warp asks for it.
template <class Element, int kRowBlocks, int kColumns, int kOutColumns>
__device__ __forceinline__ void pair_raise(Softmax<Element, kRowBlocks>& softmax,
                                           const float (&s)[kRowBlocks][kColumns][4],
                                           float (&out)[kRowBlocks][kOutColumns][4],
                                           const ScoreScale& scale,
                                           const WarpPair& pair,
                                           uint32_t place) {
  float most[kRowBlocks][2], theirs[kRowBlocks][2];
  if (!pair.any(softmax.passes(s, most, scale))) return;
  softmax.reduce(most, scale);
  pair.exchange(most, theirs, place);
#pragma unroll
  for (int b = 0; b < kRowBlocks; ++b) {
    most[b][0] = fmaxf(most[b][0], theirs[b][0]);
    most[b][1] = fmaxf(most[b][1], theirs[b][1]);
  }
  softmax.raise(most, out, scale);
  pair.sync();
}

// Where a warp of a pair reads and writes.
struct PairOperands {
  uint32_t q, k, v;  // lanes in the pair's rows of Q, the own half of the keys and of V's columns
  uint32_t p;        // P's tile

  // WarpPair::exchange: the pair's rows of it.
  __device__ __forceinline__ uint32_t place(const WarpPair& pair) const {
    return p + 32 * pair.id * 128;
  }
};

// 4 and 5 for a tile whose V has arrived. `sees_own`, `sees_other`: whether the pair's rows see
// something of this warp's half of the keys, and of the partner's.
template <class Element, class Tile, int kRowBlocks, int kColumns>
__device__ __forceinline__ void pair_add(float (&out)[kRowBlocks][Tile::kHeadDimV / 16][4],
                                         float (&s)[kRowBlocks][kColumns][4],
                                         Softmax<Element, kRowBlocks>& softmax,
                                         const ScoreScale& scale,
                                         const WarpPair& pair,
                                         const PairOperands& at,
                                         bool sees_own,
                                         bool sees_other) {
  constexpr int kBlockM = Tile::kBlockM, kBlockN = Tile::kBlockN;
  constexpr int kKeys = kBlockN / 2, kDimV = Tile::kHeadDimV / 2;
  const int pair_row = 32 * pair.id, own = pair.half * kKeys, other = kKeys - own;
  pair_raise(softmax, s, out, scale, pair, at.place(pair));
  softmax.prepare(s, scale);
  const auto own_weights = [&](uint32_t(&a)[kRowBlocks][4], int step) {
    softmax.weigh(s, scale, 2 * step, 2);
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
      to_operand<Element>(a[b], s[b][2 * step], s[b][2 * step + 1]);
      const int k = own / 16 + step;  // of 16 columns
      const uint32_t to = at.p + (k / 4 * kBlockM + pair_row + 16 * b) * 128;
      flash_attn::store_operand(to, k % 4, a[b]);
    }
  };
  if (sees_own) warp_matmul_pv<Element, kDimV, kKeys, kBlockN>(out, own_weights, at.v + own * 128);
  pair.sync();
  const auto other_weights = [&](uint32_t(&a)[kRowBlocks][4], int step) {
    const uint32_t from = at.p + pair_row * 128 + row_lane() + other / 64 * kBlockM * 128;
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b)
      ptx::load_matrix_x4(a[b], fragment_at<kBlockM>(from, 16 * b, step));
  };
  if (sees_other)
    warp_matmul_pv<Element, kDimV, kKeys, kBlockN>(out, other_weights, at.v + other * 128);
}

template <class Element, class Tile>
__global__ void __launch_bounds__(Tile::kWarps * 32, 1)
    forward_pair_kernel(const __grid_constant__ AttnParams p,
                        const __grid_constant__ ForwardGrid grid) {
  static_assert(Tile::kPairs && Tile::kBlockM == Tile::kBlockN);
  constexpr int kThreads = Tile::kWarps * 32, kBlockM = Tile::kBlockM, kBlockN = Tile::kBlockN;
  constexpr int kDim = Tile::kHeadDim, kRowBlocks = 2;
  constexpr int kKeys = kBlockN / 2, kDimV = Tile::kHeadDimV / 2;  // of a warp
  constexpr uint32_t kKBytes = sizeof(Element) * kBlockN * kDim;
  extern __shared__ __align__(1024) uint8_t smem[];
  ForwardState<Element, Tile>& state = *reinterpret_cast<ForwardState<Element, Tile>*>(
      smem + forward_tile_bytes<Tile>(sizeof(Element)));
  const uint32_t q_smem = smem_address(smem), k_smem = q_smem + sizeof(Element) * kBlockM * kDim;
  const uint32_t v_smem = k_smem + kKBytes, p_smem = v_smem + kKBytes;

  ForwardTask task(p, grid, blockIdx.x);
  const SeqInfo seq(p, task.batch);
  if (!task.cut(seq, grid.block_m)) return;
  load_tile<kBlockM, kDim, kThreads>(q_smem, QueryRows<Element>(p.q, seq, task.rows), task.begin,
                                     task.end, p.head_dim,
                                     copies_whole_chunks<Element>(p.q, p.head_dim));
  const KvTiles walk = key_walk(p, grid, seq, task);
  const KeySide<Element> keys(p, seq, task);
  int position = walk.walk.position();
  KvTile next;
  if (next_tile(state, walk, position, next, 0)) load_k<Tile>(p, grid, keys, next.n, k_smem);
  ptx::copy_async_commit();
  fill_state(p, grid, state, task, seq, walk, keys);

  const WarpPair pair;
  const int pair_row = 32 * pair.id;  // of the tile
  const int own = pair.half * kKeys;
  const PairOperands at = {q_smem + pair_row * 128 + row_lane(), k_smem + own * 128 + column_lane(),
                           v_smem + pair.half * (kDimV / 64) * kBlockN * 128 + row_lane(), p_smem};
  float out[kRowBlocks][kDimV / 8][4] = {};
  Softmax<Element, kRowBlocks> softmax;

  for (int turn = 0; position != kWalked; turn ^= 1) {
    ptx::copy_async_wait<0>();
    __syncthreads();
    load_v<Tile>(p, grid, state.keys, 0, state.tiles[turn].n, v_smem);
    ptx::copy_async_commit();
    const bool sees = state.sees(pair.id, state.tiles[turn].n * grid.block_n, grid.block_n);
    float s[kRowBlocks][kKeys / 8][4];
    if (sees) warp_matmul_qk<Element, kDim, kKeys, kBlockN, kBlockM, Tile::kAhead>(s, at.q, at.k);
    __syncthreads();
    const KvTile tile = state.tiles[turn];
    if (next_tile(state, state.walk, position, next, turn ^ 1))
      load_k<Tile>(p, grid, state.keys, next.n, k_smem);
    ptx::copy_async_commit();
    if (sees) {
      const int key = tile.n * grid.block_n + own;
      const bool whole = state.sees_all(pair.id, key, kKeys);
      if (tile.bits < 0 && p.pages.table == nullptr && grid.block_n == kBlockN) {
        if (!whole) apply_window(s, state.warp_rows(pair_row), key);
      } else {
        TileMask<kKeys / 32> hidden(p.pages, state.task.batch, key, grid.block_n - own, tile.bits);
        if (hidden.some(kKeys) || !whole) apply_mask(s, p.mask, state.warp_rows(pair_row), hidden);
      }
    }
    ptx::copy_async_wait<1>();
    __syncthreads();
    if (!sees) continue;
    pair_add<Element, Tile>(out, s, softmax, grid.scale, pair, at, true, true);
  }
  ptx::copy_async_wait<0>();
  __syncthreads();
  softmax.finish();
  float theirs[kRowBlocks][2];
  pair.exchange(softmax.l, theirs, at.place(pair));
#pragma unroll
  for (int b = 0; b < kRowBlocks; ++b)
    softmax.l[b][0] += theirs[b][0], softmax.l[b][1] += theirs[b][1];
  uint8_t* staging = smem + (v_smem - q_smem) + pair.half * (kDimV / 64) * kBlockM * 128;
  store_result(p, grid, state, pair_row, softmax.m, softmax.l, out, pair.half * kDimV, staging);
}

}  // namespace flash_attn::sm80
