// SPDX-License-Identifier: BSD-3-Clause
// CPU kernels for NEON (64-bit Arm, where it is always there).
// Everything outside csrc/cpu is included above the pragma: shared inline functions must stay
// plain.
#if defined(__aarch64__)
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
#include "cpu/kernels.h"
#include "plan/plan.h"

namespace flash_attn::cpu {

extern const KernelList kNeonKernels;
const KernelList kNeonKernels = {kRowsOf<NeonArch>, std::size(kRowsOf<NeonArch>)};

}  // namespace flash_attn::cpu

#endif
