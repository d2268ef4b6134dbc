// SPDX-License-Identifier: BSD-3-Clause
// Merging pairs of (out, lse): against the definition in long double, and the empty rule to the
// bit.
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "check.h"
#include "core/merge.h"

using namespace flash_attn;

namespace {

template <class T>
bool same_bits(T a, T b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

template <class T>
void test_values(double tolerance) {
  std::mt19937 random(3);
  std::uniform_real_distribution<double> lse(-90, 90), out(-3, 3);
  for (int repeat = 0; repeat < 5000; ++repeat) {
    const T la = static_cast<T>(lse(random)),
            lb = static_cast<T>(repeat % 3 ? la + out(random) : lse(random));
    const T a = static_cast<T>(out(random)), b = static_cast<T>(out(random));
    const long double ea = std::exp(static_cast<long double>(la)),
                      eb = std::exp(static_cast<long double>(lb));
    const auto w = merge_weights(la, lb);
    const double expected = static_cast<double>((ea * a + eb * b) / (ea + eb));
    CHECK(std::abs(merge_out(w, a, b) - expected) < tolerance * 200, la, lb, a, b);
    const double expected_lse = static_cast<double>(std::log(ea + eb));
    CHECK(std::abs(w.lse - expected_lse) <= tolerance * (1 + std::abs(expected_lse)), la, lb);
    const auto swapped = merge_weights(lb, la);
    CHECK(same_bits(w.lse, swapped.lse) && same_bits(w.a, swapped.b), la, lb);
  }
  const auto far = merge_weights(static_cast<T>(1e4), static_cast<T>(-1e4));  // no overflow
  CHECK_EQ(far.lse, static_cast<T>(1e4));
  CHECK_EQ(merge_out(far, T(2), T(3)), T(2));
}

template <class T>
void test_empty() {
  const T inf = std::numeric_limits<T>::infinity(), nan = std::numeric_limits<T>::quiet_NaN();
  for (T lse : {T(-100), T(0), T(88), T(-1e30), T(1e30)}) {
    for (T out : {T(0), T(-0.0), T(1.5), T(-3e-38), T(1e38)}) {
      for (T rubbish : {nan, inf, T(7)}) {
        const auto right = merge_weights(lse, -inf), left = merge_weights(-inf, lse);
        CHECK(same_bits(merge_out(right, out, rubbish), out), lse, out);
        CHECK(same_bits(merge_out(left, rubbish, out), out), lse, out);
        CHECK(same_bits(right.lse, lse) && same_bits(left.lse, lse), lse, out);
        CHECK(right.b == 0 && left.a == 0);
      }
    }
  }
  const auto none = merge_weights(-inf, -inf);
  CHECK_EQ(none.lse, -inf);
  CHECK(same_bits(merge_out(none, nan, inf), T(0)));
  CHECK(std::isnan(merge_weights(nan, T(1)).lse));  // a NaN that is in a live side stays
}

}  // namespace

void test_merge() {
  test_values<float>(1e-6);
  test_values<double>(1e-14);
  test_empty<float>();
  test_empty<double>();
}
