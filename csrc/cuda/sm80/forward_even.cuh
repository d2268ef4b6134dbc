// SPDX-License-Identifier: BSD-3-Clause
// Forward attention where keys lie evenly in memory: dense and packed sequences, causal and
// windowed, of aligned rows; one head a tile, whole tiles, all keys. That is nearly every problem,
// so the kernel has nothing but it: what a block needs to know stays in registers, its start and
// its end are short, and one loop of few instructions takes every tile. The rest is the work of
// forward.cuh.
//
//   1 Q and the first K, then the first V on their way
//   2 for each key tile, from the last to the first:  next K and V on their way
//   3   S = Q K^T;  window, on tiles that it cuts
//   4   online softmax: m; then, 16 keys at a time,  5 P and  out += P V
//   6 sink, out / l and lse
//
// Shared memory: Q (kBlockM, head_dim) | K, two stages (kBlockN, head_dim) | V, two (kBlockN,
// head_dim_v). Q's place takes out at the end: a warp reads and writes its own rows.
#pragma once

#include <cstdint>

#include "cuda/sm80/forward_block.cuh"
#include "cuda/tile/operand.cuh"
#include "cuda/tile/store_rows.cuh"
#include "plan/plan.h"

namespace flash_attn::sm80 {

// Whether there are kernels for a row, and whether they take a problem.
template <class Element, class Tile, Score kScore>
constexpr bool has_even() {
  return kScore == Score::kPlain && sizeof(Element) == 2 && Tile::kSlices == 1;
}
template <class Element, class Tile>
bool runs_even(const AttnParams& p, const Plan& plan) {
  const BlockList& list = p.mask.blocks;
  if (list.index != nullptr &&
      (Tile::kPairs || list.bits != nullptr || plan.block_m != Tile::kBlockM ||
       p.mask.block_k % Tile::kBlockN != 0))
    return false;
  return int64_t{p.seqlen_q} + p.seqlen_k < INT32_MAX && p.pages.table == nullptr &&
         p.seq_k.leftpad == nullptr && plan.num_splits == 1 && plan.group == 1 &&
         copies_whole_chunks<Element>(p.q, p.head_dim) &&
         copies_whole_chunks<Element>(p.k, p.head_dim) &&
         copies_whole_chunks<Element>(p.v, p.head_dim_v) &&
         copies_whole_chunks<Element>(p.out, p.head_dim_v);
}

// What the kernels read of a grid beside the rest.
inline void fill_dense(const AttnParams& p, ForwardGrid& grid) {
  grid.dense = p.seq_q.cu_seqlens == nullptr && p.seq_k.cu_seqlens == nullptr &&
               p.seq_k.used == nullptr && p.seq_k.cache_batch_idx == nullptr;
  if (!grid.dense) return;
  const Mask mask(p.mask, SeqInfo(p, 0));
  grid.low = mask.low, grid.high = mask.high;
}

// The sequence and head of a block, and which keys its rows see: row i those from i + low on,
// before i + high. 32 bits are enough (runs_even).
template <class Element>
struct EvenTask {
  const Element *q, *k, *v;
  Element* out;
  float* lse;
  int batch, head;
  int begin, q_len, k_len;  // rows from `begin` on
  int low, high;

  __device__ __forceinline__ EvenTask(const AttnParams& p, const ForwardGrid& grid, unsigned x) {
    const ForwardTask task(p, grid, x);
    batch = task.batch, head = task.rows.head_first;
    if (grid.dense) {
      q_len = p.seqlen_q, k_len = p.seqlen_k;
      low = grid.low, high = grid.high;
      const int64_t b = batch;
      find(p, grid, b * p.q.batch, b * p.k.batch, b * p.v.batch, b * p.out.batch);
      lse = static_cast<float*>(p.lse) + (b * p.heads_q + head) * p.seqlen_q;
    } else {
      const SeqInfo seq(p, task.batch);
      const Mask mask(p.mask, seq);
      q_len = seq.q_len, k_len = seq.k_len;
      low = mask.low, high = mask.high;
      find(p, grid, seq.q_offset(p.q, 0, 0), seq.k_offset(p.k, 0, 0), seq.k_offset(p.v, 0, 0),
           seq.q_offset(p.out, 0, 0));
      lse = static_cast<float*>(p.lse) + seq.lse_offset(p, head, 0);
    }
    begin = task.begin < 0 ? q_len : min(task.begin, q_len);
  }

