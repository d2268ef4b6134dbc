// SPDX-License-Identifier: BSD-3-Clause
// The one place where kernels are launched. No synchronisation; an error comes back as a code,
// which csrc/torch/ops_cuda.cpp turns into an exception.
#pragma once

#include <cuda_runtime.h>

namespace flash_attn {

// kernel<<<blocks, threads, 0, stream>>>(args...). Blocks lie along grid.x, whose limit is 2^31
// - 1.
template <class... Params, class... Args>
cudaError_t launch(
    void (*kernel)(Params...), int64_t blocks, int threads, cudaStream_t stream, Args... args) {
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, Params(args)...);
}

// Compute capability * 10 for which the code of a kernel that the current device takes was
// compiled; 0 when there is none for it.
inline int code_architecture(const void* kernel) {
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) {
    cudaGetLastError();  // nobody else's
    return 0;
  }
  return attributes.ptxVersion;
}

}  // namespace flash_attn
