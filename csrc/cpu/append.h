// SPDX-License-Identifier: BSD-3-Clause
// Writes new keys and values into a cache, contiguous or paged, the keys after rotary if asked for.
#pragma once

#include "cpu/rotary.h"

namespace flash_attn::cpu {

// Slots and entries have been checked; a slot without a page is passed over.
void append_kv(const AppendParams& params, int workers, ParallelFor parallel_for);

}  // namespace flash_attn::cpu
