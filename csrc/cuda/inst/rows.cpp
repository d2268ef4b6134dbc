// SPDX-License-Identifier: BSD-3-Clause
// The CUDA library's kernel table, newest architecture first: the planner takes the first row that
// fits.
#include <iterator>

#include "cuda/inst/lists.h"

namespace flash_attn {

static const KernelList* const kLists[] = {&kSm90ForwardBf16, &kSm90ForwardF16,  &kSm80ForwardBf16,
                                           &kSm80ForwardF16,  &kSm80ForwardF32,  &kSm80BackwardBf16,
                                           &kSm80BackwardF16, &kSm80BackwardF32, &kSupport};
const KernelTable kCudaTable = {kLists, std::size(kLists), nullptr, cuda_code};

}  // namespace flash_attn
