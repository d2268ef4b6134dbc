// SPDX-License-Identifier: BSD-3-Clause
// Into how many slices of the key range a problem is cut, so that all workers have something to do,
// and what the slices share. Numbers of the host only: lengths that lie on a device are never read,
// so these are the bounds (seqlen_q, seqlen_k).
#pragma once

#include "plan/device.h"
#include "plan/kernel_list.h"

namespace flash_attn {

// Independent pieces of work that there are without splitting. CPU forward: a tile of block_m rows
// of a key head's query heads together, with a block mask of one query head. CPU backward: a
// (batch, key head), which owns that head's dk and dv.
int64_t forward_tasks(const AttnParams& params, int block_m);
int64_t backward_tasks(const AttnParams& params);

// Slices for `tasks` equal pieces over `workers`, each cut into at most `most`. Least time where a
// slice costs its share and each further slice a little for merging; 1 once there are twice as many
// pieces as workers, since the rest that the last round leaves idle is then small.
int balanced_splits(int64_t tasks, int workers, int64_t most);

int forward_splits(const AttnParams& params, int block_m, int block_n, const DeviceInfo& device);
int backward_splits(const AttnParams& params, int block_n, const DeviceInfo& device);

// ---- CUDA forward. The lengths of packed sequences are taken for equal.

// Query heads that share a tile (core/rows.h): those of a key head where that makes at least a
// tenth fewer tiles, as in decoding, else 1. Never with a block mask, which may differ by head, nor
// with dropout, whose decisions a thread shares between rows of one head.
int cuda_group(const AttnParams& params, int block_m);

// Tiles of all heads and sequences that have rows.
int64_t cuda_forward_tasks(const AttnParams& params, int block_m, int group);

// 1 when the tiles come near to filling the device; else the number of slices of least time, where
// blocks run in rounds of one on each multiprocessor, or of `resident`, as many as its shared
// memory holds, where tiles have few rows: such blocks wait for memory and leave room to each
// other.
int cuda_forward_splits(const AttnParams& params,
                        int block_m,
                        int block_n,
                        int group,
                        int resident,
                        const DeviceInfo& device);

// ---- CUDA backward: slices of the query heads that read a tile of keys and, if there are
// more slices than heads, of each head's query tiles, where tiles of keys alone
// leave multiprocessors without work. A slice keeps a few steps, since it writes a partial dk and
// dv.
int cuda_backward_splits(const AttnParams& params,
                         int block_m,
                         int block_n,
                         const DeviceInfo& device);

}  // namespace flash_attn
