// SPDX-License-Identifier: BSD-3-Clause
// CPU kernels without any special instruction set: every machine runs them.
// Everything outside csrc/cpu is included above the pragma: shared inline functions must stay
// plain.
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

extern const KernelList kScalarKernels;
const KernelList kScalarKernels = {kRowsOf<ScalarArch>, std::size(kRowsOf<ScalarArch>)};

}  // namespace flash_attn::cpu
