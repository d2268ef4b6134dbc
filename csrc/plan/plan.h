// SPDX-License-Identifier: BSD-3-Clause
// A Plan is the decision of one call: which kernel row, which tiles, how many splits, how much
// scratch. Made from what the host knows (shapes, device); lengths that live on a GPU are never
// read.
#pragma once

#include <string>
#include <vector>

#include "plan/device.h"
#include "plan/kernel_list.h"

namespace flash_attn {

struct Plan {
  const KernelRow* row = nullptr;  // null: nothing fits, `reasons` says why
  int block_m = 0, block_n = 0;    // tiles, at most the row's; divide the block mask's blocks
  int num_splits = 1;              // slices of the key range; CUDA backward: of the query side
  int group = 1;                   // query heads that share a tile (core/rows.h)
  int64_t blocks = 0;              // of the grid of a CUDA forward or backward kernel
  int workers = 1;                 // CPU threads that take tasks
  int64_t worker_bytes = 0;        // scratch of one worker, a multiple of 64
  int64_t shared_bytes = 0;        // partial results or accumulators that all workers share
  // Layout of the workspace: scratch of worker 0, 1, …, then what is shared.
  int64_t workspace_bytes() const { return worker_bytes * workers + shared_bytes; }

  // One a row of the pass: why it was passed over. Only when nothing fits, since this runs on every
  // call; row_reasons (select.h) tells them at any time.
  std::vector<std::string> reasons;
  std::string text() const;  // one line, for explain()
};

// `family`: null or empty for any, else "cpu", "sm80", "sm90".
Plan make_plan(const AttnParams& params,
               Pass pass,
               const DeviceInfo& device,
               const KernelTable& table,
               const char* family);

}  // namespace flash_attn
