// SPDX-License-Identifier: BSD-3-Clause
// The rows of one instruction set. Included by each isa_*.cpp below its target pragma.
#pragma once

#include <array>

#include "cpu/backward.h"
#include "cpu/forward.h"

namespace flash_attn::cpu {

// Tiles, measured on an AMD EPYC with AVX-512 (2026-11): many rows share one packing of K and V
// (the planner takes fewer where threads would idle), and the scores of a panel, 128 keys, stay in
// the L1 cache.
constexpr int kForwardM = 256, kForwardN = 128;
constexpr int kBackwardM = 128, kBackwardN = 128;

// "cpu_avx512_forward_f32"
template <class Arch, Pass kPass, DType kDType>
struct RowName {
  static constexpr std::array<char, 40> make() {
    constexpr const char* kTypes[] = {"f64", "f32", "f16", "bf16"};
    std::array<char, 40> text{};
    size_t at = 0;
    for (const char* part :
         {"cpu_", Arch::kName, kPass == Pass::kForward ? "_forward_" : "_backward_",
          kTypes[static_cast<int>(kDType)]}) {
      for (; *part != 0; ++part)
        text[at++] = *part;
    }
    return text;
  }
  static constexpr std::array<char, 40> kText = make();
};

template <class Arch, class Number, class Elem, DType kDType>
constexpr KernelRow forward_row() {
  using Kernel = Forward<Arch, Number, Elem>;
  return {RowName<Arch, Pass::kForward, kDType>::kText.data(),
          "cpu",
          Pass::kForward,
          0,
          Arch::kIsa,
          kDType,
          0,
          0,
          Score::kGeneral,
          kForwardM,
          kForwardN,
          Kernel::worker_bytes,
          Kernel::shared_bytes,
          Kernel::run,
          nullptr};
}

template <class Arch, class Number, class Elem, DType kDType>
constexpr KernelRow backward_row() {
  using Kernel = Backward<Arch, Number, Elem>;
  return {RowName<Arch, Pass::kBackward, kDType>::kText.data(),
          "cpu",
          Pass::kBackward,
          0,
          Arch::kIsa,
          kDType,
          0,
          0,
          Score::kGeneral,
          kBackwardM,
          kBackwardN,
          Kernel::worker_bytes,
          Kernel::shared_bytes,
          Kernel::run,
          nullptr};
}

// The rows of an instruction set that computes in fp32 and fp64.
template <class Arch>
constexpr KernelRow kRowsOf[] = {
    forward_row<Arch, F64, double, DType::kF64>(),  forward_row<Arch, F32, float, DType::kF32>(),
    forward_row<Arch, F32, Half, DType::kF16>(),    forward_row<Arch, F32, BFloat, DType::kBF16>(),
    backward_row<Arch, F64, double, DType::kF64>(), backward_row<Arch, F32, float, DType::kF32>(),
    backward_row<Arch, F32, Half, DType::kF16>(),   backward_row<Arch, F32, BFloat, DType::kBF16>(),
};

}  // namespace flash_attn::cpu
