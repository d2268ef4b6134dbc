// SPDX-License-Identifier: BSD-3-Clause
// Rotary position embedding (core/cache.h): one row of one head by a warp, and whole tensors.
#pragma once

#include "cuda/launch.h"
#include "cuda/support/launchers.h"
#include "cuda/tile/element.cuh"

namespace flash_attn {

constexpr int kRowThreads = 128;  // four rows a block

// The thread's warp in the whole grid: the row it takes.
__device__ __forceinline__ int64_t global_warp() {
  return int64_t{blockIdx.x} * (kRowThreads / 32) + threadIdx.x / 32;
}

__device__ __forceinline__ float table_value(const void* table, DType dtype, int64_t at) {
  switch (dtype) {
    case DType::kF64: return static_cast<float>(static_cast<const double*>(table)[at]);
    case DType::kF32: return static_cast<const float*>(table)[at];
    case DType::kF16: return to_float(static_cast<const f16*>(table)[at]);
    case DType::kBF16: return to_float(static_cast<const bf16*>(table)[at]);
  }
  return 0;
}

// src (dim,) -> dst, by the 32 lanes of a warp; turned to `position` where the tables hold it.
template <class Element>
__device__ __forceinline__ void warp_rotate_row(Element* dst,
                                                int64_t stride,
                                                const Element* src,
                                                int dim,
                                                const RotaryTables& t,
                                                int64_t position) {
  const int lane = threadIdx.x % 32;
  int turned = 0;
  if (t.cos != nullptr && position >= 0 && position < t.positions) {
    turned = 2 * t.half;
    const int next = t.interleaved ? 1 : t.half, step = t.interleaved ? 2 : 1;
    for (int c = lane; c < t.half; c += 32) {
      const float cos = table_value(t.cos, t.dtype, position * t.cos_row + c);
      const float sin = table_value(t.sin, t.dtype, position * t.sin_row + c);
      const int first = c * step, second = first + next;
      const float a = to_float(src[first]), b = to_float(src[second]);
      dst[first * stride] = static_cast<Element>(a * cos - b * sin);
      dst[second * stride] = static_cast<Element>(a * sin + b * cos);
    }
  }
  for (int c = turned + lane; c < dim; c += 32)
    dst[c * stride] = src[c];
}

// A warp a row of a head, heads fastest.
template <class Element>
__global__ void __launch_bounds__(kRowThreads)
    rotary_kernel(const __grid_constant__ RotaryParams p) {
  const int64_t warp = global_warp();
  if (warp >= int64_t{p.batch} * p.seqlen * p.heads) return;
  const int64_t head = warp % p.heads, row = warp / p.heads;
  const int64_t i = row % p.seqlen, batch = row / p.seqlen;
  const int64_t position = int64_t{p.offsets[batch]} + (p.per_row ? i : 0);
  const auto at = [&](const TensorRef& t) { return batch * t.batch + i * t.row + head * t.head; };
  warp_rotate_row(static_cast<Element*>(p.out.ptr) + at(p.out), 1,
                  static_cast<const Element*>(p.x.ptr) + at(p.x), p.head_dim, p.tables, position);
}

int launch_rotary(const RotaryParams& p, void* stream) {
  const int64_t blocks = ceil_div(int64_t{p.batch} * p.seqlen * p.heads, int64_t{kRowThreads / 32});
  const auto start = [&](auto kernel) {
    return launch(kernel, blocks, kRowThreads, static_cast<cudaStream_t>(stream), p);
  };
  switch (p.dtype) {
    case DType::kF16: return start(rotary_kernel<f16>);
    case DType::kBF16: return start(rotary_kernel<bf16>);
    case DType::kF32: return start(rotary_kernel<float>);
    case DType::kF64: break;
  }
  return cudaErrorNotSupported;
}

}  // namespace flash_attn
