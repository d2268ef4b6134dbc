// SPDX-License-Identifier: BSD-3-Clause
// Vectors for the CPU kernels, on the compiler's vector extension: one source for AVX-512, AVX2,
// NEON and plain SSE2. An isa_*.cpp file sets the target, includes this and instantiates the
// kernels with its own Arch type, so no two instruction sets share an instantiation. What the
// extension lacks (half precision, bf16 dot products, max, scaling by 2^n) is chosen here by what
// the target offers.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
// GCC 12 takes the deliberately undefined operands inside its own AVX-512 header for mistakes.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include "core/types.h"
#include "plan/device.h"

namespace flash_attn::cpu {

// Arch: kBytes a vector, kVectors of them side by side in a panel, kRows rows of accumulators.
// kRows x kVectors accumulators, kVectors of the panel and a broadcast fit the register file.
struct ScalarArch {
  static constexpr const char* kName = "scalar";
  static constexpr uint32_t kIsa = kIsaScalar;
  static constexpr int kBytes = 16, kVectors = 2, kRows = 4;
};
struct Avx2Arch {
  static constexpr const char* kName = "avx2";
  static constexpr uint32_t kIsa = kIsaAvx2;
  static constexpr int kBytes = 32, kVectors = 2, kRows = 4;
};
struct Avx512Arch {
  static constexpr const char* kName = "avx512";
  static constexpr uint32_t kIsa = kIsaAvx512;
  static constexpr int kBytes = 64, kVectors = 2, kRows = 8;
};
struct Avx512Bf16Arch {
  static constexpr const char* kName = "avx512bf16";
  static constexpr uint32_t kIsa = kIsaAvx512Bf16;
  static constexpr int kBytes = 64, kVectors = 2, kRows = 8;
};
struct NeonArch {
  static constexpr const char* kName = "neon";
  static constexpr uint32_t kIsa = kIsaNeon;
  static constexpr int kBytes = 16, kVectors = 4, kRows = 4;
};

// Storage of the 16-bit types. Arithmetic is in fp32.
struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};

template <class T, int kBytes>
struct VecOf {
  typedef T type __attribute__((vector_size(kBytes)));
};
template <class T, class Arch>
using Vec = typename VecOf<T, Arch::kBytes>::type;

template <class T>
struct IntOf;
template <>
struct IntOf<float> {
  using type = int32_t;
};
template <>
struct IntOf<double> {
  using type = int64_t;
};
template <class T>
using Int = typename IntOf<T>::type;

template <class V>
using Lane = std::remove_cv_t<std::remove_reference_t<decltype(V{}[0])>>;
template <class V>
constexpr int kLanes = sizeof(V) / sizeof(Lane<V>);
// A vector's size names its instruction set: the macros of the compiler do not follow a target
// pragma.
template <class V>
constexpr bool kIsAvx512 = sizeof(V) == 64;
template <class V>
constexpr bool kIsAvx2 = sizeof(V) == 32;

template <class V, class T>
[[gnu::always_inline]] inline V load(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}
template <class V, class T>
[[gnu::always_inline]] inline void store(T* p, V v) {
  std::memcpy(p, &v, sizeof(V));
}
template <class V>
[[gnu::always_inline]] inline V splat(Lane<V> x) {
  return x - V{};
}

// The larger; a NaN in b comes through.
template <class V>
[[gnu::always_inline]] inline V vmax(V a, V b) {
#if defined(__x86_64__)
  if constexpr (kIsAvx512<V> && sizeof(Lane<V>) == 4) return (V)_mm512_max_ps((__m512)a, (__m512)b);
  if constexpr (kIsAvx2<V> && sizeof(Lane<V>) == 4) return (V)_mm256_max_ps((__m256)a, (__m256)b);
#endif
  return a > b ? a : b;
}

// The nearest integer, for |x| < 2^22.
template <class V>
[[gnu::always_inline]] inline V vround(V x) {
#if defined(__x86_64__)
  if constexpr (kIsAvx512<V>) return (V)_mm512_roundscale_ps((__m512)x, 0);
#endif
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23
  return (x + kRound) - kRound;
}

// e^x for x well below 88; exactly 1 at 0 and 0 for x < -87.3 and for -inf; a NaN comes through.
// Relative error 6e-8 with kDegree 6, 6e-6 with 4 (enough where the result becomes bf16). e^x = 2^n
// e^r with |r| <= ln 2 / 2, e^r by a polynomial, our minimax fit.
template <int kDegree, class V>
[[gnu::always_inline]] inline V vexp(V x) {
  static_assert(kDegree == 4 || kDegree == 6);
  if constexpr (sizeof(Lane<V>) == 8) {
    V r;
    for (int l = 0; l < kLanes<V>; ++l)
      r[l] = std::exp(x[l]);
    return r;
  } else {
    x = vmax(splat<V>(-88.0f), x);
    const V n = vround(x * 1.442695041f);
    V r, p;
    if constexpr (kDegree == 6) {
      r = x - n * 6.931457520e-1f;  // 16 bits of ln 2: exact products; then the rest
      r = r - n * 1.428606820e-6f;
      p = r * 1.381461315e-3f + 8.368709945e-3f;
      p = p * r + 4.166838737e-2f;
      p = p * r + 1.666652069e-1f;
      p = p * r + 4.999999345e-1f;
    } else {
      r = x - n * 6.931471806e-1f;
      p = r * 4.127774704e-2f + 1.675351435e-1f;
      p = p * r + 5.000511607e-1f;
    }
    p = p * r + 1.0f;
    p = p * r + 1.0f;
#if defined(__x86_64__)
    if constexpr (kIsAvx512<V>) {
      const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.3f), _CMP_NLT_UQ);
      return (V)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)n);
    }
