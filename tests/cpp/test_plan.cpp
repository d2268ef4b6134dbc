// SPDX-License-Identifier: BSD-3-Clause
// Selection and plans over an invented table: the first row that fits, a reason for every other,
// tiles that divide the mask's blocks, sizes of the workspace.
#include "check.h"
#include "plan/plan.h"
#include "plan/select.h"

using namespace flash_attn;

namespace {

int64_t scratch(const AttnParams& p, int block_m, int block_n) {
  return int64_t{block_m} * block_n + p.head_dim;
}

int64_t shared(const AttnParams&, int block_m, int num_splits) {
  return num_splits == 1 ? 0 : 1000 * num_splits + block_m;
}

KernelRow make_row(const char* name, const char* family, Pass pass, int arch, DType dtype) {
  KernelRow row = {};
  row.name = name;
  row.family = family;
  row.pass = pass;
  row.arch = arch;
  row.dtype = dtype;
  return row;
}

KernelRow cpu_row(const char* name, Pass pass, uint32_t isa, DType dtype) {
  KernelRow row = make_row(name, "cpu", pass, 0, dtype);
  row.isa = isa;
  row.score = Score::kGeneral;
  row.block_m = 48;
  row.block_n = 64;
  row.worker_bytes = scratch;
  row.shared_bytes = shared;
  return row;
}

KernelRow gpu_row(const char* name,
                  const char* family,
                  int arch,
                  int dim,
                  Score score,
                  DType dtype = DType::kBF16) {
  KernelRow row = make_row(name, family, Pass::kForward, arch, dtype);
  row.head_dim = row.head_dim_v = dim;
  row.score = score;
  row.block_m = 128;
  row.block_n = 64;
  return row;
}

KernelRow with_memory(KernelRow row, int bytes) {
  row.smem_bytes = bytes;
  row.shared_bytes = shared;
  return row;
}

KernelRow until(KernelRow row, int arch_end) {
  row.arch_end = arch_end;
  return row;
}

const KernelRow kRows90[] = {gpu_row("sm90_d128", "sm90", 90, 128, Score::kPlain)};
const KernelRow kRows80[] = {gpu_row("sm80_d128", "sm80", 80, 128, Score::kPlain),
                             gpu_row("sm80_d256", "sm80", 80, 256, Score::kGeneral)};
// Rows of one kernel for devices of more and of less shared memory, and for old devices alone.
const KernelRow kRowsF16[] = {
    with_memory(gpu_row("f16_wide", "sm80", 80, 256, Score::kGeneral, DType::kF16), 160 << 10),
    with_memory(gpu_row("f16_narrow", "sm80", 80, 256, Score::kGeneral, DType::kF16), 96 << 10),
    until(with_memory(gpu_row("f16_old", "sm80", 75, 128, Score::kPlain, DType::kF16), 64 << 10),
          80)};
KernelRow backward_row() {
  KernelRow row = gpu_row("f16_backward", "sm80", 80, 128, Score::kGeneral, DType::kF16);
  row.pass = Pass::kBackward;
  return row;
}
const KernelRow kRowsBackward[] = {backward_row()};
const KernelRow kRowsCpu[] = {
    cpu_row("cpu_bf16_f", Pass::kForward, kIsaAvx512 | kIsaAvx512Bf16, DType::kBF16),
    cpu_row("cpu_avx2_f", Pass::kForward, kIsaAvx2, DType::kF32),
    cpu_row("cpu_scalar_f", Pass::kForward, kIsaScalar, DType::kF32),
    cpu_row("cpu_scalar_b", Pass::kBackward, kIsaScalar, DType::kF32)};
const KernelList kList90 = {kRows90, 1}, kList80 = {kRows80, 2}, kListCpu = {kRowsCpu, 4};
const KernelList kListF16 = {kRowsF16, 3}, kListBackward = {kRowsBackward, 1};
const KernelList* const kLists[] = {&kList90, &kList80, &kListCpu};
const KernelTable kTable = {kLists, 3};
const KernelList* const kGpuLists[] = {&kListF16, &kListBackward};
const KernelTable kGpuTable = {kGpuLists, 2};
const KernelTable kNothing = {nullptr, 0};

AttnParams problem(DType dtype, int head_dim) {
  AttnParams p;
  p.batch = 2;
  p.heads_q = 4;
  p.heads_k = 2;
  p.seqlen_q = p.seqlen_k = 1000;
  p.head_dim = p.head_dim_v = head_dim;
  p.dtype = dtype;
  return p;
}

DeviceInfo gpu(int arch) {
  DeviceInfo device;
  device.arch = arch;
  device.sm_count = 132;
  return device;
}

DeviceInfo cpu(uint32_t isa, int threads) {
  DeviceInfo device;
  device.isa = isa;
  device.sm_count = threads;
  return device;
}

std::string chosen(const AttnParams& p, const DeviceInfo& d, const char* family = nullptr) {
  const KernelRow* row = select_row(p, Pass::kForward, d, kTable, family);
  return row != nullptr ? row->name : "none";
}

bool has(const std::vector<std::string>& reasons, const std::string& text) {
  for (const std::string& r : reasons) {
    if (r.find(text) != std::string::npos) return true;
  }
  return false;
}

void test_select() {
  const AttnParams d64 = problem(DType::kBF16, 64);
  CHECK_EQ(chosen(d64, gpu(90)), "sm90_d128");
  CHECK_EQ(chosen(d64, gpu(86)), "sm80_d128");
  CHECK_EQ(chosen(d64, gpu(75)), "none");
  CHECK_EQ(chosen(d64, gpu(90), "sm80"), "sm80_d128");
  CHECK_EQ(chosen(d64, gpu(90), ""), "sm90_d128");
  CHECK_EQ(chosen(d64, gpu(90), "cpu"), "none");
  CHECK_EQ(chosen(problem(DType::kBF16, 160), gpu(90)), "sm80_d256");
  CHECK_EQ(chosen(problem(DType::kBF16, 257), gpu(90)), "none");
  CHECK_EQ(chosen(problem(DType::kF32, 64), gpu(90)), "none");
  AttnParams wide_v = d64;
  wide_v.head_dim_v = 129;
  CHECK_EQ(chosen(wide_v, gpu(90)), "sm80_d256");
  AttnParams general = d64;
  general.softcap = 30;
  CHECK_EQ(chosen(general, gpu(90)), "sm80_d256");

  const AttnParams f32 = problem(DType::kF32, 4000);
  CHECK_EQ(chosen(f32, cpu(kIsaScalar, 2)), "cpu_scalar_f");
  CHECK_EQ(chosen(f32, cpu(kIsaAvx2 | kIsaAvx512, 2)), "cpu_avx2_f");
  CHECK_EQ(chosen(d64, cpu(kIsaAvx2 | kIsaAvx512, 2)), "none");
  CHECK_EQ(chosen(d64, cpu(kIsaAvx512 | kIsaAvx512Bf16, 2)), "cpu_bf16_f");
  CHECK(select_row(f32, Pass::kDelta, cpu(0, 1), kTable, nullptr) == nullptr);
  CHECK(select_row(f32, Pass::kForward, cpu(0, 1), kNothing, nullptr) == nullptr);
}

void test_reasons() {
  AttnParams p = problem(DType::kBF16, 160);
  auto reasons = row_reasons(p, Pass::kForward, gpu(90), kTable, nullptr);
  CHECK_EQ(reasons.size(), size_t{5});  // all rows of the pass but the chosen one
  CHECK(has(reasons, "sm90_d128: takes head_dim up to 128, got 160"));
  CHECK(has(reasons, "cpu_avx2_f: runs on the CPU, the tensors are on a GPU"));
  p.head_dim = 128;
  reasons = row_reasons(p, Pass::kForward, gpu(80), kTable, nullptr);
  CHECK(has(reasons, "sm90_d128: needs compute capability 9.0, this GPU, or the code"));
  CHECK(has(reasons, "sm80_d128: takes head_dim_v up to 128, got 160"));
  p.head_dim_v = 128;
  p.softcap = 1;
  reasons = row_reasons(p, Pass::kForward, gpu(80), kTable, "sm80");
  CHECK(has(reasons, "sm90_d128: belongs to backend sm90, asked for was sm80"));
  CHECK(has(reasons, "sm80_d128: has no softcap, bias, ALiBi or dropout"));
  reasons = row_reasons(p, Pass::kForward, cpu(kIsaAvx2, 1), kTable, nullptr);
  CHECK(has(reasons, "cpu_bf16_f: needs AVX-512, AVX-512 BF16, this CPU has AVX2"));
  CHECK(has(reasons, "cpu_scalar_f: takes float32, got bfloat16"));
  CHECK(has(reasons, "sm80_d256: runs on a GPU"));
  p.dtype = DType::kF32;
  reasons = row_reasons(p, Pass::kForward, cpu(kIsaAvx2, 1), kTable, nullptr);
  CHECK(has(reasons, "cpu_scalar_f: fits, but a row before it does too"));
  reasons = row_reasons(p, Pass::kDelta, cpu(0, 1), kTable, nullptr);
  CHECK_EQ(reasons.size(), size_t{1});
  CHECK(has(reasons, "no delta kernel is built"));
  const Plan none = make_plan(p, Pass::kDelta, cpu(0, 1), kTable, nullptr);
  CHECK(none.row == nullptr && none.text() == "no kernel fits\n  no delta kernel is built");
}

void test_tiles_of_blocks() {
  const AttnParams p = problem(DType::kF32, 64);
  for (int block_q = 0; block_q <= 200; ++block_q) {
    AttnParams x = p;
    x.mask.block_q = block_q;
    x.mask.block_k = block_q == 0 ? 0 : 201 - block_q;
    const Plan plan = make_plan(x, Pass::kForward, cpu(0, 1), kTable, "cpu");
    if (block_q == 0) {
      CHECK_EQ(plan.block_m, 48);
      CHECK_EQ(plan.block_n, 64);
      continue;
    }
    for (int size = 1; size <= 64; ++size) {
      if (size <= 48 && block_q % size == 0) CHECK(plan.block_m >= size, block_q, size);
      if (x.mask.block_k % size == 0) CHECK(plan.block_n >= size, block_q, size);
    }
    CHECK(plan.block_m <= 48 && block_q % plan.block_m == 0, block_q, plan.block_m);
    CHECK(plan.block_n <= 64 && x.mask.block_k % plan.block_n == 0, block_q, plan.block_n);
  }
}

void test_workspace() {
  AttnParams p = problem(DType::kF32, 10);
  Plan plan = make_plan(p, Pass::kForward, cpu(0, 8), kTable, nullptr);
  CHECK_EQ(plan.num_splits, 1);
  CHECK_EQ(plan.workers, 8);
  CHECK_EQ(plan.worker_bytes, round_up(48 * 64 + 10, 64));
  CHECK_EQ(plan.workspace_bytes(), 8 * plan.worker_bytes);
  CHECK(plan.reasons.empty());
  CHECK_EQ(plan.text(),
           "cpu_scalar_f (backend cpu), tiles of 48 queries x 64 keys, 1 split, 8 workers, "
           "24 KiB of scratch");

  p.batch = 1;
  p.seqlen_q = 1;  // two tasks, cut into slices for eight workers: at least 256 keys each
  plan = make_plan(p, Pass::kForward, cpu(0, 8), kTable, nullptr);
  CHECK_EQ(plan.num_splits, 3);
  CHECK_EQ(plan.workers, 6);
  CHECK_EQ(plan.shared_bytes, 3048);
  CHECK_EQ(plan.workspace_bytes(), 6 * plan.worker_bytes + 3048);

  p.batch = 0;  // nothing to do still makes a plan
  plan = make_plan(p, Pass::kForward, cpu(0, 8), kTable, nullptr);
  CHECK_EQ(plan.workers, 1);
  CHECK_EQ(plan.num_splits, 1);

  p.batch = 1;
  p.seqlen_q = 1000;
  plan = make_plan(p, Pass::kBackward, cpu(0, 4), kTable, nullptr);
  CHECK_EQ(plan.num_splits, 2);
  CHECK_EQ(plan.workers, 4);
  CHECK_EQ(plan.shared_bytes, 2000 + plan.block_m);
}

AttnParams f16_problem(int head_dim) {
  return problem(DType::kF16, head_dim);
}

void test_cuda_select() {
  const auto on = [](const AttnParams& p, int arch, int smem) {
    DeviceInfo device = gpu(arch);
    device.smem_per_block = smem << 10;
    const KernelRow* row = select_row(p, Pass::kForward, device, kGpuTable, nullptr);
    return std::string(row != nullptr ? row->name : "none");
  };
  CHECK_EQ(on(f16_problem(64), 90, 227), "f16_wide");
  CHECK_EQ(on(f16_problem(64), 80, 163), "f16_wide");
  CHECK_EQ(on(f16_problem(64), 86, 99), "f16_narrow");
  CHECK_EQ(on(f16_problem(64), 75, 64), "f16_old");
  CHECK_EQ(on(f16_problem(64), 80, 64), "none");
  AttnParams p = f16_problem(64);
  for (double scale : {0.0, -1.0}) {  // plain kernels take positive scales only
    p.softmax_scale = scale;
    CHECK_EQ(on(p, 75, 64), "none");
    CHECK_EQ(on(p, 80, 163), "f16_wide");
  }

  DeviceInfo device = gpu(80);
  device.smem_per_block = 64 << 10;
  p = f16_problem(64);
  const auto reasons = row_reasons(p, Pass::kForward, device, kGpuTable, nullptr);
  CHECK(
      has(reasons, "f16_wide: needs 163840 bytes of shared memory a block, this GPU gives 65536"));
  CHECK(has(reasons, "f16_old: runs below compute capability 8.0, this GPU has 8.0"));
  auto nearest = nearest_reasons(p, Pass::kForward, device, kGpuTable, nullptr);
  CHECK_EQ(nearest.size(), size_t{2});  // the shared memory of two rows, not the age of the third
  CHECK(has(nearest, "f16_narrow needs 98304 bytes"));
  nearest = nearest_reasons(f16_problem(300), Pass::kForward, device, kGpuTable, nullptr);
  CHECK_EQ(nearest.size(), size_t{1});
  CHECK(has(nearest, "f16_wide (and 1 more) takes head_dim up to 256, got 300"));
  nearest = nearest_reasons(p, Pass::kDelta, device, kGpuTable, nullptr);
  CHECK(nearest.size() == 1 && has(nearest, "no delta kernel is built"));
}

void test_cuda_plan() {
  DeviceInfo device = gpu(90);
  device.smem_per_block = 227 << 10;
  AttnParams p = f16_problem(64);
  Plan plan = make_plan(p, Pass::kForward, device, kGpuTable, nullptr);
  CHECK(plan.block_m == 128 && plan.block_n == 64 && plan.group == 1 && plan.num_splits == 2);
  CHECK_EQ(plan.blocks, 2 * 4 * 8 * 2);
  CHECK_EQ(plan.workspace_bytes(), 2 * 1000 + 128);
  p.seqlen_q = 1;
  plan = make_plan(p, Pass::kForward, device, kGpuTable, nullptr);
  CHECK(plan.group == 2 && plan.num_splits > 1);
  CHECK_EQ(plan.blocks, 2 * 2 * plan.num_splits);
  CHECK(plan.text().find("2 query heads in a tile") != std::string::npos, plan.text());
  p.mask.block_q = p.mask.block_k = 64;
  plan = make_plan(p, Pass::kForward, device, kGpuTable, nullptr);
  CHECK(plan.block_m == 64 && plan.block_n == 64);

  p = f16_problem(64);  // packed: tiles by the total, one more a sequence
  const int32_t lengths = 0;
  p.seq_q.cu_seqlens = &lengths;
  p.seq_q.total = p.seqlen_q = 100000;
  plan = make_plan(p, Pass::kForward, device, kGpuTable, nullptr);
  CHECK_EQ(plan.blocks, (100000 / 128 + 2) * 4);
  plan = make_plan(p, Pass::kBackward, device, kGpuTable, nullptr);
  CHECK(plan.row != nullptr && plan.num_splits == 2 && plan.workspace_bytes() == 0);
  CHECK_EQ(plan.blocks, (1000 + 64) / 64 * 2 * 2 * plan.num_splits);
}

}  // namespace

void test_plan() {
  test_cuda_select();
  test_cuda_plan();
  test_select();
  test_reasons();
  test_tiles_of_blocks();
  test_workspace();
}
