// SPDX-License-Identifier: BSD-3-Clause
// CPU kernels for AVX-512 (F, BW, DQ, VL).
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

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#include "cpu/kernels.h"

namespace flash_attn::cpu {

extern const KernelList kAvx512Kernels;
const KernelList kAvx512Kernels = {kRowsOf<Avx512Arch>, std::size(kRowsOf<Avx512Arch>)};

}  // namespace flash_attn::cpu

#endif
