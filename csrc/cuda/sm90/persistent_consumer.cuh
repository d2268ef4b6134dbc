// SPDX-License-Identifier: BSD-3-Clause
// What a warpgroup of the persistent kernel (persistent.cuh) does with the tasks and key tiles that
// the other warps bring.
#pragma once

#include "cuda/sm90/persistent_output.cuh"
#include "cuda/sm90/persistent_state.cuh"
#include "cuda/sm90/products.cuh"
#include "cuda/tile/masking.cuh"

namespace flash_attn::sm90 {

// What hides keys: windows and lengths alone, or block lists too, whose tiles may have bits.
enum class Hides : uint8_t { kWindows, kLists };

// A warpgroup: what it reads, and its place in the rings.
template <class Element, class Tile, Hides kHides>
struct TaskConsumer {
  using T = PersistentSizes<Tile>;
  static constexpr int kColumns = Tile::kBlockN / 8, kOutColumns = Tile::kHeadDimV / 8;
  using Scores = float[1][kColumns][4];
  using Weights = uint32_t[Tile::kBlockN / 16][4];
  using Out = float[1][kOutColumns][4];

  const AttnParams& p;
  const ForwardGrid& grid;
  const TaskState<Tile>* states;
  uint32_t smem;
  typename T::Pipe pipe;
  uint8_t* barriers;
  uint32_t group;  // which 64 rows of the tile: other ones in each task, since some see less
  uint32_t task;   // number of the block's, so of Q as well
  Uses<Tile::kStages> k, v;
  // Of the task that is not ended yet.
  int open;      // there is one
  int adds;      // its last weights wait for their values:
  int before;    // the tile that they are of; -1: one that hides nothing
  bool has_out;  // some of its weights have met their values
  Calm calm;
  Softmax<Element, 1> softmax;
  Out out;
  Weights weights;

  __device__ TaskConsumer(const AttnParams& p_,
                          const ForwardGrid& grid_,
                          const TaskState<Tile>* states_,
                          uint32_t smem_,
                          const typename T::Pipe& pipe_,
                          uint8_t* barriers_,
                          uint32_t group_)
      : p(p_),
        grid(grid_),
        states(states_),
        smem(smem_),
        pipe(pipe_),
        barriers(barriers_),
        group(group_),
        task(0),
        open(0),
        adds(0),
        has_out(false),
        before(-1) {}

  __device__ __forceinline__ const TaskState<Tile>& state() const {
    return states[task % T::kTasks];
  }
  __device__ __forceinline__ const TaskState<Tile>& state_before() const {
    return states[(task - 1) % T::kTasks];
  }
  // Waits for the task; false when there is none.
  __device__ __forceinline__ bool wait_task() const {
    const typename T::Tasks turn = {task};
    ptx::mbarrier_wait(pipe.task_full(turn.stage()), turn.parity());
    return state().exists;
  }
  // Of the task before this one.
  __device__ __forceinline__ void release_task_before() const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(pipe.task_empty((task - 1) % T::kTasks));
  }

  // The next task: its last rows go to whom its first rows went before.
  __device__ __forceinline__ void advance() {
    ++task;
    group = group + 1 == T::kConsumers ? 0 : group + 1;
  }
  // Which 16 rows of the tile are this warp's.
  __device__ __forceinline__ uint32_t warp() const { return 4 * group + threadIdx.x / 32 % 4; }
  __device__ __forceinline__ uint32_t warp_before() const {
    return warp() + (group == 0 ? 4 * T::kConsumers : 0) - 4;
  }

  // Whether some row of this warpgroup sees something of a tile.
  __device__ __forceinline__ bool sees(const KvTile& tile) const {
    return state().sees(group, tile.n * Tile::kBlockN, Tile::kBlockN);
  }

  __device__ __forceinline__ void wait_q() const {
    const typename T::Queries q = {task};
    ptx::mbarrier_wait(pipe.q_full(q.stage()), q.parity());
  }
  __device__ __forceinline__ void release_q() const {
    const typename T::Queries q = {task};
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(pipe.q_empty(q.stage()));
  }
  __device__ __forceinline__ StageTile wait_k() const {
    ptx::mbarrier_wait(pipe.k_full(k.stage()), k.parity());
    return *pipe.tile(barriers, k.stage());
  }
  __device__ __forceinline__ void release_k() {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(pipe.k_empty(k.stage()));
    k.advance();
  }
  __device__ __forceinline__ void wait_v() const {
    ptx::mbarrier_wait(pipe.v_full(v.stage()), v.parity());
  }
  // Of tile n, which may have rows without a key; negative: of one that hides nothing.
  __device__ __forceinline__ void wait_v(int n, const SeqInfo& seq) const {
    wait_v();
    if (n < 0) return;
    const int first = n * Tile::kBlockN;
    clear_other_values<T>(smem, v.stage(), seq.k_first - first, seq.k_len - first);
  }
  __device__ __forceinline__ void release_v() {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(pipe.v_empty(v.stage()));
    v.advance();
  }

  // 2. Asynchronous.
  __device__ __forceinline__ void multiply_qk(Scores& s) const {
    multiply_queries<Element, Tile>(
        s, smem + uniform(task % T::kQStages) * T::kQBytes + group * 64 * 128,
        smem + T::kK + uniform(k.stage()) * T::kKBytes);
  }
  // 3. Asynchronous.
  __device__ __forceinline__ void multiply_pv() {
    multiply_weights<Element, Tile>(out, weights, smem + T::kV + uniform(v.stage()) * T::kVBytes,
                                    has_out);
    has_out = true;
  }
  // The same; `seq`: of the weights' task.
  __device__ __forceinline__ void multiply_before(const SeqInfo& seq) {
    wait_v(before, seq);
    multiply_pv();
  }
  __device__ __forceinline__ void wait_out() {
    ptx::wgmma_wait<0>();
    ptx::hold<kOutColumns * 4>(&out[0][0][0]);
    release_v();
  }
  // S; products of a later commit, kBehind of them, may still be on their way.
  template <int kBehind = 1>
  __device__ __forceinline__ void wait_scores(Scores& s) const {
    ptx::wgmma_wait<kBehind>();
    ptx::hold<kColumns * 4>(&s[0][0][0]);
  }

