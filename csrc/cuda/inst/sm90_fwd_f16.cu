// SPDX-License-Identifier: BSD-3-Clause
// Forward kernels of the Hopper family, float16.
#include <iterator>

#include "cuda/inst/lists.h"
#include "cuda/sm90/forward.cuh"

namespace flash_attn {

using namespace sm90;

static constexpr KernelRow kRows[] = {
    forward_row<f16, Forward64, Score::kPlain>("sm90_forward_f16_d64"),
    forward_row<f16, Windows64, Score::kPlain>("sm90_forward_f16_d64_windows"),
    forward_row<f16, Blocks64, Score::kPlain>("sm90_forward_f16_d64_blocks"),
    forward_row<f16, General64, Score::kGeneral>("sm90_forward_f16_d64_general"),
    forward_row<f16, Dropout64, Score::kGeneral>("sm90_forward_f16_d64_dropout"),
    forward_row<f16, Blocks64, Score::kGeneral>("sm90_forward_f16_d64_blocks_general"),
    forward_row<f16, Forward128, Score::kPlain>("sm90_forward_f16_d128"),
    forward_row<f16, Windows128, Score::kPlain>("sm90_forward_f16_d128_windows"),
    forward_row<f16, Blocks128, Score::kPlain>("sm90_forward_f16_d128_blocks"),
    forward_row<f16, General128, Score::kGeneral>("sm90_forward_f16_d128_general"),
    forward_row<f16, Blocks128, Score::kGeneral>("sm90_forward_f16_d128_blocks_general"),
    forward_row<f16, Forward192, Score::kPlain>("sm90_forward_f16_d192"),
    forward_row<f16, Forward192, Score::kGeneral>("sm90_forward_f16_d192_general"),
    forward_row<f16, Forward256, Score::kPlain>("sm90_forward_f16_d256"),
    forward_row<f16, Forward256, Score::kGeneral>("sm90_forward_f16_d256_general"),
};
const KernelList kSm90ForwardF16 = {kRows, std::size(kRows)};

}  // namespace flash_attn
