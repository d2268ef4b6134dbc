// SPDX-License-Identifier: BSD-3-Clause
// Which row of a kernel table serves a problem: the first that fits. A table lists its rows from
// the most to the least specialised (newest architecture, widest instruction set first).
#pragma once

#include <string>
#include <vector>

#include "plan/kernel_list.h"

namespace flash_attn {

// Null when no row fits. `family`: null or empty for any. Allocates nothing: it runs on every call.
const KernelRow* select_row(const AttnParams& params,
                            Pass pass,
                            const DeviceInfo& device,
                            const KernelTable& table,
                            const char* family);

// Why each row of this pass that select_row passes over, or would not have reached, is not taken:
// "sm90_forward_bf16_d128: takes head_dim up to 128, got 160". One line when the table has no row
// of the pass at all.
std::vector<std::string> row_reasons(const AttnParams& params,
                                     Pass pass,
                                     const DeviceInfo& device,
                                     const KernelTable& table,
                                     const char* family);

// The same, of those rows alone that fail at the last of the questions asked (device, family,
// dtype, architecture, instruction set, head_dim, head_dim_v, score, shared memory): what would
// have to change least. One line a reason: "sm80_forward_f16 (and 9 more) takes float16, got
// float64". For error messages, when no row fits.
std::vector<std::string> nearest_reasons(const AttnParams& params,
                                         Pass pass,
                                         const DeviceInfo& device,
                                         const KernelTable& table,
                                         const char* family);

const char* pass_name(Pass pass);    // "forward", "backward", "delta"
const char* dtype_name(DType type);  // "float16", …, as torch calls them

}  // namespace flash_attn
