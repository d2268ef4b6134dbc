// SPDX-License-Identifier: BSD-3-Clause
// The one place where kernels are launched. No synchronisation; an error comes back as a code,
// which csrc/torch/ops_cuda.cpp turns into an exception.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

namespace flash_attn {

// kernel<<<blocks, threads, shared_bytes, stream>>>(args...). Blocks lie along grid.x, whose limit
// is 2^31 - 1.
template <class... Params, class... Args>
cudaError_t launch_shared(void (*kernel)(Params...),
                          int64_t blocks,
                          int threads,
                          int shared_bytes,
                          cudaStream_t stream,
                          const Args&... args) {
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  if (shared_bytes > 48 * 1024) {  // more must be asked for, on each device
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, Params(args)...);
}

// The same without dynamic shared memory.
template <class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...),
                   int64_t blocks,
                   int threads,
                   cudaStream_t stream,
                   const Args&... args) {
  return launch_shared(kernel, blocks, threads, 0, stream, args...);
}

// Of the current device: as many blocks as fill it, one each.
inline cudaError_t count_multiprocessors(int* count) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}

}  // namespace flash_attn
