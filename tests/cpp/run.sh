#!/bin/sh
# SPDX-License-Identifier: BSD-3-Clause
# Builds and runs the C++ tests of csrc/core and csrc/plan: no torch, no GPU, only a C++17 compiler.
#   tests/cpp/run.sh            optimised
#   tests/cpp/run.sh sanitize   under AddressSanitizer and UndefinedBehaviorSanitizer
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
flags="-std=c++17 -O1 -Wall -Wextra -I$root/csrc -I$here"
if [ "${1:-}" = sanitize ]; then
  flags="$flags -g -fsanitize=address,undefined -fno-sanitize-recover=all"
fi
# Two compilers at a time; the names hold no spaces.
ls "$here"/*.cpp "$root"/csrc/plan/*.cpp |
  xargs -P 2 -I{} sh -c '"$1" $2 -c "$3" -o "$4/$(basename "$3" .cpp).o"' sh \
    "${CXX:-g++}" "$flags" {} "$build"
# shellcheck disable=SC2086
"${CXX:-g++}" $flags "$build"/*.o -o "$build/core_tests"
"$build/core_tests"
