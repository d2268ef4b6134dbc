// SPDX-License-Identifier: BSD-3-Clause
#include "plan/plan.h"

#include "core/seqlen.h"
#include "core/slots.h"
#include "core/tiles.h"
#include "plan/select.h"
#include "plan/split.h"

namespace flash_attn {

namespace {

// A forward tile of fewer rows where the row's own would leave threads without work; down to
// kLeastRows.
int rows_for_threads(const AttnParams& p, int block_m, int threads) {
  constexpr int kLeastRows = 64, kTasksPerThread = 4;
  while (block_m % 2 == 0 && block_m / 2 >= kLeastRows &&
         forward_tasks(p, block_m) < int64_t{kTasksPerThread} * threads) {
    block_m /= 2;
  }
  return block_m;
}

void plan_cpu(Plan& plan, const AttnParams& p, const DeviceInfo& device) {
  const KernelRow& row = *plan.row;
  int64_t tasks = 1;
  if (row.pass == Pass::kForward) {
    plan.block_m = rows_for_threads(p, plan.block_m, device.sm_count);
    plan.num_splits = forward_splits(p, plan.block_m, plan.block_n, device);
    tasks = forward_tasks(p, plan.block_m) * plan.num_splits;
  } else if (row.pass == Pass::kBackward) {
    plan.num_splits = backward_splits(p, plan.block_n, device);
    // Its first and last steps are rows of every head: more workers than (batch, head)s help there.
    tasks = max_of(backward_tasks(p) * plan.num_splits, int64_t{p.batch} * p.heads_q);
  }
  plan.workers = static_cast<int>(clamp_to(tasks, int64_t{1}, int64_t{max_of(device.sm_count, 1)}));
  plan.worker_bytes = round_up(row.worker_bytes(p, plan.block_m, plan.block_n), int64_t{64});
  plan.shared_bytes = row.shared_bytes(p, plan.block_m, plan.num_splits);
}

// Blocks of a row that fit one multiprocessor's shared memory, which is a little more than a block
// may ask for; at most 2, since registers allow no more.
int resident_blocks(const KernelRow& row, const DeviceInfo& device) {
  constexpr int kReserved = 1024;  // of each block, for the system
  const int room = (device.smem_per_block + kReserved) / (row.smem_bytes + kReserved);
  return clamp_to(room, 1, 2);
}

void plan_cuda(Plan& plan, const AttnParams& p, const DeviceInfo& device) {
  const KernelRow& row = *plan.row;
  if (row.pass == Pass::kForward) {
    plan.group = cuda_group(p, plan.block_m);
    plan.num_splits = cuda_forward_splits(p, plan.block_m, plan.block_n, plan.group,
                                          resident_blocks(row, device), device);
    plan.blocks = slot_count(p.seq_q, p.batch, p.seqlen_q, plan.group, plan.block_m) *
                  (p.heads_q / plan.group) * plan.num_splits;
  } else if (row.pass == Pass::kBackward) {
    // The fp32 kernels know no slices.
    if (row.dtype != DType::kF32)
      plan.num_splits = cuda_backward_splits(p, plan.block_m, plan.block_n, device);
    plan.blocks =
        slot_count(p.seq_k, p.batch, p.seqlen_k, 1, plan.block_n) * p.heads_k * plan.num_splits;
  }
  if (row.shared_bytes != nullptr) {
    plan.shared_bytes = row.shared_bytes(p, plan.block_m, plan.num_splits);
  }
}

std::string size_text(int64_t bytes) {
  const char* units[] = {" bytes", " KiB", " MiB", " GiB"};
  int unit = 0;
  while (unit < 3 && bytes >= 10240) {
    bytes /= 1024;
    ++unit;
  }
  return std::to_string(bytes) + units[unit];
}

std::string counted(int n, const char* one) {
  return std::to_string(n) + " " + one + (n == 1 ? "" : "s");
}

}  // namespace

Plan make_plan(const AttnParams& params,
               Pass pass,
               const DeviceInfo& device,
               const KernelTable& table,
               const char* family) {
  Plan plan;
  plan.row = select_row(params, pass, device, table, family);
  if (plan.row == nullptr) {
    plan.reasons = row_reasons(params, pass, device, table, family);
    return plan;
  }
  plan.block_m = tile_within(params.mask.block_q, plan.row->block_m);
  plan.block_n = tile_within(params.mask.block_k, plan.row->block_n);
  plan.row->arch == 0 ? plan_cpu(plan, params, device) : plan_cuda(plan, params, device);
  return plan;
}

std::string Plan::text() const {
  if (row == nullptr) {
    std::string all = "no kernel fits";
    for (const std::string& reason : reasons)
      all += "\n  " + reason;
    return all;
  }
  std::string line = std::string(row->name) + " (backend " + row->family + ")";
  if (block_m > 0 && block_n > 0) {
    line +=
        ", tiles of " + std::to_string(block_m) + " queries x " + std::to_string(block_n) + " keys";
  }
  if (group > 1) line += ", " + counted(group, "query head") + " in a tile";
  line += ", " + counted(num_splits, "split");
  if (row->arch == 0) line += ", " + counted(workers, "worker");
  return line + ", " + size_text(workspace_bytes()) + " of scratch";
}

}  // namespace flash_attn
