// SPDX-License-Identifier: BSD-3-Clause
// Backward attention with mma.sync and cp.async, for every GPU from sm_75 up: the launcher. Each
// step is left out when nobody wants what it makes.
//
//   1 delta = rowsum(out * dout) - dlse, and whether something is unusual  support/backward_prepare
//   2 base and weight of every row, where some lse is huge                 backward_ordered
//   3 dK, dV, dQ on the way; fp32: dK, dV                           backward_main, backward_ordered
//   4 dQ if 3 does not make it, parts of dslopes                           backward_ordered
//   5 dslopes, dsinks                                                      support/backward_sums
//   6 dbias                                             backward_plain_bias, backward_ordered_bias
//
// Step 3 adds dQ up with atomics, whose order changes from call to call; deterministic calls, and
// those that need step 4 anyhow, get it there. All else is the same in every call.
#pragma once

#include "cuda/sm80/backward_main.cuh"
#include "cuda/sm80/backward_ordered.cuh"
#include "cuda/sm80/backward_ordered_bias.cuh"
#include "cuda/sm80/backward_plain_bias.cuh"
#include "cuda/support/backward_sums.cuh"
#include "plan/kernel_list.h"
#include "plan/plan.h"

namespace flash_attn::sm80 {

// Steps 3 and 4 of a call.
struct BackwardSteps {
  bool keys, adds_dq, queries;

  BackwardSteps(const AttnParams& p, bool may_add) {
    const Gradients& grad = p.grad;
    const bool dq = grad.dq.ptr != nullptr, slopes = grad.dslopes != nullptr;
    keys = grad.dk.ptr != nullptr || grad.dv.ptr != nullptr;
    adds_dq = may_add && dq && keys && !slopes && !grad.deterministic;
    queries = slopes || (dq && !adds_dq);
  }
};

// The workspace: what is zero before comes first. Every part begins at a multiple of 256 bytes.
struct BackwardWorkspace {
  BackwardFindings* findings;
  DqRing ring = {};
  float *dq_accum, *dk_partial, *dv_partial;
  RowWeight* rows;
  double* slopes;
  int64_t bytes = 0, zero_bytes = 0;

  // `slots`: of tiles that own queries. block_n, columns: keys and head_dim of the main kernel's
  // widest tile.
  BackwardWorkspace(const AttnParams& p,
                    const BackwardSteps& steps,
                    int64_t slots,
                    int block_n,
                    int columns,
                    int num_splits,
                    void* base) {
    const int64_t keys = num_splits > 1 ? key_rows(p) : 0;
    const int dim = round_up(p.head_dim, 16), dim_v = round_up(p.head_dim_v, 16);
    if (steps.adds_dq) ring.places = ring_places(p, block_n, columns);
    const int64_t lines = ring.places > 0 ? ring.places * ring_lines(p) : lse_rows(p);
    take(findings, 1, base);
    take(ring.arrived, ring.places, base);
    take(ring.finished, ring.places, base);
    take(dq_accum, steps.adds_dq ? accumulator_size(lines, dim) : 0, base);
    take(dk_partial, num_splits * accumulator_size(keys, dim), base);
    take(dv_partial, num_splits * accumulator_size(keys, dim_v), base);
    zero_bytes = bytes;
    take(rows, lse_rows(p), base);
    take(slopes, p.grad.dslopes != nullptr ? slots * p.heads_q : 0, base);
  }

