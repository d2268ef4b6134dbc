// SPDX-License-Identifier: BSD-3-Clause
// Backward kernels of the portable family, float32: sm_80 and newer, whose tensor cores have bf16.
#include <iterator>

#include "cuda/inst/lists.h"
#include "cuda/sm80/backward.cuh"

namespace flash_attn {

using namespace sm80;

static constexpr KernelRow kRows[] = {
    backward_f32_row<F32Ordered64>("sm80_backward_f32_d64"),
    backward_f32_row<F32Ordered128>("sm80_backward_f32_d128"),
    backward_f32_row<F32Ordered256>("sm80_backward_f32_d256"),
};
const KernelList kSm80BackwardF32 = {kRows, std::size(kRows)};

}  // namespace flash_attn
