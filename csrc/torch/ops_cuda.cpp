// SPDX-License-Identifier: BSD-3-Clause
// The operators on CUDA: check, guard the device, allocate, launch on torch's current stream.
// Nothing here synchronises or reads device memory, so every call can be captured in a CUDA graph.
#include <array>
#include <mutex>
#include <optional>

#include <cuda_runtime.h>

#include "plan/plan.h"
#include "torch/compat.h"
#include "torch/signatures.h"

namespace flash_attn {
namespace {

// ---- devices and launches

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  if (cudaDeviceGetAttribute(&value, which, device) != cudaSuccess) {
    throw std::runtime_error(message("flash_attn: cannot read attributes of CUDA device ", device));
  }
  return value;
}

// Read once for each device.
const DeviceInfo& device_info(int device) {
  static std::array<DeviceInfo, 64> infos;
  static std::array<std::once_flag, 64> once;
  std::call_once(once.at(device), [device] {
    DeviceInfo& info = infos[device];
    info.arch = 10 * attribute(cudaDevAttrComputeCapabilityMajor, device) +
                attribute(cudaDevAttrComputeCapabilityMinor, device);
    info.sm_count = attribute(cudaDevAttrMultiProcessorCount, device);
    info.smem_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    info.l2_bytes = attribute(cudaDevAttrL2CacheSize, device);
  });
  return infos[device];
}

// `row` was launched on `device` and `code` came back.
void check_launch(int code, const KernelRow& row, int device) {
  const cudaError_t error = static_cast<cudaError_t>(code);
  if (error == cudaSuccess) return;
  cudaGetLastError();  // a failed launch must not surface in the next call of somebody else
  if (error == cudaErrorNoKernelImageForDevice) {
    raise("NotImplementedError",
          message(row.name, " is not compiled for this GPU (compute capability ",
                  device_info(device).arch / 10, ".", device_info(device).arch % 10,
                  "); this build is for ", FA_CUDA_ARCHS,
                  ". Build again on this machine, or with FLASH_ATTN_CUDA_ARCHS"));
  }
  throw std::runtime_error(message("flash_attn: the launch of ", row.name, " on CUDA device ",
                                   device, " failed: ", cudaGetErrorName(error), ": ",
                                   cudaGetErrorString(error)));
}

const char* family_name(int64_t family) {
  static constexpr const char* kNames[] = {nullptr, "cpu", "sm80", "sm90"};
  return family >= 0 && family < 4 ? kNames[family] : "unknown";
}

// ---- attention

// No row of this pass takes the problem: which there are, and why not.
[[noreturn]] void refuse(Pass pass, const OpInputs& in, int64_t family) {
  const int device = in.q.get_device_index();
  const DeviceGuard guard(device);
  const Problem problem = fill_params(in);
  const Plan plan =
      make_plan(problem.params, pass, device_info(device), kCudaTable, family_name(family));
  std::string reasons;
  for (const std::string& reason : plan.reasons)
    reasons += (reasons.empty() ? "" : "; ") + reason;
  raise("NotImplementedError",
        message("no CUDA kernel serves this call: ", reasons,
                ". backend=\"reference\" computes it, in memory quadratic in the lengths; tensors ",
                "on the CPU are served by the CPU kernels"));
}

ForwardResult forward(const OpInputs& in, int64_t family) {
  refuse(Pass::kForward, in, family);
}

BackwardResult backward(const OpInputs& in, const BackwardInputs&, int64_t family) {
  refuse(Pass::kBackward, in, family);
}

void append_kv(const Tensor&,
               const Tensor&,
               const Tensor&,
               const Tensor&,
               const OptTensor&,
               const OptTensor&,
               const Tensor&,
               const OptTensor&,
               const OptTensor&,
               bool) {
  raise("NotImplementedError",
        "no CUDA append_kv kernel is in this build; caches on the CPU are served");
}

Tensor rotary(const Tensor&, const Tensor&, const Tensor&, const Tensor&, bool, bool) {
  raise("NotImplementedError",
        "no CUDA rotary kernel is in this build; tensors on the CPU are served");
}

// ---- delta

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
  check_launch(plan.row->cuda(params, plan, nullptr, current_stream(device)), *plan.row, device);
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_attn, CUDA, m) {
  m.impl("forward", TORCH_BOX(&forward_operator<forward>));
  m.impl("backward", TORCH_BOX(&backward_operator<backward>));
  m.impl("delta", TORCH_BOX(&delta));
  m.impl("append_kv", TORCH_BOX(&append_kv));
  m.impl("rotary", TORCH_BOX(&rotary));
}

}  // namespace flash_attn