 private:
  // Null when there is nothing of it.
  template <class T>
  void take(T*& part, int64_t count, void* base) {
    part = count > 0 ? reinterpret_cast<T*>(static_cast<char*>(base) + bytes) : nullptr;
    bytes += round_up(count * int64_t{sizeof(T)}, int64_t{256});
  }
};

template <class Main>
struct MainNumbers {
  static constexpr int kSmemBytes = Main::kSmemBytes, kBlockN = Main::kBlockN;
  static constexpr int kHeadDim = Main::kHeadDim;
};
template <>
struct MainNumbers<void> {
  static constexpr int kSmemBytes = 0, kBlockN = 1, kHeadDim = 0;
};

// `Main`: the tile of the main kernel, void in fp32; `Ordered`: that of the others.
template <class Main, class Ordered>
struct BackwardLauncher {
  static constexpr bool kHasMain = !std::is_void_v<Main>;
  static constexpr int kOrderedBytes =
      max_of(ordered_smem_bytes<Ordered, KeysDown>(), ordered_smem_bytes<Ordered, QueriesDown>());
  using Element = typename Ordered::Element;
  // The kernels of dbias take no more shared memory than the others, if they can.
  static constexpr int kOthersBytes = max_of(MainNumbers<Main>::kSmemBytes, kOrderedBytes);
  using GeneralBias =
      typename FirstThatFits<kOthersBytes, BiasTile<Ordered, 2>, BiasTile<Ordered, 1>>::Type;
  template <class Number>
  using Bias = typename PlainBiasChoice<Element, Number, typename Ordered::N, kOthersBytes>::Type;
  static constexpr int kBiasBytes = max_of(Bias<Element>::kSmemBytes, Bias<float>::kSmemBytes);
  static constexpr int kSmemBytes =
      max_of(max_of(kOthersBytes, GeneralBias::kSmemBytes), sizeof(Element) == 2 ? kBiasBytes : 0);

  const AttnParams& p;
  const Plan& plan;
  cudaStream_t stream;
  BackwardSteps steps;
  OrderedGrid queries;  // of the kernels whose blocks own queries
  BackwardWorkspace work;

  BackwardLauncher(const AttnParams& params, const Plan& plan_, void* workspace, void* stream_)
      : p(params),
        plan(plan_),
        stream(static_cast<cudaStream_t>(stream_)),
        steps(params, kHasMain),
        queries(ordered_grid<Ordered, QueriesDown>(params)),
        work(workspace_of(params, steps, queries.slots, plan_.num_splits, workspace)) {
    queries.findings = work.findings;
    queries.rows = work.rows;
    queries.slopes = work.slopes;
  }

  static BackwardWorkspace workspace_of(
      const AttnParams& p, const BackwardSteps& steps, int64_t slots, int num_splits, void* base) {
    using Numbers = MainNumbers<Main>;
    return BackwardWorkspace(p, steps, slots, Numbers::kBlockN, Numbers::kHeadDim,
                             kHasMain ? num_splits : 1, base);
  }

  static int64_t workspace_bytes(const AttnParams& p, int, int num_splits) {
    const int64_t slots = ordered_grid<Ordered, QueriesDown>(p).slots;
    const BackwardSteps steps(p, kHasMain);
    return workspace_of(p, steps, slots, num_splits, nullptr).bytes;
  }

  static int launch(const AttnParams& p, const Plan& plan, void* workspace, void* stream) {
    return BackwardLauncher(p, plan, workspace, stream).run();
  }

 private:
  cudaError_t run() const {
    const Gradients& grad = p.grad;
    if (queries.slots == 0 || p.heads_q == 0) return cudaSuccess;
    cudaError_t error = cudaMemsetAsync(work.findings, 0, work.zero_bytes, stream);
    if (error == cudaSuccess) error = launch_prepare<Element>(p, work.findings, work.rows, stream);
    if (error == cudaSuccess) error = launch_weights();
    if (error == cudaSuccess && steps.keys) error = launch_keys();
    if (error == cudaSuccess && steps.queries) error = launch_queries();
    if (error == cudaSuccess && grad.dslopes != nullptr)
      error = launch_slopes(p, work.slopes, queries.slots, queries.own, stream);
    if (error == cudaSuccess && grad.dsinks != nullptr) error = launch_sinks(p, stream);
    if (error == cudaSuccess && grad.dbias != nullptr) error = launch_bias();
    return error;
  }

  static constexpr int kQueriesBytes = ordered_smem_bytes<Ordered, QueriesDown>();