  // Tiles of kBlockN keys that `rows` rows see, from n_end to n_begin downwards; one at least, so
  // that there is always something to wait for.
  template <int kBlockN>
  __device__ __forceinline__ void tiles(int rows, int& n_begin, int& n_end) const {
    n_end = first_key(begin) / kBlockN;
    n_begin = max(n_end, (end_key(min(begin + rows, q_len) - 1) - 1) / kBlockN);
  }

  // Of `rows` rows from `first` on.
  __device__ __forceinline__ WarpKeys keys_of(int first, int rows) const {
    const int last = min(first + rows, q_len) - 1;
    return {first_key(first), last < first ? 0 : end_key(last), first_key(last), end_key(first)};
  }

  __device__ __forceinline__ int first_key(int i) const { return min(max(i + low, 0), k_len); }
  __device__ __forceinline__ int end_key(int i) const { return min(max(i + high, 0), k_len); }

 private:
  __device__ __forceinline__ void find(const AttnParams& p,
                                       const ForwardGrid& grid,
                                       int64_t q_at,
                                       int64_t k_at,
                                       int64_t v_at,
                                       int64_t out_at) {
    const int head_k = grid.by_group(head);
    q = static_cast<const Element*>(p.q.ptr) + q_at + head * p.q.head;
    k = static_cast<const Element*>(p.k.ptr) + k_at + head_k * p.k.head;
    v = static_cast<const Element*>(p.v.ptr) + v_at + head_k * p.v.head;
    out = static_cast<Element*>(p.out.ptr) + out_at + head * p.out.head;
  }
};

// What a block looks up in shared memory, since registers are few.
template <class Element, class Tile>
struct EvenState {
  EvenTask<Element> task;
  const int32_t* list;
  int list_last;  // ListWalk::next
  WarpKeys keys[Tile::kWarps];
};

// Which tiles a block goes through: all between two, or those that a block list names.
enum class Walk : uint8_t { kRange, kList };

// The tiles of a line of a block list, from the last to the first. Each warp walks for itself, and
// a lane holds one of 32 entries.
struct ListWalk {
  int entry, part = 0;  // of the tiles that an entry stands for `part` are left
  int held = 0;

  __device__ __forceinline__ explicit ListWalk(const BlockLine& line) : entry(line.count) {
    if (entry > 0) hold(line.index, (entry - 1) / 32 * 32);
  }

  // Of the tiles [first, last], `ratio` an entry; -1 when there is no further one.
  __device__ __forceinline__ int next(const int32_t* index, int ratio, int first, int last) {
    while (true) {
      if (part == 0) {
        if (entry == 0) return -1;
        if (entry % 32 == 0) hold(index, entry - 32);
        --entry, part = ratio;
      }
      const int block = __shfl_sync(0xffffffffu, held, entry % 32);
      --part;
      if (block < 0 || block > last) continue;
      const int64_t tile = int64_t{block} * ratio + part;
      if (tile >= first && tile <= last) return static_cast<int>(tile);
    }
  }

 private:
  __device__ __forceinline__ void hold(const int32_t* index, int from) {
    const int at = from + static_cast<int>(threadIdx.x) % 32;
    held = at < entry ? index[at] : -1;
  }
};

// Which keys the rows of a warp see.
template <class Element>
struct WarpWindow {
  const EvenTask<Element>& task;
  int first;  // position of the warp's first row
  WarpKeys keys;

  __device__ __forceinline__ bool sees(int key, int width) const {
    return keys.some_end > key && keys.some_begin < key + width;
  }

  // Scores of the keys from `key` on -> -inf where the row does not see the key.
  template <int kRowBlocks, int kColumns>
  __device__ __forceinline__ void apply(float (&s)[kRowBlocks][kColumns][4], int key) const {
    if (key + 8 * kColumns > keys.all_end) {
      hide(
          s, key, [&](int i) { return task.end_key(i); },
          [](int column, int end) { return column >= end; });
    }
    if (key < keys.all_begin) {
      hide(
          s, key, [&](int i) { return task.first_key(i); },
          [](int column, int begin) { return column < begin; });
    }
  }

 private:
  template <int kRowBlocks, int kColumns, class Limit, class Hidden>
  __device__ __forceinline__ void hide(float (&s)[kRowBlocks][kColumns][4],
                                       int key,
                                       const Limit& limit,
                                       const Hidden& hidden) const {
    const int thread = ptx::thread_index();
    const int row = first + thread % 32 / 4, column = key + thread % 4 * 2;
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int at = limit(row + 16 * b + 8 * h) - column;
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
#pragma unroll
          for (int c = 0; c < 2; ++c)
            if (hidden(8 * n + c, at)) s[b][n][2 * h + c] = -INFINITY;
        }
      }
    }
  }
};

