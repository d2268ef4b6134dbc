// SPDX-License-Identifier: BSD-3-Clause
// What the kernels of dbias share. A block owns a tile of the bias' own elements and goes through
// what broadcasts to them (batch, heads, tiles of rows or columns) in a fixed order; dbias is
// written once.
#pragma once

#include "cuda/launch.h"
#include "cuda/sm80/backward_ordered_block.cuh"

namespace flash_attn::sm80 {

// The grid, along x: column tiles, row tiles, heads, batches of the bias; 1 where it broadcasts.
struct BiasGrid {
  int columns, rows, heads;
  int own, keys;  // of a tile
};

// The part [begin, end) of a dimension of `size` that element `own` of the bias stands for.
struct Extent {
  int begin, end;
  __device__ Extent(bool broadcast, int own, int step, int size)
      : begin(broadcast ? 0 : own * step), end(broadcast ? size : min(begin + step, size)) {}
};

// What broadcasts to a block's tile of the bias: batch by batch, head by head, then rows, columns.
struct BiasWalk {
  Extent batches, heads, queries, keys;
  int rows, columns;    // tiles
  int64_t next, total;  // of all tiles, whether or not they hold anything visible

  __device__ BiasWalk(const AttnParams& p, const BiasGrid& grid, uint32_t block)
      : batches(p.grad.dbias_batch == 0, block / grid.columns / grid.rows / grid.heads, 1, p.batch),
        heads(p.grad.dbias_head == 0, block / grid.columns / grid.rows % grid.heads, 1, p.heads_q),
        queries(p.grad.dbias_row == 0, block / grid.columns % grid.rows, grid.own, p.seqlen_q),
        keys(p.grad.dbias_col == 0, block % grid.columns, grid.keys, p.seqlen_k),
        rows(p.grad.dbias_row == 0 ? ceil_div(p.seqlen_q, grid.own) : 1),
        columns(p.grad.dbias_col == 0 ? ceil_div(p.seqlen_k, grid.keys) : 1),
        next(0),
        total(int64_t{batches.end - batches.begin} * (heads.end - heads.begin) * rows * columns) {}

  // Tile number `at`: false if nothing of it exists and is visible. `whole`: keys of a whole tile
  // of the kernel's. With a block list its line is searched.
  __device__ __forceinline__ bool find(
      const AttnParams& p, const BiasGrid& grid, int64_t at, int whole, TilePlace& tile) const {
    const int64_t line = quotient(at, columns), outer = quotient(line, rows);
    const int many_heads = heads.end - heads.begin;
    const int batch_at = static_cast<int>(quotient(outer, many_heads));
    const int batch = batches.begin + batch_at;
    const int head = heads.begin + static_cast<int>(outer) - batch_at * many_heads;
    const int query = queries.begin + static_cast<int>(line - outer * rows) * grid.own;
    const int key = keys.begin + static_cast<int>(at - line * columns) * grid.keys;
    const SeqInfo seq(p, batch);
    const Mask mask(p.mask, seq);
    const int query_end = min(query + grid.own, seq.q_len);
    const int key_end = min(key + grid.keys, seq.k_len);
    if (query >= query_end || key >= key_end) return false;
    if (!mask.sees_some(query, query_end, key, key_end)) return false;
    const bool full = key_end - key == whole && mask.sees_all(query, query_end, key, key_end);
    const int distance = seq.k_len - seq.q_len;
    tile = {batch, head, query, key, query_end, key_end, distance, mask.low, mask.high, -1, full};
    if (p.mask.blocks.index == nullptr) return true;
    const BlockLine blocks = block_line(p.mask.blocks, batch, head, query / p.mask.block_q);
    for (int entry = 0; entry < blocks.count; ++entry) {
      if (blocks.index[entry] != key / p.mask.block_k) continue;
      if (blocks.bits != nullptr) tile.bits = blocks.bits[entry];
      tile.full = full && tile.bits < 0;
      return true;
    }
    return false;
  }
};

// Of a query: P = exp(score - base) * weight, as RowWeight.
struct alignas(16) BiasQuery {
  float base, base_log2, weight, delta;
};

// kStages of Q, dO, K, V, then the state.
template <class Tile, int kStageCount>
struct BiasTile : Tile {
  static constexpr int kBiasStages = kStageCount;
  static constexpr int kKeyBytes = Tile::kBytes * Tile::kBiasKeys * Tile::kHeadDim;
  static constexpr int kStageBytes = 2 * Tile::kOwnBytes + 2 * kKeyBytes;
  static constexpr int kSteps = 8;  // found at once