#endif
    typedef int32_t I __attribute__((vector_size(sizeof(V))));
    const I exponent = (__builtin_convertvector(n, I) + 127) << 23;  // n == -127 gives 0
    V scale;
    std::memcpy(&scale, &exponent, sizeof(V));
    return p * scale;
  }
}

// tanh x. Near 0 by an odd polynomial (our minimax fit, 3e-9), elsewhere 1 - 2 / (e^2|x| + 1).
template <class V>
[[gnu::always_inline]] inline V vtanh(V x) {
  if constexpr (sizeof(Lane<V>) == 8) {
    V r;
    for (int l = 0; l < kLanes<V>; ++l)
      r[l] = std::tanh(x[l]);
    return r;
  } else {
    const V magnitude = x < 0.0f ? -x : x;
    const V e = vexp<6>(magnitude * -2.0f);
    const V far = (1.0f - e) / (1.0f + e);
    const V y = x * x;
    V p = y * -5.852214657e-3f + 2.075367506e-2f;
    p = p * y - 5.376872156e-2f;
    p = p * y + 1.333168923e-1f;
    p = p * y - 3.333328327e-1f;
    p = p * y + 1.0f;
    return magnitude < 0.6f ? x * p : (x < 0.0f ? -far : far);
  }
}

// ---- 16-bit storage

static inline float to_float(BFloat x) {
  const uint32_t bits = uint32_t{x.bits} << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
static inline BFloat to_bfloat(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if (f != f) return {0x7fc0};
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

static inline float to_float(Half h) {
  const uint32_t sign = uint32_t{h.bits & 0x8000u} << 16, rest = h.bits & 0x7fffu;
  uint32_t bits = rest << 13;
  float f;
  if (rest >= 0x7c00) {
    bits |= 0x7f800000u;  // inf, NaN
    std::memcpy(&f, &bits, 4);
  } else {
    std::memcpy(&f, &bits, 4);
    f *= 0x1p112f;  // moves the exponent's bias; subnormals come out right
  }
  std::memcpy(&bits, &f, 4);
  bits |= sign;
  std::memcpy(&f, &bits, 4);
  return f;
}
static inline Half to_half(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  const uint32_t sign = bits >> 16 & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (bits >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // rounds past 65504
  float magnitude;
  std::memcpy(&magnitude, &bits, 4);
  if (bits < 0x38800000u) {  // subnormal half: adding 0.5 leaves the rounded value in the low bits
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    return {static_cast<uint16_t>(sign | (bits - 0x3f000000u))};
  }
  bits += 0xfffu + (bits >> 13 & 1);
  return {static_cast<uint16_t>(sign | (bits - 0x38000000u) >> 13)};
}
static inline float to_float(float x) {
  return x;
}
static inline double to_float(double x) {
  return x;
}

// n elements of storage -> arithmetic type and back.
template <class Arch, class Acc, class Elem>
[[gnu::always_inline]] inline void widen(Acc* dst, const Elem* src, int n) {
  int c = 0;
#if defined(__x86_64__)
  if constexpr (std::is_same_v<Elem, Half> && sizeof(Acc) == 4 && Arch::kBytes == 64) {
    for (; c + 16 <= n; c += 16)
      _mm512_storeu_ps(dst + c, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(src + c))));
  }
  if constexpr (std::is_same_v<Elem, BFloat> && sizeof(Acc) == 4 && Arch::kBytes == 64) {
    for (; c + 16 <= n; c += 16) {
      const __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(src + c)));
      _mm512_storeu_si512(dst + c, _mm512_slli_epi32(x, 16));
    }
  }
  if constexpr (std::is_same_v<Elem, Half> && sizeof(Acc) == 4 && Arch::kBytes == 32) {
    for (; c + 8 <= n; c += 8)
      _mm256_storeu_ps(dst + c, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(src + c))));
  }
#endif
  for (; c < n; ++c)
    dst[c] = to_float(src[c]);
}
template <class Elem, class Acc>
[[gnu::always_inline]] inline Elem narrow(Acc x) {
  if constexpr (std::is_same_v<Elem, BFloat>)
    return to_bfloat(x);
  else if constexpr (std::is_same_v<Elem, Half>)
    return to_half(x);
  else
    return static_cast<Elem>(x);
}

}  // namespace flash_attn::cpu