// 4 and 5. P of 16 keys at a time, just before it is multiplied: exponentials fill the time of the
// products before.
template <class Element, class Tile, int kRowBlocks, int kColumns>
__device__ __forceinline__ void add_weighted(float (&out)[kRowBlocks][Tile::kHeadDimV / 8][4],
                                             float (&s)[kRowBlocks][kColumns][4],
                                             Softmax<Element, kRowBlocks>& softmax,
                                             const ScoreScale& scale,
                                             uint32_t v) {
  const auto weights = [&](uint32_t(&a)[kRowBlocks][4], int step) {
    softmax.weigh(s, scale, 2 * step, 2);
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b)
      to_operand<Element>(a[b], s[b][2 * step], s[b][2 * step + 1]);
  };
  warp_matmul_pv<Element, Tile::kHeadDimV, Tile::kBlockN, Tile::kBlockN>(out, weights, v);
}

// 6. The rows of one warp from position `row` on, columns [column0, column0 + 8 * kColumns) of out.
// softmax.l: whole sums. `staging`: these rows and columns of a swizzled tile with kTileRows rows.
template <int kTileRows, class Element, int kRowBlocks, int kColumns>
__device__ __forceinline__ void store_even(const AttnParams& p,
                                           const ForwardGrid& grid,
                                           const EvenTask<Element>& task,
                                           int row,
                                           const Softmax<Element, kRowBlocks>& softmax,
                                           const float (&out)[kRowBlocks][kColumns][4],
                                           int column0,
                                           uint32_t staging) {
  float* lse = task.lse + row;
  const int rows = task.q_len - row;
#pragma unroll
  for (int b = 0; b < kRowBlocks; ++b) {
    RowEnd end[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      end[h] =
          finish_row<Element>(p, grid.scale, task.head, true, softmax.m[b][h], softmax.l[b][h]);
      const int at = 16 * b + fragment_row(2 * h);
      if (threadIdx.x % 4 == 0 && column0 == 0 && at < rows)
        lse[at] = lse_of(end[h].m, end[h].l, end[h].rest);
    }
    const float low = end[0].factor, high = end[1].factor;
#pragma unroll
    for (int pair = 0; pair < kColumns / 2; ++pair) {
      const float(&left)[4] = out[b][2 * pair], (&right)[4] = out[b][2 * pair + 1];
      const uint32_t a[4] = {pack_pair(Element(), left[0] * low, left[1] * low),
                             pack_pair(Element(), left[2] * high, left[3] * high),
                             pack_pair(Element(), right[0] * low, right[1] * low),
                             pack_pair(Element(), right[2] * high, right[3] * high)};
      flash_attn::store_operand(staging + (pair / 4 * kTileRows + 16 * b) * 128, pair % 4, a);
    }
  }
  __syncwarp();
  store_whole_rows<kTileRows, 16 * kRowBlocks, 8 * kColumns, 32>(
      staging, task.out + int64_t{row} * p.out.row + column0, p.out.row, rows,
      p.head_dim_v - column0);
}