  // Passes over tiles, the first of which `tile` is, until some row sees one: false if the task has
  // none. Under causal, what only later rows see.
  __device__ __forceinline__ bool skip(StageTile& tile) {
    while (tile.n >= 0) {
      if (sees(tile)) return true;
      release_k();
      wait_v();
      release_v();
      if (tile.last) return false;
      tile = wait_k();
    }
    release_k();
    return false;
  }

  // 4. The mask.
  __device__ __forceinline__ void hide(Scores& s, const KvTile& tile) const {
    const int key = tile.n * Tile::kBlockN;
    if (tile.full) return;
    const WarpRows rows = state().warp_rows(16 * warp());
    if (kHides == Hides::kLists && tile.bits >= 0) {
      const TileMask<ceil_div(kColumns, 4)> hidden(p.pages, state().task.batch, key, Tile::kBlockN,
                                                   tile.bits);
      apply_mask(s, p.mask, rows, hidden);
    } else if (!state().sees_all(warp(), key, Tile::kBlockN)) {
      apply_window(s, rows, key);
    }
  }

  // 6. The last product of a task.
  __device__ __forceinline__ void add_last(const SeqInfo& seq) {
    multiply_before(seq);
    wait_out();
    adds = false;
  }
  // 6. Of the task before this one.
  __device__ __forceinline__ void end() {
    softmax.finish();
    store_task<Element>(p, grid, state_before(), 16 * warp_before(), softmax.m[0], softmax.l[0],
                        out[0]);
    release_task_before();
  }
  __device__ __forceinline__ void clear() {
    softmax = Softmax<Element, 1>();
#pragma unroll
    for (int n = 0; n < kOutColumns; ++n)
      out[0][n][0] = out[0][n][1] = out[0][n][2] = out[0][n][3] = 0;
  }

  // 2 and 4 of a task's first tile.
  __device__ __forceinline__ void begin(const StageTile& tile) {
    Scores s;
    float factor[2];
    multiply_qk(s);
    softmax = Softmax<Element, 1>();
    wait_scores<0>(s);
    release_k();
    hide(s, tile);
    weigh(softmax, s, factor, grid.scale);
    to_operands<Element>(weights, s);
  }
  // The same beside the last product of the task before; and 6 of that.
  __device__ __forceinline__ void go_on(const StageTile& tile) {
    Scores s;
    float factor[2];
    multiply_qk(s);
    multiply_before(state_before().seq);
    wait_scores(s);
    release_k();
    hide(s, tile);
    Softmax<Element, 1> its;
    weigh(its, s, factor, grid.scale);
    wait_out();
    end();
    softmax = its;
    to_operands<Element>(weights, s);
  }

  // 2 to 5 of a later tile; with kWhole of one that hides nothing, after another such.
  template <bool kWhole>
  __device__ __forceinline__ void step(const StageTile& tile) {
    Scores s;
    float factor[2];
    multiply_qk(s);
    if constexpr (kWhole) {
      wait_v();
      multiply_pv();
    } else {
      multiply_before(state().seq);
    }
    wait_scores(s);
    release_k();
    if constexpr (!kWhole) hide(s, tile);
    const bool raised = weigh(softmax, s, factor, grid.scale);
    wait_out();
    to_operands<Element>(weights, s);
    before = kWhole || tile.full ? -1 : tile.n;
    if (raised) rescale(out, factor);
    if constexpr (Tile::kAhead) calm.note(raised);
  }
};

// What a warpgroup does: all tasks of a block. The last product of a task is made beside the first
// softmax of the next one, where that begins at once.
template <class Element, class Tile, Hides kHides>
__device__ __forceinline__ void consume_tasks(TaskConsumer<Element, Tile, kHides>& self) {
  for (;; self.advance()) {
    const bool exists = uniform(self.wait_task());
    StageTile tile;
    bool seen = false;
    if (exists) {
      self.wait_q();
      tile = self.wait_k();
      seen = uniform(tile.n >= 0 && self.sees(tile));
    }
    if (uniform(self.adds && seen)) {
      self.go_on(tile);
    } else {
      if (self.adds) self.add_last(self.state_before().seq);
      if (self.open) self.end();
      self.open = exists;
      if (!exists) return;
      if (!seen && !self.skip(tile)) {
        self.release_q();
        self.clear();
        continue;
      }
      self.begin(tile);
    }
    self.adds = true;
    self.has_out = false;
    self.calm = Calm(tile.full);
    self.before = tile.full ? -1 : tile.n;
    while (!tile.last) {
      tile = self.wait_k();
      const bool whole = tile.full && self.before < 0;
      if constexpr (Tile::kAhead) {
        if (whole && self.calm) {
          weigh_tile_ahead<Element>(self);
          continue;
        }
      } else if (whole) {
        self.template step<true>(tile);
        continue;
      }
      if (!self.sees(tile)) {  // left of a window: nothing more comes for these rows
        self.add_last(self.state().seq);
        self.skip(tile);
        break;
      }
      self.template step<false>(tile);
    }
    self.release_q();
  }
}

}  // namespace flash_attn::sm90
