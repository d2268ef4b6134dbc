// SPDX-License-Identifier: BSD-3-Clause
// Tile sizes of the Hopper family, with their reasons.
#pragma once

namespace flash_attn::sm90 {

// ---- Forward. kWarps / 4 consumer warpgroups of 64 query rows each, one producer warp behind
// them. K and V have kStages stages. With fewer keys a row than kLeastKeys, sm80 is faster (H200).

// Three warpgroups: at head_dim 64 the tensor cores wait for exp2, and the third fills in. 24 + 96
// KiB.
struct Forward64 {
  static constexpr int kHeadDim = 64, kHeadDimV = 64, kBlockM = 192, kBlockN = 128, kWarps = 12;
  static constexpr int kStages = 3, kSlices = 1, kLeastKeys = 640;
  static constexpr bool kPairs = false;
};
// Features take registers.
struct General64 : Forward64 {
  static constexpr int kBlockM = 128, kWarps = 8;
};
// 32 + 128 KiB.
struct Forward128 {
  static constexpr int kHeadDim = 128, kHeadDimV = 128, kBlockM = 128, kBlockN = 128, kWarps = 8;
  static constexpr int kStages = 2, kSlices = 1, kLeastKeys = 400;
  static constexpr bool kPairs = false;
};
// 64 + 128 KiB.
struct Forward256 {
  static constexpr int kHeadDim = 256, kHeadDimV = 256, kBlockM = 128, kBlockN = 64, kWarps = 8;
  static constexpr int kStages = 2, kSlices = 1, kLeastKeys = 0;
  static constexpr bool kPairs = false;
};

}  // namespace flash_attn::sm90
