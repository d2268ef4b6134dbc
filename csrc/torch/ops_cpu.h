// SPDX-License-Identifier: BSD-3-Clause
// What the CPU's operators share: torch's threads, handed to csrc/cpu as a function pointer.
#pragma once

#include "torch/compat.h"

namespace flash_attn {

// A ParallelFor (plan/kernel_list.h). torch may give several workers to one thread, one after
// another, as it does inside another parallel region; the kernels allow that.
inline void torch_parallel_for(int workers,
                               void (*body)(int worker, void* context),
                               void* context) {
  if (workers <= 1) {
    if (workers == 1) body(0, context);
    return;
  }
  torch::stable::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker)
      body(static_cast<int>(worker), context);
  });
}

inline int torch_threads() {
  return static_cast<int>(torch::stable::get_num_threads());
}

}  // namespace flash_attn
