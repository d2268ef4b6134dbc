// SPDX-License-Identifier: BSD-3-Clause
#include "torch/outputs.h"

namespace flash_attn {

namespace {

std::vector<int64_t> out_sizes(const OpInputs& in) {
  std::vector<int64_t> sizes = sizes_of(in.q);
  sizes.back() = in.v.size(in.v.dim() - 1);
  return sizes;
}

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
          make(kSinks, given(in.sinks), accumulator, "dsinks"),
          allocate(lse_sizes(in), accumulator, in.q, "delta")};
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
  grad.delta = g.delta.data_ptr();
}

void check_backward(const BackwardInputs& given, const OpInputs& in, const AttnParams& p) {
  const ScalarType statistics = scalar_type(accumulator_type(p.dtype));
  for (const auto& [tensor, name] :
       {std::pair<const Tensor&, const char*>(given.out, "out"), {given.dout, "dout"}}) {
    check_shape(tensor, name, out_sizes(in));
    check_dtype(tensor, name, in.q.scalar_type());
    check_device(tensor, name, in.q);
  }
  const auto check_statistics = [&](const Tensor& t, const char* name) {
    check_shape(t, name, lse_sizes(in));
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

}  // namespace

std::vector<int64_t> lse_sizes(const OpInputs& in) {
  std::vector<int64_t> sizes = {in.q.size(in.q.dim() - 2), in.q.size(in.q.dim() - 3)};
  if (!in.cu_seqlens_q) sizes.insert(sizes.begin(), in.q.size(0));
  return sizes;
}

ForwardResult allocate_outputs(const OpInputs& in, AttnParams& p) {
  const Tensor out = allocate(out_sizes(in), p.dtype, in.q, "out");
  const Tensor lse = allocate(lse_sizes(in), accumulator_type(p.dtype), in.q, "lse");
  p.out = tensor_ref(out);
  p.lse = lse.data_ptr();
  return {out, lse};
}

GradientTensors prepare_backward(const OpInputs& in,
                                 const BackwardInputs& given,
                                 Problem& problem) {
  AttnParams& p = problem.params;
  check_backward(given, in, p);
  const GradientTensors g = allocate_gradients(in, p.dtype, given.needs);
  p.out = tensor_ref(with_unit_stride(given.out, problem.kept));
  p.lse = as_contiguous(given.lse, problem.kept).data_ptr();
  p.grad.dout = tensor_ref(with_unit_stride(given.dout, problem.kept));
  if (given.dlse) p.grad.dlse = as_contiguous(*given.dlse, problem.kept).data_ptr();
  p.grad.deterministic = given.deterministic;
  point_at_gradients(p.grad, g, in, given.needs);
  return g;
}

}  // namespace flash_attn
