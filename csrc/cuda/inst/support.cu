// SPDX-License-Identifier: BSD-3-Clause
// Small kernels that every architecture shares.
#include <iterator>

#include "cuda/inst/lists.h"
#include "cuda/support/backward_prepare.cuh"
#include "cuda/support/code_probe.cuh"
#include "cuda/support/fill_tail.cuh"
#include "cuda/support/kv_append.cuh"
#include "cuda/support/rotary.cuh"

namespace flash_attn {

static constexpr KernelRow kRows[] = {
    delta_row<f16>("cuda_delta_f16"),
    delta_row<bf16>("cuda_delta_bf16"),
    delta_row<float>("cuda_delta_f32"),
};
const KernelList kSupport = {kRows, std::size(kRows)};

int cuda_code() {
  return code_architecture();
}

}  // namespace flash_attn
