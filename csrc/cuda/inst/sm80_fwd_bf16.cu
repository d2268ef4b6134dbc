// SPDX-License-Identifier: BSD-3-Clause
// Forward kernels of the portable family, bfloat16: sm_80 and newer. Of the rows for one
// head_dim the one with the most shared memory comes first.
#include <iterator>

#include "cuda/inst/lists.h"
#include "cuda/sm80/forward.cuh"

namespace flash_attn {

using namespace sm80;

static constexpr KernelRow kRows[] = {
    forward_row<bf16, Forward64, Score::kPlain, Even64>("sm80_forward_bf16_d64", 80),
    forward_row<bf16, Forward64, Score::kPlain>("sm80_forward_bf16_d64_small", 80),
    forward_row<bf16, Forward64, Score::kGeneral>("sm80_forward_bf16_d64_general", 80),
    forward_row<bf16, Forward128, Score::kPlain>("sm80_forward_bf16_d128", 80),
    forward_row<bf16, General128, Score::kGeneral>("sm80_forward_bf16_d128_general", 80),
    forward_row<bf16, Forward192, Score::kPlain>("sm80_forward_bf16_d192", 80),
    forward_row<bf16, Forward192, Score::kGeneral>("sm80_forward_bf16_d192_general", 80),
    forward_row<bf16, Forward256Pairs, Score::kPlain>("sm80_forward_bf16_d256", 80),
    forward_row<bf16, Forward256, Score::kPlain>("sm80_forward_bf16_d256_small", 80),
    forward_row<bf16, Forward256, Score::kGeneral>("sm80_forward_bf16_d256_general", 80),
    forward_row<bf16, Forward512, Score::kPlain>("sm80_forward_bf16_d512", 80),
    forward_row<bf16, Forward512Small, Score::kPlain>("sm80_forward_bf16_d512_small", 80),
    forward_row<bf16, Forward512, Score::kGeneral>("sm80_forward_bf16_d512_general", 80),
    forward_row<bf16, Forward512Small, Score::kGeneral>("sm80_forward_bf16_d512_general_small", 80),
};
const KernelList kSm80ForwardBf16 = {kRows, std::size(kRows)};

}  // namespace flash_attn
