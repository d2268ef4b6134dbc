// SPDX-License-Identifier: BSD-3-Clause
// delta = rowsum(out * dout) - dlse, in fp32: what the backward pass subtracts from dP; 0 in rows
// that saw no key. Reads out and dout once, so memory bandwidth is its speed.
//
//   grid   a block takes kRowsPerLane * kThreads / lanes query rows of one (batch, head); the head
//          is the fastest part of blockIdx.x, so that neighbours read memory side by side
//   block  `lanes` neighbouring threads (2^n, at most a warp) share a row; every thread keeps the
//          loads of kRowsPerLane rows in flight
//   loads  16 bytes a thread where rows are so aligned, else element by element
#pragma once

#include <cstdint>
#include <cstring>

#include "core/params.h"
#include "cuda/launch.h"
#include "cuda/ptx/load.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/shuffle.cuh"
#include "cuda/tile/element.cuh"
#include "plan/kernel_list.h"

namespace flash_attn {

constexpr int kDeltaThreads = 128;
constexpr int kDeltaRowsPerLane = 4;

// kVec neighbouring elements; with kVec > 1 they are 16 bytes, 16-byte aligned.
template <class Element, int kVec>
struct Packet {
  Element at[kVec];

  __device__ __forceinline__ void load(const Element* address) {
    if constexpr (kVec == 1) {
      at[0] = *address;
    } else {
      static_assert(sizeof(at) == sizeof(uint4), "a packet is one 16-byte load");
      const uint4 bits = ptx::load_once_16(address);
      memcpy(at, &bits, sizeof(at));
    }
  }
};

// What is so unusual that the kernels after this one have slower paths for it.
struct BackwardFindings {
  int huge_lse;            // log(l) has fewer digits in some lse than the weights need
  int empty_row_poisoned;  // dout is not finite in a row that saw no key
};

// P = exp2(score - base) in the main kernel, the score in units of log2; base is +inf where a row
// saw no key. Where some lse is so large that it does not hold log l beside m, other kernels put m,
// in natural units, and 1 / l here: P = exp(score - base) * weight.
struct RowWeight {
  float base, weight;
};

// From here on rounding lse costs the weights more than 2^-12.
constexpr float kHugeLse = 4096;

// delta: (batch, heads_q, rows), contiguous; `weights` alike. Packed inputs come as one batch of
// all rows.
template <class Element, int kVec>
__global__ void __launch_bounds__(kDeltaThreads)
    delta_kernel(const __grid_constant__ AttnParams params,
                 int64_t rows,
                 int row_blocks,
                 int lanes,
                 BackwardFindings* findings,
                 RowWeight* weights) {
  const int head = blockIdx.x % params.heads_q;
  const int batch = blockIdx.x / params.heads_q / row_blocks;
  const int row_block = blockIdx.x / params.heads_q % row_blocks;
  const int groups = kDeltaThreads / lanes;
  const int64_t first = int64_t(row_block) * groups * kDeltaRowsPerLane + threadIdx.x / lanes;
  const int lane = threadIdx.x % lanes;

  const TensorRef& out = params.out;
  const TensorRef& dout = params.grad.dout;
  const Element* out_ptr =
      static_cast<const Element*>(out.ptr) + batch * out.batch + head * out.head;
  const Element* dout_ptr =
      static_cast<const Element*>(dout.ptr) + batch * dout.batch + head * dout.head;

  // On their way with the rows.
  const int64_t plane = (int64_t(batch) * params.heads_q + head) * rows;
  const float* lse = static_cast<const float*>(params.lse);
  const float* dlse = static_cast<const float*>(params.grad.dlse);
  float row_lse[kDeltaRowsPerLane] = {}, less[kDeltaRowsPerLane] = {};
  if (findings != nullptr) {
#pragma unroll
    for (int r = 0; r < kDeltaRowsPerLane; ++r) {
      const int64_t row = min_of(first + r * groups, rows - 1);
      row_lse[r] = lse[plane + row];
      if (dlse != nullptr) less[r] = dlse[plane + row];
    }
  }

  float sum[kDeltaRowsPerLane] = {};
  for (int d = lane * kVec; d < params.head_dim_v; d += lanes * kVec) {
    Packet<Element, kVec> a[kDeltaRowsPerLane], b[kDeltaRowsPerLane];
#pragma unroll
    for (int r = 0; r < kDeltaRowsPerLane; ++r) {
      const int64_t row = min_of(first + r * groups, rows - 1);  // past the end: read, not stored
      a[r].load(out_ptr + row * out.row + d);
      b[r].load(dout_ptr + row * dout.row + d);
    }
#pragma unroll
    for (int r = 0; r < kDeltaRowsPerLane; ++r) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        sum[r] = fmaf(to_float(a[r].at[i]), to_float(b[r].at[i]), sum[r]);
      }
    }
  }

  float* delta = static_cast<float*>(params.grad.delta) + plane;
