// SPDX-License-Identifier: BSD-3-Clause
// Tile sizes of the Hopper family, with their reasons.
#pragma once

namespace flash_attn::sm90 {

// ---- Forward. kWarps / 4 consumer warpgroups of 64 query rows each, one producer warp behind
// them. K and V have kStages stages. With fewer keys a row than kLeastKeys, sm80 is faster (H200).
// Head dims up to kSmallerDim are another tile's. Mask blocks that are no whole tiles, pages that
// ask for more boxes than 128 keys would, and problems of two warpgroups' rows are another tile's
// too unless kAnyBlocks; dropout unless kDropout.
//
// Blocks that stay (persistent.cuh) in problems without a window, and in those with one whose rows
// see at most kMostKeys on average: with more the tasks' order does more than their beginnings and
// ends cost. With block lists, where none lists more than kMostListed keys. Rows that see fewer
// keys than kShort (without a window), kShortCausal (one without a left side) or kShortWindow are
// another tile's: of two warpgroups, or of fewer keys.
//
// Three warpgroups where registers allow: the third fills in where the other two wait, and K and V
// come for 192 rows at once. Keys a tile as many as registers hold without a spill: S, P and out
// take kBlockN / 2 + kBlockN / 4 + kHeadDimV / 2 of a thread's 160.

constexpr int kNever = 1 << 30;  // more keys than there are

// 24 + 128 KiB.
struct Forward64 {
  static constexpr int kHeadDim = 64, kHeadDimV = 64, kBlockM = 192, kBlockN = 128, kWarps = 12;
  static constexpr int kStages = 4, kSlices = 1, kLeastKeys = 380, kSmallerDim = 0;
  static constexpr int kMostKeys = 6000, kMostListed = 0;
  static constexpr int kShort = 0, kShortCausal = 600, kShortWindow = 2000;
  static constexpr bool kPairs = false, kAnyBlocks = false, kDropout = true, kAhead = true;
};
// For windows, and for short causal problems. Of 64 keys: what a warpgroup's rows do not see are
// whole tiles.
struct Windows64 : Forward64 {
  static constexpr int kBlockN = 64, kStages = 3;
  static constexpr int kShort = kNever, kShortCausal = 0, kShortWindow = 0;
};
// Without what dropout needs of registers.
struct General64 : Forward64 {
  static constexpr int kLeastKeys = 640;
  static constexpr int kShort = 0, kShortCausal = 0, kShortWindow = 0;
  static constexpr bool kDropout = false;
};
struct Dropout64 : General64 {
  static constexpr int kBlockN = 96;
  static constexpr bool kDropout = true;
};
struct Blocks64 : Forward64 {
  static constexpr int kBlockM = 128, kWarps = 8, kStages = 3, kMostListed = kNever;
  static constexpr bool kAnyBlocks = true;
};
// 48 + 120 KiB.
struct Forward128 {
  static constexpr int kHeadDim = 128, kHeadDimV = 128, kBlockM = 192, kBlockN = 80, kWarps = 12;
  static constexpr int kStages = 3, kSlices = 1, kLeastKeys = 250, kSmallerDim = 64;
  static constexpr int kMostKeys = 3000, kMostListed = 0;
  static constexpr int kShort = 600, kShortCausal = 600, kShortWindow = 2000;
  static constexpr bool kPairs = false, kAnyBlocks = false, kDropout = true, kAhead = true;
};
// As Windows64.
struct Windows128 : Forward128 {
  static constexpr int kBlockN = 64, kShort = kNever, kShortCausal = 0, kShortWindow = 0;
};
// Dropout draws for 32 keys at a time.
struct General128 : Forward128 {
  static constexpr int kBlockN = 64, kLeastKeys = 400;
  static constexpr int kShort = 0, kShortCausal = 0, kShortWindow = 0;
};
// 32 + 128 KiB.
struct Blocks128 : Forward128 {
  static constexpr int kBlockM = 128, kBlockN = 128, kWarps = 8, kStages = 2, kMostListed = 2500;
  static constexpr bool kAnyBlocks = true;
};
// Latent attention's prefill, uncompressed: keys with a rotary part. 72 + 120 KiB.
struct Forward192 {
  static constexpr int kHeadDim = 192, kHeadDimV = 128, kBlockM = 192, kBlockN = 64, kWarps = 12;
  static constexpr int kStages = 3, kSlices = 1, kLeastKeys = 0, kSmallerDim = 128;
  static constexpr bool kPairs = false, kAnyBlocks = true, kDropout = true, kAhead = true;
  static constexpr int kMostKeys = kNever, kMostListed = 2500;
};
// 64 + 128 KiB.
struct Forward256 {
  static constexpr int kHeadDim = 256, kHeadDimV = 256, kBlockM = 128, kBlockN = 64, kWarps = 8;
  static constexpr int kStages = 2, kSlices = 1, kLeastKeys = 0, kSmallerDim = 128;
  static constexpr bool kPairs = false, kAnyBlocks = true, kDropout = true, kAhead = false;
  static constexpr int kMostKeys = 300, kMostListed = 2500;
};

}  // namespace flash_attn::sm90
