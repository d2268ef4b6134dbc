// SPDX-License-Identifier: BSD-3-Clause
// Attention on CUDA: check, guard the device, allocate, plan, launch on torch's current stream.
// Kernels write the rows of live sequences; the rows that belong to none, and gradients of keys
// that are not live, are filled here. Nothing synchronises or reads device memory, so every call
// can be captured in a CUDA graph.
#include "cuda/support/launchers.h"
#include "plan/select.h"
#include "torch/cuda_device.h"
#include "torch/outputs.h"

namespace flash_attn {
namespace {

// No row of this pass takes the problem: what comes nearest, and what it lacks.
[[noreturn]] void refuse(const AttnParams& p, Pass pass, int device, int64_t family) {
  std::string reasons;
  for (const std::string& reason :
       nearest_reasons(p, pass, device_info(device), kCudaTable, family_name(family)))
    reasons += (reasons.empty() ? "" : "; ") + reason;
  raise("NotImplementedError",
        message("no CUDA kernel serves the ", pass_name(pass), " pass of this call: ", reasons,
                ". backend=\"reference\" computes it, in memory quadratic in the lengths; tensors ",
                "on the CPU are served by the CPU kernels"));
}

// Plans and runs one pass of the problem on the current device.
void launch(const AttnParams& p, Pass pass, int64_t family, const Tensor& like, void* stream) {
  const int device = like.get_device_index();
  const Plan plan = make_plan(p, pass, device_info(device), kCudaTable, family_name(family));
  if (plan.row == nullptr) refuse(p, pass, device, family);
  if (plan.blocks > INT32_MAX) {
    raise("ValueError",
          message(pass == Pass::kForward ? "q" : "k", " has ", plan.blocks, " tiles of ",
                  pass == Pass::kForward ? plan.block_m : plan.block_n,
                  " rows, over all heads and sequences; a launch takes fewer than 2^31"));
  }
  std::optional<Tensor> workspace;
  if (const int64_t bytes = plan.workspace_bytes(); bytes > 0) {
    workspace = allocate({bytes}, ScalarType::Byte, like, "scratch memory");
  }
  void* scratch = workspace ? workspace->data_ptr() : nullptr;
  check_launch(plan.row->cuda(p, plan, scratch, stream), plan.row->name, device);
}

// Rows of a packed tensor (rows, heads, dim) that belong to no sequence; every row where `all`.
Tail tail_of(const Tensor& t, const Sequence& sequence, int batch, bool all) {
  Tail tail;
  tail.rows = t.data_ptr();
  tail.row_bytes = t.size(1) * t.size(2) * static_cast<int64_t>(t.element_size());
  tail.end = all ? nullptr : sequence.cu_seqlens + batch;
  tail.total = t.size(0);
  return tail;
}

// Whether a bias may be too short for a packed side, which only the device can find out: the rows
// beyond it are computed by nobody.
bool cut_by_bias(const OpInputs& in, int dimension, int64_t rows) {
  return in.bias && in.bias->size(dimension) != 1 && in.bias->size(dimension) < rows;
}

ForwardResult forward(const OpInputs& in, int64_t family) {
  const int device = in.q.get_device_index();
  const DeviceGuard guard(device);
  Problem problem = fill_params(in);
  AttnParams& p = problem.params;
  const auto [out, lse] = allocate_outputs(in, p);
  void* stream = current_stream(device);
  if (in.cu_seqlens_q) {
    Tails tails;
    tails.tail[0] = tail_of(out, p.seq_q, p.batch, cut_by_bias(in, 2, p.seq_q.total));
    tails.tail[0].lse = static_cast<float*>(p.lse);
    tails.tail[0].heads = p.heads_q;
    check_launch(launch_fill_tails(tails, stream), "fill_tails", device);
  }
  if (has_queries(p)) launch(p, Pass::kForward, family, in.q, stream);
  return {out, lse};
}

// Fills what no kernel writes. `run`: whether a kernel follows.
void fill_gradients(
    const GradientTensors& g, const AttnParams& p, const OpInputs& in, bool run, void* stream) {
  if (!run || p.seqlen_k == 0) {
    for (const Tensor* t : {&g.dq, &g.dk, &g.dv, &g.dbias, &g.dslopes, &g.dsinks})
      zero_async(*t, stream);
    return;
  }
  Tails tails;
  int count = 0;
  const auto prepare = [&](const Tensor& t, const Sequence& sequence, bool all) {
    if (t.dim() == 1 || sequence.cu_seqlens == nullptr) return;  // not wanted, or no such rows
    if (all) {
      zero_async(t, stream);
    } else {
      tails.tail[count++] = tail_of(t, sequence, p.batch, false);
    }
  };
  const bool all_keys = in.seqused_k || cut_by_bias(in, 3, p.seq_k.total);
  prepare(g.dq, p.seq_q, cut_by_bias(in, 2, p.seq_q.total));
  prepare(g.dk, p.seq_k, all_keys);
  prepare(g.dv, p.seq_k, all_keys);
  check_launch(launch_fill_tails(tails, stream), "fill_tails", in.q.get_device_index());
}

bool wants_any(const Gradients& grad) {
  return grad.dq.ptr != nullptr || grad.dk.ptr != nullptr || grad.dv.ptr != nullptr ||
         grad.dbias != nullptr || grad.dslopes != nullptr || grad.dsinks != nullptr;
}

BackwardResult backward(const OpInputs& in, const BackwardInputs& given, int64_t family) {
  const int device = in.q.get_device_index();
  const DeviceGuard guard(device);
  Problem problem = fill_params(in);
  const AttnParams& p = problem.params;
  const GradientTensors g = prepare_backward(in, given, problem);
  void* stream = current_stream(device);
  const bool run = has_queries(p);
  fill_gradients(g, p, in, run, stream);
  if (run && wants_any(p.grad)) launch(p, Pass::kBackward, family, in.q, stream);
  return g.results();
}

// out, dout (batch, seqlen_q, heads, head_dim_v) or packed (total_q, heads, head_dim_v).
Tensor delta(const Tensor& out, const Tensor& dout) {
  const int64_t rank = out.dim();
  if (rank != 3 && rank != 4) {
    raise("ValueError", message("out must have 3 or 4 dimensions, got ", shape_text(out.sizes())));
  }
  for (int64_t d = 0; d < rank; ++d) {
    if (out.size(d) > INT32_MAX) {
      raise("ValueError", message("out must have fewer than 2^31 of each dimension, got ",
                                  shape_text(out.sizes())));
    }
  }
  check_shape(dout, "dout", {out.sizes().begin(), out.sizes().end()});
  check_dtype(dout, "dout", out.scalar_type());
  check_device(dout, "dout", out);
  const int device = out.get_device_index();
  const DeviceGuard guard(device);
  std::vector<Tensor> kept;

  AttnParams params;
  params.dtype = dtype_of(out, "out");
  params.batch = rank == 4 ? static_cast<int>(out.size(0)) : 1;
  params.seqlen_q = static_cast<int>(out.size(rank - 3));
  params.heads_q = static_cast<int>(out.size(rank - 2));
  params.head_dim_v = static_cast<int>(out.size(rank - 1));
  params.out = tensor_ref(with_unit_stride(out, kept));
  params.grad.dout = tensor_ref(with_unit_stride(dout, kept));
  const Plan plan = make_plan(params, Pass::kDelta, device_info(device), kCudaTable, nullptr);
  if (plan.row == nullptr) {
    raise("NotImplementedError",
          message("no CUDA delta kernel takes ", dtype_name(out.scalar_type()),
                  "; float16, bfloat16 and float32 are served"));
  }
  std::vector<int64_t> sizes = {out.size(rank - 2), out.size(rank - 3)};
  if (rank == 4) sizes.insert(sizes.begin(), out.size(0));
  Tensor result = allocate(sizes, DType::kF32, out, "delta");
  params.grad.delta = result.data_ptr();
  const int code = plan.row->cuda(params, plan, nullptr, current_stream(device));
  check_launch(code, plan.row->name, device);
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_attn, CUDA, m) {
  m.impl("forward", TORCH_BOX(&forward_operator<forward>));
  m.impl("backward", TORCH_BOX(&backward_operator<backward>));
  m.impl("delta", TORCH_BOX(&delta));
}

}  // namespace flash_attn
