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
#include "torch/signatures.h"

namespace flash_attn {

namespace {

// Bits of backward's `needs`.
enum Needs : int64_t { kQ = 1, kK = 2, kV = 4, kBias = 8, kSlopes = 16, kSinks = 32 };

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

// Whether there is a query row at all. Without one there is nothing to run.
bool has_queries(const AttnParams& p) {
  return p.batch > 0 && p.seqlen_q > 0 && p.heads_q > 0;
}

std::vector<int64_t> lse_sizes(const AttnParams& p) {
  if (p.seq_q.cu_seqlens != nullptr) return {p.heads_q, p.seq_q.total};
  return {p.batch, p.heads_q, p.seqlen_q};
}

ForwardResult forward(const OpInputs& in, int64_t family) {
  Problem problem = fill_params(in);
  AttnParams& p = problem.params;
  std::vector<int64_t> sizes = sizes_of(in.q);
  sizes.back() = in.v.size(in.v.dim() - 1);
  const Tensor out = allocate(sizes, p.dtype, in.q, "out");
  const Tensor lse = allocate(lse_sizes(p), accumulator_type(p.dtype), in.q, "lse");
  p.out = tensor_ref(out);
  p.lse = lse.data_ptr();
  if (in.cu_seqlens_q) {
    const int64_t live = live_rows(p.seq_q, p.batch);
    zero_rows_from(out, live);
    p.dtype == DType::kF64 ? fill_lse_from<double>(lse, live) : fill_lse_from<float>(lse, live);
  }
  if (has_queries(p)) launch(p, Pass::kForward, family, in.q);
  return {out, lse};
}

// The gradients of a call: those that are wanted in the shape of their inputs, the others (0,).
struct GradientTensors {
  Tensor dq, dk, dv, dbias, dslopes, dsinks;
};

GradientTensors allocate_gradients(const OpInputs& in, DType dtype, int64_t needs) {
  const DType accumulator = accumulator_type(dtype);
  const auto make = [&](int64_t need, const Tensor* input, DType type, const char* what) {
    const bool wanted = (needs & need) != 0 && input != nullptr;
    return allocate(wanted ? sizes_of(*input) : std::vector<int64_t>{0}, type, in.q, what);
  };
  const auto given = [](const OptTensor& t) { return t ? &*t : nullptr; };
  return {make(kQ, &in.q, dtype, "dq"),
          make(kK, &in.k, dtype, "dk"),
          make(kV, &in.v, dtype, "dv"),
          make(kBias, given(in.bias), accumulator, "dbias"),
          make(kSlopes, given(in.alibi_slopes), DType::kF32, "dslopes"),
          make(kSinks, given(in.sinks), accumulator, "dsinks")};
}

// Fills what no kernel writes, and zeroes what kernels add to. `run`: whether a kernel follows.
void prepare_gradients(const GradientTensors& g,
                       const AttnParams& p,
                       const OpInputs& in,
                       bool run) {
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

void point_at_gradients(Gradients& grad,
                        const GradientTensors& g,
                        const OpInputs& in,
                        int64_t needs) {
  if (needs & kQ) grad.dq = tensor_ref(g.dq);
  if (needs & kK) grad.dk = tensor_ref(g.dk);
  if (needs & kV) grad.dv = tensor_ref(g.dv);
  if (g.dbias.numel() > 0) {
    grad.dbias = g.dbias.data_ptr();
    const auto step = [&](int d) { return g.dbias.size(d) == 1 ? 0 : g.dbias.stride(d); };
    grad.dbias_batch = step(0);
    grad.dbias_head = step(1);
    grad.dbias_row = step(2);
    grad.dbias_col = step(3);
  }
  if ((needs & kSlopes) && in.alibi_slopes) grad.dslopes = g.dslopes.data_ptr();
  if ((needs & kSinks) && in.sinks) grad.dsinks = g.dsinks.data_ptr();
}

void check_backward(const BackwardInputs& given, const OpInputs& in, const AttnParams& p) {
  std::vector<int64_t> sizes = sizes_of(in.q);
  sizes.back() = in.v.size(in.v.dim() - 1);
  const ScalarType statistics = scalar_type(accumulator_type(p.dtype));
  for (const auto& [tensor, name] :
       {std::pair<const Tensor&, const char*>(given.out, "out"), {given.dout, "dout"}}) {
    check_shape(tensor, name, sizes);
    check_dtype(tensor, name, in.q.scalar_type());
    check_device(tensor, name, in.q);
  }
  std::vector<int64_t> statistics_sizes = {in.q.size(in.q.dim() - 2), in.q.size(in.q.dim() - 3)};
  if (!in.cu_seqlens_q) statistics_sizes.insert(statistics_sizes.begin(), in.q.size(0));
  const auto check_statistics = [&](const Tensor& t, const char* name) {
    check_shape(t, name, statistics_sizes);
    check_dtype(t, name, statistics);
    check_device(t, name, in.q);
  };
  check_statistics(given.lse, "lse");
  if (given.dlse) check_statistics(*given.dlse, "dlse");
  if (p.mask.blocks.index != nullptr && p.mask.blocks_t.index == nullptr) {
    raise("ValueError",
          "block_mask must come with its transposed lists in the backward pass, got none");
  }
  if ((given.needs & kBias) && in.bias && p.bias.boolean) {
    raise("TypeError", "attn_bias must be floating point to have a gradient, got bool");
  }
}

BackwardResult backward(const OpInputs& in, const BackwardInputs& given, int64_t family) {
  Problem problem = fill_params(in);
  AttnParams& p = problem.params;
  check_backward(given, in, p);
  GradientTensors g = allocate_gradients(in, p.dtype, given.needs);
  const bool run = has_queries(p);
  prepare_gradients(g, p, in, run);
  if (run) {
    const Tensor delta = allocate(lse_sizes(p), accumulator_type(p.dtype), in.q, "delta");
    p.out = tensor_ref(with_unit_stride(given.out, problem.kept));
    p.lse = as_contiguous(given.lse, problem.kept).data_ptr();
    p.grad.dout = tensor_ref(with_unit_stride(given.dout, problem.kept));
    if (given.dlse) p.grad.dlse = as_contiguous(*given.dlse, problem.kept).data_ptr();
    p.grad.delta = delta.data_ptr();
    p.grad.deterministic = given.deterministic;
    point_at_gradients(p.grad, g, in, given.needs);
    launch(p, Pass::kBackward, family, in.q);
  }
  return {g.dq, g.dk, g.dv, g.dbias, g.dslopes, g.dsinks};
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