#pragma unroll
  for (int r = 0; r < kDeltaRowsPerLane; ++r) {
    for (int mask = lanes / 2; mask > 0; mask /= 2) {
      sum[r] += ptx::shuffle_xor(sum[r], mask);
    }
    const int64_t row = first + r * groups;
    if (lane != 0 || row >= rows) continue;
    if (findings != nullptr) {
      if (row_lse[r] == -INFINITY) {
        if (!isfinite(sum[r])) findings->empty_row_poisoned = 1;
        sum[r] = 0;
      } else {
        sum[r] -= less[r];
        if (fabsf(row_lse[r]) > kHugeLse) findings->huge_lse = 1;
      }
      const float base = row_lse[r] == -INFINITY ? INFINITY : row_lse[r] * kLog2e;
      weights[plane + row] = {base, 1};
    }
    delta[row] = sum[r];
  }
}

// Whether every row of a tensor begins at a multiple of 16 bytes.
inline bool rows_aligned(const TensorRef& t, int element_bytes) {
  const int64_t bytes = (t.batch | t.row | t.head) * element_bytes;
  return (reinterpret_cast<uintptr_t>(t.ptr) | static_cast<uintptr_t>(bytes)) % 16 == 0;
}

template <class Element, int kVec>
cudaError_t launch_delta_packets(const AttnParams& params,
                                 BackwardFindings* findings,
                                 RowWeight* weights,
                                 cudaStream_t stream) {
  const bool packed = params.seq_q.cu_seqlens != nullptr;
  const int64_t rows = packed ? params.seq_q.total : params.seqlen_q;
  const int64_t batches = packed ? 1 : params.batch;
  int lanes = 1;
  while (lanes < 32 && lanes * kVec < params.head_dim_v)
    lanes *= 2;
  const int64_t rows_per_block = kDeltaThreads / lanes * kDeltaRowsPerLane;
  const int64_t row_blocks = ceil_div(rows, rows_per_block);
  const int64_t blocks = batches * params.heads_q * row_blocks;
  if (blocks == 0) return cudaSuccess;
  return launch(delta_kernel<Element, kVec>, blocks, kDeltaThreads, stream, params, rows,
                static_cast<int>(row_blocks), lanes, findings, weights);
}

// `findings` (zero before) and `weights` are null for the sum alone, without lse and dlse.
template <class Element>
cudaError_t launch_prepare(const AttnParams& params,
                           BackwardFindings* findings,
                           RowWeight* weights,
                           cudaStream_t stream) {
  constexpr int kVec = 16 / sizeof(Element);
  const bool vector = params.head_dim_v % kVec == 0 && rows_aligned(params.out, sizeof(Element)) &&
                      rows_aligned(params.grad.dout, sizeof(Element));
  return vector ? launch_delta_packets<Element, kVec>(params, findings, weights, stream)
                : launch_delta_packets<Element, 1>(params, findings, weights, stream);
}

template <class Element>
int launch_delta(const AttnParams& params, const Plan&, void*, void* stream) {
  return launch_prepare<Element>(params, nullptr, nullptr, static_cast<cudaStream_t>(stream));
}

template <class Element>
constexpr KernelRow delta_row(const char* name) {
  KernelRow row = {};
  row.name = name;
  row.family = "support";
  row.pass = Pass::kDelta;
  row.arch = 75;
  row.dtype = ElementTraits<Element>::kDType;
  row.cuda = launch_delta<Element>;
  return row;
}

}  // namespace flash_attn
