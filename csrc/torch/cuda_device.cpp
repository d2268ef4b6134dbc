// SPDX-License-Identifier: BSD-3-Clause
#include "torch/cuda_device.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <mutex>

#include <cuda_runtime.h>

namespace flash_attn {

namespace {

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  if (cudaDeviceGetAttribute(&value, which, device) != cudaSuccess) {
    throw std::runtime_error(message("flash_attn: cannot read attributes of CUDA device ", device));
  }
  return value;
}

int capability_of(int device) {
  return 10 * attribute(cudaDevAttrComputeCapabilityMajor, device) +
         attribute(cudaDevAttrComputeCapabilityMinor, device);
}

// Read once for each device.
const DeviceInfo& whole_device(int device) {
  static std::array<DeviceInfo, 64> infos;
  static std::array<std::once_flag, 64> once;
  std::call_once(once.at(device), [device] {
    DeviceInfo& info = infos[device];
    info.arch = capability_of(device);
    // 0, no code at all: the launch says so, with what would help.
    if (const int code = kCudaTable.cuda_code(); code > 0) info.arch = std::min(info.arch, code);
    info.sm_count = attribute(cudaDevAttrMultiProcessorCount, device);
    info.smem_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    info.l2_bytes = attribute(cudaDevAttrL2CacheSize, device);
  });
  return infos[device];
}

}  // namespace

DeviceInfo device_info(int device) {
  DeviceInfo info = whole_device(device);
  if (const char* limits = std::getenv("FLASH_ATTN_CUDA_LIMITS")) {
    int arch = 0, smem = 0;
    if (std::sscanf(limits, "%d:%d", &arch, &smem) != 2) {
      raise("ValueError",
            message("FLASH_ATTN_CUDA_LIMITS must be two numbers, as 80:101376, got ", limits));
    }
    info.arch = std::min(info.arch, arch);
    info.smem_per_block = std::min(info.smem_per_block, smem);
    info.any_speed = true;
  }
  return info;
}

void check_launch(int code, const char* name, int device) {
  const cudaError_t error = static_cast<cudaError_t>(code);
  if (error == cudaSuccess) return;
  cudaGetLastError();  // a failed launch must not surface in the next call of somebody else
  if (error == cudaErrorNoKernelImageForDevice) {
    const int capability = capability_of(device);
    raise("NotImplementedError",
          message(name, " is not compiled for this GPU (compute capability ", capability / 10, ".",
                  capability % 10, "); this build is for ", FA_CUDA_ARCHS,
                  ". Build again on this machine, or with FLASH_ATTN_CUDA_ARCHS"));
  }
  throw std::runtime_error(message("flash_attn: the launch of ", name, " on CUDA device ", device,
                                   " failed: ", cudaGetErrorName(error), ": ",
                                   cudaGetErrorString(error)));
}

void zero_async(const Tensor& t, void* stream) {
  if (t.numel() == 0) return;
  const size_t bytes = static_cast<size_t>(t.numel()) * t.element_size();
  check_launch(cudaMemsetAsync(t.data_ptr(), 0, bytes, static_cast<cudaStream_t>(stream)), "memset",
               t.get_device_index());
}

const char* family_name(int64_t family) {
  static constexpr const char* kNames[] = {nullptr, "cpu", "sm80", "sm90"};
  return family >= 0 && family < 4 ? kNames[family] : "unknown";
}

}  // namespace flash_attn
