// SPDX-License-Identifier: BSD-3-Clause
// For which architecture the code was compiled that the current device takes.
#pragma once

#include <cuda_runtime.h>

namespace flash_attn {

// Its code for sm_90a uses shared memory, any other code of it does not.
__global__ void code_probe_kernel(int* x) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ int last;
  last = threadIdx.x;
  __syncthreads();
  *x = last;
#endif
}

// Compute capability * 10 for which the code that the current device takes was compiled; 0 when
// there is none for it. What was compiled for sm_90 without Hopper's own instructions counts as 89.
inline int code_architecture() {
  cudaFuncAttributes found;
  if (cudaFuncGetAttributes(&found, code_probe_kernel) != cudaSuccess) {
    cudaGetLastError();  // nobody else's
    return 0;
  }
  return found.ptxVersion == 90 && found.sharedSizeBytes == 0 ? 89 : found.ptxVersion;
}

}  // namespace flash_attn