  struct State {
    BiasQuery rows[kBiasStages][Tile::kOwn];
    BiasWalk walk;
    TilePlace steps[2][kSteps];
    int count[2];
    bool huge;     // BackwardFindings
    bool aligned;  // copies_whole_chunks, of all four
  };
  static constexpr int kSmemBytes = kBiasStages * kStageBytes + static_cast<int>(sizeof(State));
};

// The first of some tiles that fits in kBytes of shared memory, else the last.
template <int kBytes, class First, class... Others>
struct FirstThatFits {
  using Type = First;
};
template <int kBytes, class First, class Second, class... Others>
struct FirstThatFits<kBytes, First, Second, Others...> {
  using Rest = typename FirstThatFits<kBytes, Second, Others...>::Type;
  using Type = std::conditional_t<(First::kSmemBytes <= kBytes), First, Rest>;
};

// The way of a block through its tiles, all threads together.
template <class Tile>
struct BiasLoop {
  using State = typename Tile::State;
  using Element = typename Tile::Element;
  static constexpr int kKeys = Tile::kBiasKeys, kSteps = Tile::kSteps;
  static_assert(Tile::kOwn <= Tile::kThreads);

  OrderedBlock<Tile, QueriesDown> block;  // of which the loads and the products are used
  const BiasGrid& grid;
  State& state;
  float lse = 0, delta = 0;  // of one query of the next tile, on their way

  __device__ BiasLoop(const AttnParams& p,
                      const OrderedGrid& rows,
                      const BiasGrid& g,
                      uint8_t* smem)
      : block(p, rows, smem),
        grid(g),
        state(*reinterpret_cast<State*>(smem + Tile::kBiasStages * Tile::kStageBytes)) {}

  __device__ __forceinline__ uint32_t tiles(int stage) const {
    return smem_address(block.smem) + stage * Tile::kStageBytes;
  }

  // ---- the walk

  // Once, by one thread.
  __device__ __forceinline__ void begin_walk() {
    const AttnParams& p = block.p;
    new (&state.walk) BiasWalk(p, grid, blockIdx.x);
    state.huge = block.grid.findings->huge_lse != 0;
    state.aligned = copies_whole_chunks<Element>(p.q, p.head_dim) &&
                    copies_whole_chunks<Element>(p.k, p.head_dim) &&
                    copies_whole_chunks<Element>(p.v, p.head_dim_v) &&
                    copies_whole_chunks<Element>(p.grad.dout, p.head_dim_v);
  }

  // The next tiles -> steps[bank], a lane each, none only at the end. One warp.
  __device__ __forceinline__ void find_steps(int bank) {
    const int lane = threadIdx.x % 32;
    const BiasWalk& walk = state.walk;
    int64_t at = walk.next;
    int found = 0;
    for (; found == 0 && at < walk.total; at += kSteps) {
      TilePlace step;
      const bool exists = lane < kSteps && at + lane < walk.total &&
                          walk.find(block.p, grid, at + lane, kKeys, step);
      const uint32_t all = __ballot_sync(0xffffffffu, exists);
      if (exists) state.steps[bank][__popc(all & ((1u << lane) - 1))] = step;
      found = __popc(all);
    }
    __syncwarp();
    if (lane != 0) return;
    state.walk.next = at;
    state.count[bank] = found;
  }

  // ---- loads

  // `rows` rows of a tensor, aligned, from element `first` on -> a tile of kRows.
  template <int kRows>
  __device__ __forceinline__ void load_aligned(
      uint32_t to, const TensorRef& t, int64_t first, int rows, int dim) const {
    const Element* base = static_cast<const Element*>(t.ptr) + first;
    WholeTiles<Element, kRows, Tile::kHeadDim, Tile::kThreads>(base, t.row, dim).load(to, 0, rows);
  }

