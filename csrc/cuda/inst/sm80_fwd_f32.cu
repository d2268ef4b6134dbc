// SPDX-License-Identifier: BSD-3-Clause
// Forward kernels of the portable family, float32: sm_80 and newer, whose tensor cores have bf16.
#include <iterator>

#include "cuda/inst/lists.h"
#include "cuda/sm80/forward.cuh"

namespace flash_attn {

using namespace sm80;

static constexpr KernelRow kRows[] = {
    forward_row<float, F32Forward64, Score::kGeneral>("sm80_forward_f32_d64", 80),
    forward_row<float, F32Forward128, Score::kGeneral>("sm80_forward_f32_d128", 80),
    forward_row<float, F32Forward256, Score::kGeneral>("sm80_forward_f32_d256", 80),
    forward_row<float, F32Forward512, Score::kGeneral>("sm80_forward_f32_d512", 80),
    forward_row<float, F32Forward512Small, Score::kGeneral>("sm80_forward_f32_d512_small", 80),
};
const KernelList kSm80ForwardF32 = {kRows, std::size(kRows)};

}  // namespace flash_attn
