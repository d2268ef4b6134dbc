// SPDX-License-Identifier: BSD-3-Clause
// Attention on the CPU: check, allocate, plan, run. Kernels write the rows of live sequences; the
// rows that belong to none, and gradients of keys that are not live, are filled here.
#include "torch/ops_cpu.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "cpu/delta.h"
#include "cpu/isa.h"
#include "plan/plan.h"
#include "plan/select.h"
#include "torch/outputs.h"

namespace flash_attn {

namespace {

void zero(const Tensor& t) {
  if (t.numel() > 0) std::memset(t.data_ptr(), 0, t.numel() * t.element_size());
}

// Rows [begin, …) of a contiguous packed tensor (rows, heads, dim).
void zero_rows_from(const Tensor& t, int64_t begin) {
  const int64_t row_bytes = t.size(1) * t.size(2) * static_cast<int64_t>(t.element_size());
  const int64_t rows = t.size(0) - begin;
  if (rows > 0 && row_bytes > 0) {
    std::memset(static_cast<char*>(t.data_ptr()) + begin * row_bytes, 0, rows * row_bytes);
  }
}

// Packed rows that belong to no sequence begin here.
int64_t live_rows(const Sequence& sequence, int batch) {
  return sequence.cu_seqlens[batch];
}

template <class T>
void fill_lse_from(const Tensor& lse, int64_t begin) {
  T* data = static_cast<T*>(lse.data_ptr());
  const int64_t total = lse.size(1);
  for (int64_t head = 0; head < lse.size(0); ++head)
    std::fill(data + head * total + begin, data + (head + 1) * total,
              -std::numeric_limits<T>::infinity());
}

const char* family_name(int64_t family) {
  if (family == 0 || family == 1) return family == 0 ? nullptr : "cpu";
  if (family != 2 && family != 3)
    raise("ValueError", message("family must be 0 to 3, got ", family));
  raise("NotImplementedError",
        message(
            "backend \"sm", family == 2 ? 80 : 90,
            "\" runs on CUDA tensors, q is on the CPU; backend \"cpu\" or \"reference\" would do"));
}

void launch(const AttnParams& p, Pass pass, int64_t family, const Tensor& like) {
  DeviceInfo device;
  device.sm_count = torch_threads();
  device.isa = cpu::detect_isa();
  if (device.isa == cpu::kUnknownIsa)
    raise("ValueError", "FLASH_ATTN_CPU_ISA must be scalar, avx2, avx512 or avx512bf16");
  const Plan plan = make_plan(p, pass, device, kCpuTable, family_name(family));
  if (plan.row == nullptr) {
    std::string reasons;
    for (const std::string& reason : plan.reasons)
      reasons += "; " + reason;
    raise("NotImplementedError",
          message("no CPU kernel fits the ", pass_name(pass), " pass", reasons));
  }
  const Tensor workspace =
      allocate({plan.workspace_bytes()}, ScalarType::Byte, like, "scratch memory");
  plan.row->cpu(p, plan, workspace.data_ptr(), torch_parallel_for);
}

ForwardResult forward(const OpInputs& in, int64_t family) {
  Problem problem = fill_params(in);
  AttnParams& p = problem.params;
  const auto [out, lse] = allocate_outputs(in, p);
  if (in.cu_seqlens_q) {
    const int64_t live = live_rows(p.seq_q, p.batch);
    zero_rows_from(out, live);
    p.dtype == DType::kF64 ? fill_lse_from<double>(lse, live) : fill_lse_from<float>(lse, live);
  }
  if (has_queries(p)) launch(p, Pass::kForward, family, in.q);
  return {out, lse};
}

// Fills what no kernel writes, and zeroes what kernels add to. `run`: whether a kernel follows.
void fill_gradients(const GradientTensors& g, const AttnParams& p, const OpInputs& in, bool run) {
  const auto prepare = [&](const Tensor& t, const Sequence& sequence, bool all) {
    if (t.dim() == 1) return;  // not wanted
    if (all || !run) {
      zero(t);
    } else if (sequence.cu_seqlens != nullptr) {
      zero_rows_from(t, live_rows(sequence, p.batch));
    }
  };
  prepare(g.dq, p.seq_q, false);
  prepare(g.dk, p.seq_k, in.seqused_k.has_value());
  prepare(g.dv, p.seq_k, in.seqused_k.has_value());
  zero(g.dbias);
  zero(g.dslopes);
  zero(g.dsinks);
}

BackwardResult backward(const OpInputs& in, const BackwardInputs& given, int64_t family) {
  Problem problem = fill_params(in);
  AttnParams& p = problem.params;
  const GradientTensors g = prepare_backward(in, given, problem);
  const bool run = has_queries(p);
  fill_gradients(g, p, in, run);
  if (run) launch(p, Pass::kBackward, family, in.q);
  return g.results();
}

// out, dout (batch, seqlen_q, heads, head_dim_v) or packed (total_q, heads, head_dim_v).
Tensor delta(const Tensor& out, const Tensor& dout) {
  const int64_t rank = out.dim();
  if (rank != 3 && rank != 4) {
    raise("ValueError",
          message("out must have 3 or 4 dimensions, got shape ", shape_text(out.sizes())));
  }
  check_shape(dout, "dout", sizes_of(out));
  check_dtype(dout, "dout", out.scalar_type());
  check_device(dout, "dout", out);
  std::vector<Tensor> kept;
  cpu::DeltaParams p;
  p.dtype = dtype_of(out, "out");
  p.batch = rank == 4 ? out.size(0) : 1;
  p.seqlen = out.size(rank - 3);
  p.heads = out.size(rank - 2);
  p.head_dim = out.size(rank - 1);
  p.out = tensor_ref(with_unit_stride(out, kept));
  p.dout = tensor_ref(with_unit_stride(dout, kept));
  std::vector<int64_t> sizes = {p.heads, p.seqlen};
  if (rank == 4) sizes.insert(sizes.begin(), p.batch);
  const Tensor result = allocate(sizes, accumulator_type(p.dtype), out, "delta");
  p.delta = result.data_ptr();
  if (result.numel() > 0) cpu::delta(p, torch_threads(), torch_parallel_for);
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_attn, CPU, m) {
  m.impl("forward", TORCH_BOX(&forward_operator<forward>));
  m.impl("backward", TORCH_BOX(&backward_operator<backward>));
  m.impl("delta", TORCH_BOX(&delta));
}

}  // namespace flash_attn
