// SPDX-License-Identifier: BSD-3-Clause
// The one door to torch: LibTorch stable ABI (TORCH_TARGET_VERSION 2.10), no ATen. Everything that
// the other files of csrc/torch need of torch and that is not plain Tensor metadata is here:
// element types, allocation, typed errors and, under USE_CUDA, the current stream and device guard.
//
// Only std::runtime_error crosses the ABI. A text that begins with a marker,
// "[flash_attn:ValueError] …", is turned into the typed Python exception by flash_attn/_ops.py.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "core/types.h"

namespace flash_attn {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// ---- errors

// kind: ValueError, TypeError, NotImplementedError or OutOfMemoryError. The message names the
// argument, what came and what is allowed.
[[noreturn]] inline void raise(const char* kind, const std::string& message) {
  throw std::runtime_error(std::string("[flash_attn:") + kind + "] " + message);
}

// Joins its arguments into one text: message("head_dim is ", 3).
template <class... Args>
std::string message(const Args&... args) {
  std::ostringstream text;
  (text << ... << args);
  return text.str();
}

// "(2, 3, 4)"
template <class Sizes>
std::string shape_text(const Sizes& sizes) {
  std::ostringstream text;
  text << "(";
  for (size_t i = 0; i < sizes.size(); ++i)
    text << (i ? ", " : "") << sizes[i];
  text << (sizes.size() == 1 ? ",)" : ")");
  return text.str();
}

// ---- element types

inline const char* dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Double: return "float64";
    case ScalarType::Float: return "float32";
    case ScalarType::Half: return "float16";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Bool: return "bool";
    case ScalarType::Byte: return "uint8";
    default: return "another dtype";
  }
}

inline ScalarType scalar_type(DType type) {
  switch (type) {
    case DType::kF64: return ScalarType::Double;
    case DType::kF32: return ScalarType::Float;
    case DType::kF16: return ScalarType::Half;
    case DType::kBF16: return ScalarType::BFloat16;
  }
  raise("TypeError", "unknown element type");
}

// `name` is the argument's, for the message.
inline DType dtype_of(const Tensor& tensor, const char* name) {
  const ScalarType type = tensor.scalar_type();
  switch (type) {
    case ScalarType::Double: return DType::kF64;
    case ScalarType::Float: return DType::kF32;
    case ScalarType::Half: return DType::kF16;
    case ScalarType::BFloat16: return DType::kBF16;
    default: break;
  }
  raise("TypeError",
        message(name, " must be float16, bfloat16, float32 or float64, got ", dtype_name(type)));
}

// Statistics and accumulators of inputs of a type: fp32, for fp64 inputs fp64.
inline DType accumulator_type(DType type) {
  return type == DType::kF64 ? DType::kF64 : DType::kF32;
}

// ---- allocation

// An uninitialised contiguous tensor on the device of `like`. `what` names it when memory runs out.
inline Tensor allocate(const std::vector<int64_t>& sizes,
                       ScalarType type,
                       const Tensor& like,
                       const char* what) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= sizes[d] > 0 ? sizes[d] : 1;
  }
  int32_t dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  int32_t device_type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                               dtype, device_type, like.get_device_index(),
                               &handle) != AOTI_TORCH_SUCCESS) {
    const int64_t width = type == ScalarType::Byte     ? 1
                          : type == ScalarType::Double ? 8
                          : type == ScalarType::Float  ? 4
                                                       : 2;
    raise("OutOfMemoryError", message("could not allocate ", stride * width, " bytes for ", what,
                                      ", ", shape_text(sizes), " of ", dtype_name(type)));
  }
  return Tensor(handle);
}

inline Tensor allocate(const std::vector<int64_t>& sizes,
                       DType type,
                       const Tensor& like,
                       const char* what) {
  return allocate(sizes, scalar_type(type), like, what);
}

#ifdef USE_CUDA
// ---- CUDA

using torch::stable::accelerator::DeviceGuard;

// torch's current stream of a device, a cudaStream_t.
inline void* current_stream(int32_t device_index) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  return stream;
}
#endif

}  // namespace flash_attn
