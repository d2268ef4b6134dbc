// SPDX-License-Identifier: BSD-3-Clause
// Backward kernels of the portable family, float16: sm_75 and newer. Of the rows for one head_dim
// the one with the most shared memory comes first.
#include <iterator>

#include "cuda/inst/lists.h"
#include "cuda/sm80/backward_ordered.cuh"

namespace flash_attn {

using namespace sm80;

static constexpr KernelRow kRows[] = {
    backward_ordered_row<f16, Ordered64>("sm80_backward_f16_d64", 75),
    backward_ordered_row<f16, Ordered128>("sm80_backward_f16_d128", 75),
    backward_ordered_row<f16, Ordered192>("sm80_backward_f16_d192", 75),
    backward_ordered_row<f16, Ordered256>("sm80_backward_f16_d256", 80),
    backward_ordered_row<f16, Sm75Ordered256>("sm80_backward_f16_d256_sm75", 75),
};
const KernelList kSm80BackwardF16 = {kRows, std::size(kRows)};

}  // namespace flash_attn