  __device__ __forceinline__ void load_tiles(const TilePlace& tile,
                                             const SeqInfo& seq,
                                             uint32_t q) const {
    const AttnParams& p = block.p;
    const TensorRef& dout = p.grad.dout;
    const uint32_t k = q + 2 * Tile::kOwnBytes;
    const int head_k = quotient(tile.head, p.group_size());
    if constexpr (sizeof(Element) == 2) {
      if (state.aligned) {
        const int rows = tile.query_end - tile.query, keys = tile.key_end - tile.key;
        load_aligned<Tile::kOwn>(q, p.q, seq.q_offset(p.q, tile.query, tile.head), rows,
                                 p.head_dim);
        load_aligned<Tile::kOwn>(q + Tile::kOwnBytes, dout,
                                 seq.q_offset(dout, tile.query, tile.head), rows, p.head_dim_v);
        load_aligned<kKeys>(k, p.k, seq.k_offset(p.k, tile.key, head_k), keys, p.head_dim);
        load_aligned<kKeys>(k + Tile::kKeyBytes, p.v, seq.k_offset(p.v, tile.key, head_k), keys,
                            p.head_dim_v);
        return;
      }
    }
    block.template load_queries<Tile::kOwn>(seq, q, q + Tile::kOwnBytes, tile.head, tile.query,
                                            tile.query_end);
    block.template load_keys<kKeys>(seq, k, k + Tile::kKeyBytes, head_k, tile.key, tile.key_end);
  }

  __device__ __forceinline__ void load(const TilePlace& tile, int stage) {
    const AttnParams& p = block.p;
    const SeqInfo seq(p, tile.batch);
    load_tiles(tile, seq, tiles(stage));
    ptx::copy_async_commit();
    const int i = tile.query + static_cast<int>(threadIdx.x);
    lse = -INFINITY;
    if (threadIdx.x >= Tile::kOwn || i >= tile.query_end) return;
    const int64_t at = seq.lse_offset(p, tile.head, i);
    lse = static_cast<const float*>(p.lse)[at];
    delta = static_cast<const float*>(p.grad.delta)[at];
  }

  // The row that load() has fetched for a tile, to shared memory.
  __device__ __forceinline__ void store_row(const TilePlace& tile, int stage) {
    if (threadIdx.x >= Tile::kOwn) return;
    RowWeight row = {lse == -INFINITY ? INFINITY : lse, 1};
    if (state.huge && lse != -INFINITY) {
      const SeqInfo seq(block.p, tile.batch);
      const int i = tile.query + static_cast<int>(threadIdx.x);
      row = block.grid.rows[seq.lse_offset(block.p, tile.head, i)];
    }
    state.rows[stage][threadIdx.x] = {row.base, row.base * kLog2e, row.weight, delta};
  }

  // begin() while the first tile is on its way, then add(tile, stage) with each in shared memory.
  // Returns after a barrier that ends all reads of them.
  template <class Begin, class Add>
  __device__ __forceinline__ void run(const Begin& begin, const Add& add) {
    constexpr bool kAhead = Tile::kBiasStages == 2;
    if (threadIdx.x < 32) {
      if (threadIdx.x == 0) begin_walk();
      __syncwarp();
      find_steps(0);
    }
    __syncthreads();
    const TilePlace* step = state.count[0] != 0 ? state.steps[0] : nullptr;
    if (step != nullptr) load(*step, 0);
    begin();
    for (int bank = 0, at = 0, stage = 0; step != nullptr; stage ^= kAhead) {
      store_row(*step, stage);
      ptx::copy_async_wait<0>();
      __syncthreads();
      if (++at == state.count[bank]) {
        bank ^= 1;
        at = 0;
        if (threadIdx.x < 32) find_steps(bank);
        __syncthreads();
      }
      const TilePlace* next = at < state.count[bank] ? &state.steps[bank][at] : nullptr;
      if (kAhead && next != nullptr) load(*next, stage ^ 1);
      add(*step, stage);
      if (!kAhead) {
        __syncthreads();
        if (next != nullptr) load(*next, 0);
      }
      step = next;
    }
    __syncthreads();
  }
};

// The sums of a warp's rows -> dbias, each by the thread that has it. `to`: of the tile, of which
// `rows` and `columns` exist; warp_row: the first of the warp's rows.
template <int kRowBlocks, int kColumns>
__device__ __forceinline__ void write_own_bias(const Gradients& grad,
                                               const float (&sums)[kRowBlocks][kColumns][4],
                                               float* to,
                                               int warp_row,
                                               int rows,
                                               int columns) {
  const bool pairs = grad.dbias_col == 1 && grad.dbias_row % 2 == 0 && columns >= 8 * kColumns &&
                     reinterpret_cast<uintptr_t>(to) % sizeof(float2) == 0;
#pragma unroll
  for (int r = 0; r < 2 * kRowBlocks; ++r) {
    const int row = warp_row + 8 * r + fragment_row(0), column = fragment_column(0);
    if (row >= rows) continue;
    float* line = to + row * grad.dbias_row + column * grad.dbias_col;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      const float x = sums[r / 2][n][r % 2 * 2], y = sums[r / 2][n][r % 2 * 2 + 1];
      if (pairs) {
        *reinterpret_cast<float2*>(line + 8 * n) = make_float2(x, y);
      } else {
        if (column + 8 * n < columns) line[8 * n * grad.dbias_col] = x;
        if (column + 8 * n + 1 < columns) line[(8 * n + 1) * grad.dbias_col] = y;
      }
    }
  }
}

