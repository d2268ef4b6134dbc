// SPDX-License-Identifier: BSD-3-Clause
// Fills the rows of packed tensors that belong to no sequence (out, gradients: 0; lse: -inf). Only
// the device knows where they begin, and mostly there are none, so the grid is small and its blocks
// share out what they find.
#pragma once

#include <algorithm>

#include "core/seqlen.h"
#include "cuda/launch.h"
#include "cuda/support/launchers.h"

namespace flash_attn {

constexpr int kFillThreads = 256;

__device__ __forceinline__ void fill_tail(const Tail& tail, int64_t thread, int64_t threads) {
  const int64_t begin =
      tail.end == nullptr ? 0 : clamp_to(int64_t{*tail.end}, int64_t{0}, tail.total);
  if (tail.rows != nullptr) {
    char* first = static_cast<char*>(tail.rows) + begin * tail.row_bytes;
    const int64_t bytes = (tail.total - begin) * tail.row_bytes;
    if ((reinterpret_cast<uintptr_t>(first) | static_cast<uintptr_t>(bytes)) % 16 == 0) {
      for (int64_t c = thread; c < bytes / 16; c += threads)
        reinterpret_cast<uint4*>(first)[c] = make_uint4(0, 0, 0, 0);
    } else {
      for (int64_t c = thread; c < bytes / 2; c += threads)
        reinterpret_cast<uint16_t*>(first)[c] = 0;
    }
  }
  if (tail.lse != nullptr) {
    const int64_t rows = tail.total - begin;
    for (int64_t c = thread; c < rows * tail.heads; c += threads)
      tail.lse[c / rows * tail.total + begin + c % rows] = -INFINITY;
  }
}

__global__ void __launch_bounds__(kFillThreads)
    fill_tails_kernel(const __grid_constant__ Tails tails) {
  const int64_t thread = int64_t{blockIdx.x} * kFillThreads + threadIdx.x;
  const int64_t threads = int64_t{gridDim.x} * kFillThreads;
#pragma unroll 1
  for (const Tail& tail : tails.tail)
    fill_tail(tail, thread, threads);
}

int launch_fill_tails(const Tails& tails, void* stream) {
  constexpr int64_t kMostBlocks = 256, kBytesOfBlock = 64 * kFillThreads;
  int64_t bytes = 0;
  for (const Tail& tail : tails.tail) {
    const int64_t row = (tail.rows != nullptr ? tail.row_bytes : 0) +
                        (tail.lse != nullptr ? int64_t{tail.heads} * 4 : 0);
    bytes = std::max(bytes, row * tail.total);
  }
  if (bytes == 0) return cudaSuccess;
  const int64_t blocks = std::min(ceil_div(bytes, kBytesOfBlock), kMostBlocks);
  return launch(fill_tails_kernel, blocks, kFillThreads, static_cast<cudaStream_t>(stream), tails);
}

}  // namespace flash_attn
