// SPDX-License-Identifier: BSD-3-Clause
// The smallest test frame: each test file has one function, main.cpp calls them. A failed CHECK
// prints the place and the values and the program goes on; it exits with 1 if anything failed.
#pragma once

#include <cstdint>
#include <cstdio>
#include <sstream>
#include <string>

namespace test {

inline int64_t checks = 0, failures = 0;

inline void fail(const char* file, int line, const std::string& what) {
  if (++failures <= 20) std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
}

template <class... T>
std::string words(const T&... values) {
  std::ostringstream out;
  ((out << ' ' << values), ...);
  return out.str();
}

}  // namespace test

// CHECK(condition, values to print when it does not hold…)
#define CHECK(condition, ...)                                                    \
  do {                                                                           \
    ++test::checks;                                                              \
    if (!(condition)) {                                                          \
      test::fail(__FILE__, __LINE__, #condition ":" + test::words(__VA_ARGS__)); \
    }                                                                            \
  } while (false)

// CHECK_EQ(a, b, values to print when they differ…)
#define CHECK_EQ(a, b, ...)                                                     \
  do {                                                                          \
    ++test::checks;                                                             \
    const auto a_value = (a);                                                   \
    const auto b_value = (b);                                                   \
    if (!(a_value == b_value)) {                                                \
      const std::string values =                                                \
          test::words(a_value, "!=", b_value, "at") + test::words(__VA_ARGS__); \
      test::fail(__FILE__, __LINE__, #a " == " #b ":" + values);                \
    }                                                                           \
  } while (false)

void test_seqlen();
void test_mask();
void test_tiles();
void test_rows_pages();
void test_philox();
void test_merge();
void test_split();
void test_plan();