  cudaError_t launch_weights() const {
    constexpr int64_t kMostBlocks = 512;
    return launch_shared(weights_kernel<Ordered>, min_of(queries.slots * p.heads_q, kMostBlocks),
                         Ordered::kThreads, kQueriesBytes, stream, p, queries, ScoreScale(1.0));
  }

  cudaError_t launch_keys() const {
    if constexpr (kHasMain) {
      const MainWork main = {work.findings, work.rows,       work.dq_accum,
                             work.ring,     work.dk_partial, work.dv_partial};
      return launch_main_kernel<Element, Main>(p, plan, main, stream);
    } else {
      OrderedGrid keys = ordered_grid<Ordered, KeysDown>(p);
      keys.findings = work.findings;
      keys.rows = work.rows;
      return launch_shared(keys_kernel<Ordered>, keys.slots * p.heads_k, Ordered::kThreads,
                           ordered_smem_bytes<Ordered, KeysDown>(), stream, p, keys);
    }
  }

  cudaError_t launch_queries() const {
    AttnParams own = p;  // without a dq that has been made
    if (steps.adds_dq) own.grad.dq.ptr = nullptr;
    return launch_shared(queries_kernel<Ordered>, queries.slots * p.heads_q, Ordered::kThreads,
                         kQueriesBytes, stream, own, queries);
  }

  cudaError_t launch_bias() const {
    if constexpr (sizeof(Element) == 2) {
      if (is_plain_bias(p)) {
        return p.bias.dtype == DType::kF32 ? launch_plain_bias<float>()
                                           : launch_plain_bias<Element>();
      }
    }
    return launch_bias_kernel<GeneralBias>(ordered_bias_kernel<GeneralBias>, p, queries, stream);
  }
  template <class Number>
  cudaError_t launch_plain_bias() const {
    using Tile = Bias<Number>;
    return launch_bias_kernel<Tile>(bias_kernel<Tile, Number>, p, queries, stream);
  }
};

// `arch`: the oldest it runs on, compute capability * 10.
template <class Element, class Main, class Ordered>
constexpr KernelRow backward_row_of(const char* name, int arch) {
  using Launcher = BackwardLauncher<Main, Ordered>;
  KernelRow row = {};
  row.name = name;
  row.family = "sm80";
  row.pass = Pass::kBackward;
  row.arch = arch;
  row.dtype = ElementTraits<Element>::kDType;
  row.score = Score::kGeneral;
  row.smem_bytes = Launcher::kSmemBytes;
  row.shared_bytes = Launcher::workspace_bytes;
  row.cuda = Launcher::launch;
  return row;
}

// The kernels without atomics for a head_dim.
template <int kHeadDim>
using OrderedNumbers = std::conditional_t<
    kHeadDim == 64,
    Ordered64,
    std::conditional_t<kHeadDim == 128,
                       Ordered128,
                       std::conditional_t<kHeadDim == 192, Ordered192, Ordered256>>>;

template <class Element,
          class Numbers,
          Score kScore,
          class Ordered = OrderedNumbers<Numbers::kHeadDim>>
constexpr KernelRow backward_row(const char* name, int arch) {
  using Main = BackwardTile<Numbers, kScore>;
  KernelRow row = backward_row_of<Element, Main, OrderedTile<Element, Ordered>>(name, arch);
  row.head_dim = Main::kHeadDim;
  row.head_dim_v = Main::kHeadDimV;
  row.score = kScore;
  row.block_m = Main::kBlockM;
  row.block_n = Main::kBlockN;
  return row;
}

template <class Numbers>
constexpr KernelRow backward_f32_row(const char* name) {
  using Tile = OrderedTile<float, Numbers>;
  KernelRow row = backward_row_of<float, void, Tile>(name, 80);
  row.head_dim = row.head_dim_v = Tile::kHeadDim;
  row.block_m = Tile::kWalk;
  row.block_n = Tile::kOwn;
  return row;
}

}  // namespace flash_attn::sm80