template <class Element, class Tile, Walk kWalk>
__global__ void __launch_bounds__(Tile::kWarps * 32, blocks_per_sm<Tile>())
    forward_even_kernel(const __grid_constant__ AttnParams p,
                        const __grid_constant__ ForwardGrid grid) {
  constexpr bool kList = kWalk == Walk::kList;
  constexpr int kThreads = Tile::kWarps * 32, kBlockM = Tile::kBlockM, kBlockN = Tile::kBlockN;
  constexpr int kDim = Tile::kHeadDim, kDimV = Tile::kHeadDimV;
  constexpr int kRowBlocks = kBlockM / (16 * Tile::kWarps);
  constexpr uint32_t kKBytes = sizeof(Element) * kBlockN * kDim;
  constexpr uint32_t kVBytes = sizeof(Element) * kBlockN * kDimV;
  extern __shared__ __align__(1024) uint8_t smem[];
  const uint32_t q_smem = smem_address(smem), k_smem = q_smem + sizeof(Element) * kBlockM * kDim;
  const uint32_t v_smem = k_smem + 2 * kKBytes;

  EvenState<Element, Tile>& state = *reinterpret_cast<EvenState<Element, Tile>*>(
      smem + forward_tile_bytes<Tile>(sizeof(Element)));
  const EvenTask<Element> task(p, grid, blockIdx.x);
  if (task.begin == task.q_len) return;
  int n_begin, n_end;
  task.template tiles<kBlockN>(kBlockM, n_begin, n_end);
  WholeTiles<Element, kBlockM, kDim, kThreads>(task.q, p.q.row, p.head_dim)
      .load(q_smem, task.begin, task.q_len);
  using Keys = WholeTiles<Element, kBlockN, kDim, kThreads>;
  using Values = WholeTiles<Element, kBlockN, kDimV, kThreads>;
  const Keys k_tiles(task.k, p.k.row, p.head_dim);
  const Values v_tiles(task.v, p.v.row, p.head_dim_v);
  BlockLine line;
  if constexpr (kList)
    line = block_line(p.mask.blocks, task.batch, task.head, task.begin / p.mask.block_q);
  ListWalk walk(line);
  const int ratio = kList ? p.mask.block_k / kBlockN : 1;
  int n = kList ? walk.next(line.index, ratio, n_end, n_begin) : n_begin;
  k_tiles.load(k_smem, max(n, n_end) * kBlockN, task.k_len);
  ptx::copy_async_commit();
  v_tiles.load(v_smem, max(n, n_end) * kBlockN, task.k_len);
  ptx::copy_async_commit();

  const int warp_row = threadIdx.x / 32 * 16 * kRowBlocks;  // of the tile
  if (threadIdx.x == 0) {
    state.task = task;
    if constexpr (kList) state.list = line.index, state.list_last = n_begin;
  }
  if (threadIdx.x % 32 == 0)
    state.keys[threadIdx.x / 32] = task.keys_of(task.begin + warp_row, 16 * kRowBlocks);
  const auto window = [&]() -> WarpWindow<Element> {
    return {state.task, state.task.begin + warp_row, state.keys[threadIdx.x / 32]};
  };
  const uint32_t q_lane = q_smem + warp_row * 128 + row_lane();
  const uint32_t k_lane = k_smem + column_lane(), v_lane = v_smem + row_lane();
  float out[kRowBlocks][kDimV / 8][4] = {};
  Softmax<Element, kRowBlocks> softmax;
  ptx::copy_async_wait<1>();
  __syncthreads();
  const KeptQueries<Tile::kKept, kRowBlocks, kBlockM> kept(q_lane);

  bool first = true;  // V of the first tile comes after its K
  for (int stage = 0, next; n >= n_end; n = next, stage ^= 1) {
    next = kList ? walk.next(state.list, ratio, n_end, state.list_last) : n - 1;
    if (!first) {
      ptx::copy_async_wait<0>();
      __syncthreads();
    }
    if (next >= n_end) {
      const uint32_t k_to = k_smem + (stage ^ 1) * kKBytes, v_to = v_smem + (stage ^ 1) * kVBytes;
      if constexpr (kList) {
        const int key = next * kBlockN, end = state.task.k_len;
        Keys(state.task.k, p.k.row, p.head_dim).load(k_to, key, end);
        Values(state.task.v, p.v.row, p.head_dim_v).load(v_to, key, end);
      } else {
        k_tiles.load(k_to, next * kBlockN);
        v_tiles.load(v_to, next * kBlockN);
      }
    }
    ptx::copy_async_commit();
    // Under causal half the warps see nothing of the last tile.
    const bool sees = window().sees(n * kBlockN, kBlockN);
    float s[kRowBlocks][kBlockN / 8][4];
    if (sees) {
      warp_matmul_qk<Element, kDim, kBlockN, kBlockN, kBlockM, Tile::kAhead>(
          s, kept, q_lane, k_lane + stage * kKBytes);
    }
    if (first) {
      ptx::copy_async_wait<1>();
      __syncthreads();
      first = false;
    }
    if (!sees) continue;
    window().apply(s, n * kBlockN);
    softmax.settle(s, out, grid.scale);
    add_weighted<Element, Tile>(out, s, softmax, grid.scale, v_lane + stage * kVBytes);
  }
  ptx::copy_async_wait<0>();  // a list may be empty
  softmax.finish();
  store_even<kBlockM>(p, grid, state.task, state.task.begin + warp_row, softmax, out, 0,
                      q_smem + warp_row * 128);
}

}  // namespace flash_attn::sm80