// The same where dbias broadcasts over the rows or columns of the tile, and is summed over them:
// through shared memory, each element by one thread. All threads; `writes`: of the warp.
template <class Tile, int kRowBlocks, int kColumns>
__device__ __forceinline__ void write_bias_sums(const Gradients& grad,
                                                const float (&sums)[kRowBlocks][kColumns][4],
                                                float* to,
                                                uint8_t* smem,
                                                int warp_row,
                                                bool writes,
                                                int rows,
                                                int columns) {
  constexpr int kPitch = Tile::kBiasKeys + 1;
  static_assert(4 * kPitch * Tile::kOwn <= Tile::kSmemBytes);
  float* tile = reinterpret_cast<float*>(smem);
  if (writes) {
#pragma unroll
    for (int at = 0; at < kRowBlocks * kColumns * 4; ++at) {
      const int b = at / 4 / kColumns, n = at / 4 % kColumns, c = at % 4;
      tile[(warp_row + 16 * b + fragment_row(c)) * kPitch + 8 * n + fragment_column(c)] =
          sums[b][n][c];
    }
  }
  __syncthreads();
  const bool all_rows = grad.dbias_row == 0, all_columns = grad.dbias_col == 0;
  const int down = all_rows ? 1 : min(rows, Tile::kOwn);
  const int across = all_columns ? 1 : min(columns, Tile::kBiasKeys);
  for (int at = threadIdx.x; at < down * across; at += Tile::kThreads) {
    const int row = at / across, column = at % across;
    double sum = 0;
    for (int r = row; r < (all_rows ? Tile::kOwn : row + 1); ++r) {
      for (int c = column; c < (all_columns ? Tile::kBiasKeys : column + 1); ++c)
        sum += tile[r * kPitch + c];
    }
    to[row * grad.dbias_row + column * grad.dbias_col] = static_cast<float>(sum);
  }
}

// One or the other.
template <class Tile, int kRowBlocks, int kColumns>
__device__ __forceinline__ void write_bias(const Gradients& grad,
                                           const float (&sums)[kRowBlocks][kColumns][4],
                                           const BiasWalk& walk,
                                           uint8_t* smem,
                                           int warp_row,
                                           bool writes) {
  const int rows = walk.queries.end - walk.queries.begin;
  const int columns = walk.keys.end - walk.keys.begin;
  float* to = static_cast<float*>(grad.dbias) + walk.batches.begin * grad.dbias_batch +
              walk.heads.begin * grad.dbias_head + walk.queries.begin * grad.dbias_row +
              walk.keys.begin * grad.dbias_col;
  if (grad.dbias_row == 0 || grad.dbias_col == 0) {
    write_bias_sums<Tile>(grad, sums, to, smem, warp_row, writes, rows, columns);
  } else if (writes) {
    write_own_bias(grad, sums, to, warp_row, rows, columns);
  }
}

template <class Tile>
BiasGrid bias_grid(const AttnParams& p) {
  const Gradients& grad = p.grad;
  BiasGrid grid = {};
  grid.own = tile_within(p.mask.block_q, Tile::kOwn);
  grid.keys = tile_within(p.mask.block_k, Tile::kBiasKeys);
  grid.columns = grad.dbias_col == 0 ? 1 : ceil_div(p.seqlen_k, grid.keys);
  grid.rows = grad.dbias_row == 0 ? 1 : ceil_div(p.seqlen_q, grid.own);
  grid.heads = grad.dbias_head == 0 ? 1 : p.heads_q;
  return grid;
}

// One block for each tile of the bias.
template <class Tile, class Kernel>
cudaError_t launch_bias_kernel(const Kernel& kernel,
                               const AttnParams& p,
                               const OrderedGrid& rows,
                               cudaStream_t stream) {
  const BiasGrid grid = bias_grid<Tile>(p);
  const int64_t blocks =
      int64_t{grid.columns} * grid.rows * grid.heads * (p.grad.dbias_batch == 0 ? 1 : p.batch);
  return launch_shared(kernel, blocks, Tile::kThreads, Tile::kSmemBytes, stream, p, rows, grid);
}

}  // namespace flash_attn::sm80
