// SPDX-License-Identifier: BSD-3-Clause
// CPU kernels for AVX512-BF16: products of bf16 pairs. Other dtypes take the AVX-512 rows.
// Everything outside csrc/cpu is included above the pragma: shared inline functions must stay
// plain.
#if defined(__x86_64__)
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <type_traits>

#include "core/merge.h"
#include "core/pages.h"
#include "core/philox.h"
#include "core/rows.h"
#include "core/tiles.h"
#include "plan/plan.h"

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")
#include "cpu/kernels.h"

namespace flash_attn::cpu {

static constexpr KernelRow kRows[] = {
    forward_row<Avx512Bf16Arch, Bf16, BFloat, DType::kBF16>(),
    backward_row<Avx512Bf16Arch, Bf16, BFloat, DType::kBF16>(),
};
extern const KernelList kAvx512Bf16Kernels;
const KernelList kAvx512Bf16Kernels = {kRows, std::size(kRows)};

}  // namespace flash_attn::cpu

#endif
