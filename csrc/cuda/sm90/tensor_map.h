// SPDX-License-Identifier: BSD-3-Clause
// How the copy engine sees a tensor (batch, row, head, dim): boxes of 64 columns of some rows of
// one head, swizzled as tile/swizzle.cuh says.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "core/params.h"

namespace flash_attn::sm90 {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's function; null where it is too old. Found once: libcuda is not linked.
inline EncodeTiled encode_tiled() {
  static const EncodeTiled found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult status;
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                               12000, cudaEnableDefault, &status);
#else
    const cudaError_t error =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &status);
#endif
    return error == cudaSuccess ? reinterpret_cast<EncodeTiled>(function) : nullptr;
  }();
  return found;
}

// The map of a 16-bit tensor with these sizes, `box_rows` at most 256. Of heads or batches that
// repeat one (a stride of 0) it holds that one. False where the tensor is not such a one: rows,
// heads and batches must begin at multiples of 16 bytes.
inline bool make_map(CUtensorMap* map,
                     const TensorRef& t,
                     DType dtype,
                     int dim,
                     int64_t rows,
                     int heads,
                     int64_t batches,
                     int box_rows) {
  const EncodeTiled encode = encode_tiled();
  if (encode == nullptr) return false;
  const auto stride = [](int64_t elements, int64_t count) {
    return static_cast<cuuint64_t>(elements != 0 && count > 1 ? 2 * elements : 16);
  };
  const auto size = [](int64_t elements, int64_t count) {
    return static_cast<cuuint64_t>(elements == 0 ? 1 : count);
  };
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(dim), static_cast<cuuint64_t>(rows),
                              size(t.head, heads), size(t.batch, batches)};
  const cuuint64_t strides[] = {stride(t.row, rows), stride(t.head, heads),
                                stride(t.batch, batches)};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(box_rows), 1, 1}, steps[] = {1, 1, 1, 1};
  const CUtensorMapDataType type =
      dtype == DType::kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return encode(map, type, 4, t.ptr, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace flash_attn::sm90
