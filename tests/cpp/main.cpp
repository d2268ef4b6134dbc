// SPDX-License-Identifier: BSD-3-Clause
// Runs every test of core/ and plan/ and says how many checks held. See run.sh.
#include <chrono>

#include "check.h"

int main() {
  struct Test {
    const char* name;
    void (*run)();
  };
  const Test tests[] = {
      {"seqlen", test_seqlen}, {"mask", test_mask},
      {"tiles", test_tiles},   {"rows, pages", test_rows_pages},
      {"philox", test_philox}, {"merge", test_merge},
      {"split", test_split},   {"plan", test_plan},
  };
  for (const Test& t : tests) {
    const auto start = std::chrono::steady_clock::now();
    const int64_t checks = test::checks, failures = test::failures;
    t.run();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    std::printf("%-12s %11lld checks %5lld failed %6.2f s\n", t.name,
                static_cast<long long>(test::checks - checks),
                static_cast<long long>(test::failures - failures), seconds.count());
  }
  return test::failures == 0 ? 0 : 1;
}
