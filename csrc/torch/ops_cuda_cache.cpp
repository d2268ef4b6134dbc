// SPDX-License-Identifier: BSD-3-Clause
// The CUDA operators around the KV cache: appending keys and values, and rotary embedding. Lengths,
// tables and indices are read by the kernels alone, which pass over what does not exist.
#include "cuda/support/launchers.h"
#include "torch/cache_params.h"
#include "torch/cuda_device.h"

namespace flash_attn {

namespace {

void check_served(DType type, const char* name) {
  if (type != DType::kF64) return;
  raise("NotImplementedError",
        message(name,
                " on CUDA takes float16, bfloat16 and float32, got float64; tensors on the "
                "CPU are served"));
}

void append_kv(const Tensor& k_cache,
               const Tensor& v_cache,
               const Tensor& k,
               const Tensor& v,
               const OptTensor& cos,
               const OptTensor& sin,
               const Tensor& cache_seqlens,
               const OptTensor& cache_batch_idx,
               const OptTensor& block_table,
               bool interleaved) {
  const int device = k_cache.get_device_index();
  const DeviceGuard guard(device);
  std::vector<Tensor> kept;
  const AppendParams p = fill_append(
      {k_cache, v_cache, k, v, cos, sin, cache_seqlens, cache_batch_idx, block_table, interleaved},
      kept);
  check_served(p.dtype, "append_kv");
  if (k.numel() == 0) return;
  check_launch(launch_append_kv(p, current_stream(device)), "append_kv", device);
}

Tensor rotary(const Tensor& x,
              const Tensor& cos,
              const Tensor& sin,
              const Tensor& offsets,
              bool interleaved,
              bool per_row) {
  const int device = x.get_device_index();
  const DeviceGuard guard(device);
  std::vector<Tensor> kept;
  RotaryParams p = fill_rotary({x, cos, sin, offsets, interleaved, per_row}, kept);
  check_served(p.dtype, "rotary");
  const Tensor out = allocate_rotated(p, x);
  if (x.numel() > 0) check_launch(launch_rotary(p, current_stream(device)), "rotary", device);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_attn, CUDA, m) {
  m.impl("append_kv", TORCH_BOX(&append_kv));
  m.impl("rotary", TORCH_BOX(&rotary));
}

}  // namespace flash_attn
