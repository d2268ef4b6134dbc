// SPDX-License-Identifier: BSD-3-Clause
// Backward kernels of the portable family, bfloat16: sm_80 and newer.
#include <iterator>

#include "cuda/inst/lists.h"
#include "cuda/sm80/backward_ordered.cuh"

namespace flash_attn {

using namespace sm80;

static constexpr KernelRow kRows[] = {
    backward_ordered_row<bf16, Ordered64>("sm80_backward_bf16_d64", 80),
    backward_ordered_row<bf16, Ordered128>("sm80_backward_bf16_d128", 80),
    backward_ordered_row<bf16, Ordered192>("sm80_backward_bf16_d192", 80),
    backward_ordered_row<bf16, Ordered256>("sm80_backward_bf16_d256", 80),
};
const KernelList kSm80BackwardBf16 = {kRows, std::size(kRows)};

}  // namespace flash_attn
