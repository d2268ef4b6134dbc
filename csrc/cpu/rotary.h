// SPDX-License-Identifier: BSD-3-Clause
// Rotary position embedding (core/cache.h) of one row of one head, and of whole tensors
// (rotary.cpp).
// Whoever calls has checked that positions lie in the tables.
#pragma once

#include "core/cache.h"
#include "cpu/elementwise.h"

namespace flash_attn::cpu {

void rotary(const RotaryParams& params, int workers, ParallelFor parallel_for);

// `buffer`: room for 2 * half values, filled with cos and then sin of a position.
template <class Acc>
void load_angles(Acc* buffer, const RotaryTables& t, int64_t position) {
  const auto widen_row = [&](Acc* dst, const void* table, int64_t row) {
    const int64_t at = position * row;
    for (int c = 0; c < t.half; ++c) {
      switch (t.dtype) {
        case DType::kF64:
          dst[c] = static_cast<Acc>(static_cast<const double*>(table)[at + c]);
          break;
        case DType::kF32: dst[c] = static_cast<const float*>(table)[at + c]; break;
        case DType::kF16: dst[c] = to_float(static_cast<const Half*>(table)[at + c]); break;
        case DType::kBF16: dst[c] = to_float(static_cast<const BFloat*>(table)[at + c]); break;
      }
    }
  };
  widen_row(buffer, t.cos, t.cos_row);
  widen_row(buffer + t.half, t.sin, t.sin_row);
}

// src (dim,) -> dst (dim values, `stride` apart). `angles` as load_angles left them.
template <class Elem, class Acc>
void rotate_row(
    Elem* dst, int64_t stride, const Elem* src, int dim, const RotaryTables& t, const Acc* angles) {
  const Acc *cos = angles, *sin = angles + t.half;
  const int next = t.interleaved ? 1 : t.half, step = t.interleaved ? 2 : 1;
  for (int c = 0; c < t.half; ++c) {
    const int first = c * step, second = first + next;
    const Acc a = to_float(src[first]), b = to_float(src[second]);
    dst[first * stride] = narrow<Elem>(a * cos[c] - b * sin[c]);
    dst[second * stride] = narrow<Elem>(a * sin[c] + b * cos[c]);
  }
  for (int c = 2 * t.half; c < dim; ++c) {
    dst[c * stride] = src[c];
  }
}

}  // namespace flash_attn::cpu
