// SPDX-License-Identifier: BSD-3-Clause
// Backward kernels of the portable family, float16: sm_75 and newer. Of the rows for one
// head_dim the one with the most shared memory comes first.
#include <iterator>

#include "cuda/inst/lists.h"
#include "cuda/sm80/backward.cuh"

namespace flash_attn {

using namespace sm80;

static constexpr KernelRow kRows[] = {
    backward_row<f16, Backward64, Score::kPlain>("sm80_backward_f16_d64", 80),
    backward_row<f16, General64, Score::kGeneral>("sm80_backward_f16_d64_general", 80),
    backward_row<f16, Small64, Score::kGeneral>("sm80_backward_f16_d64_small", 80),
    backward_row<f16, Sm75Backward64, Score::kGeneral>("sm80_backward_f16_d64_sm75", 75),
    backward_row<f16, Backward128, Score::kPlain>("sm80_backward_f16_d128", 80),
    backward_row<f16, General128, Score::kGeneral>("sm80_backward_f16_d128_general", 80),
    backward_row<f16, Small128, Score::kGeneral>("sm80_backward_f16_d128_small", 80),
    backward_row<f16, Sm75Backward128, Score::kGeneral>("sm80_backward_f16_d128_sm75", 75),
    backward_row<f16, Backward192, Score::kPlain>("sm80_backward_f16_d192", 80),
    backward_row<f16, Backward192, Score::kGeneral>("sm80_backward_f16_d192_general", 80),
    backward_row<f16, Backward256, Score::kPlain>("sm80_backward_f16_d256", 80),
    backward_row<f16, Backward256, Score::kGeneral>("sm80_backward_f16_d256_general", 80),
    backward_row<f16, Medium256, Score::kGeneral>("sm80_backward_f16_d256_medium", 80),
    backward_row<f16, Small256, Score::kGeneral>("sm80_backward_f16_d256_small", 80),
    backward_row<f16, Sm75Backward256, Score::kGeneral, Sm75Ordered256>(
        "sm80_backward_f16_d256_sm75", 75),
};
const KernelList kSm80BackwardF16 = {kRows, std::size(kRows)};

}  // namespace flash_attn
