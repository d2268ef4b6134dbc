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

// Of 16-bit elements: sizes of `rank` dimensions, and the strides of all but the first, in
// elements. Of a dimension that repeats (a stride of 0) it holds one. False where the tensor is not
// such a one: all strides must be multiples of 16 bytes.
inline bool encode_map(CUtensorMap* map,
                       void* ptr,
                       DType dtype,
                       int rank,
                       const int64_t* sizes,
                       const int64_t* strides,
                       const cuuint32_t* box) {
  const EncodeTiled encode = encode_tiled();
  if (encode == nullptr) return false;
  cuuint64_t size[5] = {static_cast<cuuint64_t>(sizes[0])}, stride[4];
  for (int d = 1; d < rank; ++d) {
    const int64_t step = strides[d - 1];
    size[d] = static_cast<cuuint64_t>(step == 0 ? 1 : sizes[d]);
    stride[d - 1] = size[d] > 1 ? 2 * static_cast<cuuint64_t>(step) : 16;
  }
  const cuuint32_t steps[] = {1, 1, 1, 1, 1};
  const CUtensorMapDataType type =
      dtype == DType::kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return encode(map, type, rank, ptr, size, stride, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// The map of keys or values with these sizes, `box_rows` at most 256.
inline bool make_map(CUtensorMap* map,
                     const TensorRef& t,
                     DType dtype,
                     int dim,
                     int64_t rows,
                     int heads,
                     int64_t batches,
                     int box_rows) {
  const int64_t sizes[] = {dim, rows, heads, batches};
  const int64_t strides[] = {t.row, t.head, t.batch};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(box_rows), 1, 1};
  return encode_map(map, t.ptr, dtype, 4, sizes, strides, box);
}

// The map of queries as packed rows (core/rows.h): a box is `box_rows` rows of the `group` query
// heads of a key head, position by position. False where the tensor is not such a one: then warps
// fetch them (sm90/persistent_schedule.cuh).
inline bool make_query_map(CUtensorMap* map, const AttnParams& p, int group, int box_rows) {
  const TensorRef& t = p.q;
  const bool packed = p.seq_q.cu_seqlens != nullptr;
  const int64_t rows = packed ? p.seq_q.total : p.seqlen_q, batches = packed ? 1 : p.batch;
  const bool repeats =
      (t.row == 0 && rows > 1) || (t.head == 0 && p.heads_q > 1) || (t.batch == 0 && batches > 1);
  const auto at = reinterpret_cast<uintptr_t>(t.ptr);
  if (repeats || ((at % 16) | (t.batch % 8) | (t.row % 8) | (t.head % 8)) != 0) return false;
  if (box_rows % group != 0 || rows > INT32_MAX) return false;
  const int64_t sizes[] = {p.head_dim, group, rows, p.heads_q / group, batches};
  const int64_t strides[] = {t.head, t.row, t.head * group, t.batch};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(group),
                            static_cast<cuuint32_t>(box_rows / group), 1, 1};
  return encode_map(map, t.ptr, p.dtype, 5, sizes, strides, box);
}

}  // namespace flash_attn::sm90
