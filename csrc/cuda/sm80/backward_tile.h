// SPDX-License-Identifier: BSD-3-Clause
// Tile sizes of the backward kernels, with their reasons. Half of a multiprocessor's registers hold
// dK and dV, so kBlockN * head_dim is at most 16,384 for all blocks on one together.
//
// kBlockM queries a step, kBlockN keys a block. A block's warps have two roles
// (backward_block.cuh); in each, kBlockN / kWarpKeys * kDimWarps warps share the work: a warp has
// kWarpKeys keys, of dK or dV the columns of every kDimWarps-th 16, and of the scores kSubQueries
// queries at a time, the next ones' product under way with kAhead. kStages buffers of Q, dO and dS:
// with two of them there is one barrier a step.
#pragma once

#include "core/types.h"
#include "plan/kernel_list.h"

namespace flash_attn::sm80 {

// kDropoutToo: plain scores and dropout, in tiles that begin at multiples of 16 queries and 32
// keys.
template <class Numbers, Score kScoreLevel, bool kDropoutToo = false>
struct BackwardTile : Numbers {
  using N = Numbers;
  static constexpr Score kScore = kScoreLevel;
  static constexpr bool kDropout = kDropoutToo;
  static constexpr int kKeyWarps = N::kBlockN / N::kWarpKeys;
  static constexpr int kRoleWarps = kKeyWarps * N::kDimWarps;
  static constexpr int kWarps = 2 * kRoleWarps, kThreads = 32 * kWarps;
  static constexpr int kRowBlocks = N::kWarpKeys / 16;
  static constexpr int kSubSteps = N::kBlockM / (N::kSubQueries * N::kDimWarps);
  static constexpr int kSubBarriers = min_of(kSubSteps, 2);  // of a group, taking turns
  static constexpr bool kShareProbabilities = N::kDimWarps > 1;
  // dQ of a step is role 1's: a warp has kDqRows queries, and of every kDqColumnWarps-th 16 columns
  // kDqPairs in each of kDqPasses passes. What many additions in a row fill holds up all that reads
  // shared memory, so they are spread (kDqSpread) over the product of the next pass; at head_dim
  // 256 those of the last pass over dP. 128: 325 -> 346 TFLOP/s, 256: 279 -> 288 (H200, 16k). Else
  // fewer columns a pass read dS more often, and more spill.
  static constexpr bool kDqSpread =
      kScore == Score::kPlain && (N::kHeadDim == 128 || N::kHeadDim == 256) && N::kStages == 2;
  static constexpr bool kDqOverScores = kDqSpread && N::kHeadDim == 256;
  static constexpr int kDqRows = min_of(N::kBlockM, 32);
  static constexpr int kDqColumnWarps = kRoleWarps / (N::kBlockM / kDqRows);
  static constexpr int kDqAll = N::kHeadDim / 16 / kDqColumnWarps;
  static constexpr int kDqMost =
      kDqSpread || kScore == Score::kGeneral || N::kHeadDim == 64 ? 2 : 6;
  static constexpr int kDqPairs = min_of(kDqMost, kDqAll);
  static constexpr int kDqPasses = kDqAll / kDqPairs;

  // Role 1 makes the steps of the walk, a tile below the one before from that one alone. Only where
  // it is faster (H200): head_dim 64 by 2 %; 128 loses 5 %, 256 2 %.
  static constexpr bool kQuickSteps = N::kUsual && N::kEven && N::kHeadDim == 64;

  static constexpr int kKBytes = 2 * N::kBlockN * N::kHeadDim;
  static constexpr int kVBytes = 2 * N::kBlockN * N::kHeadDimV;
  static constexpr int kQBytes = 2 * N::kBlockM * N::kHeadDim;
  static constexpr int kDoutBytes = 2 * N::kBlockM * N::kHeadDimV;
  static constexpr int kPanelBytes = 128 * N::kBlockN;  // P or dS: a row of at most 64 queries
  static constexpr int kStatBytes = 4 * N::kBlockM;     // lse, or delta
  static constexpr int kQ = kKBytes + kVBytes, kDout = kQ + N::kStages * kQBytes;
  static constexpr int kDs = kDout + N::kStages * kDoutBytes;
  static constexpr int kP = kDs + N::kStages * kPanelBytes;
  // What role 1 reads is P, but for the general kernels, whose warps of role 0 share P itself.
  static constexpr int kTilesOfP = !kShareProbabilities ? 0 : kScore == Score::kGeneral ? 2 : 1;
  static constexpr int kStats = kP + kTilesOfP * kPanelBytes;
  static constexpr int kState = kStats + N::kStages * 2 * kStatBytes;
  static constexpr int kStateBytes = 560;  // BackwardState
  static constexpr int kSmemBytes = kState + kStateBytes;

  static_assert(N::kBlockM <= 64 && N::kBlockN % N::kWarpKeys == 0 && kThreads >= 2 * N::kBlockM);
  static_assert(kDqPairs * kDqPasses * kDqColumnWarps * 16 == N::kHeadDim);
  static_assert(!kDqOverScores || kSubSteps == 1);
  static_assert(1 + kKeyWarps * (kSubBarriers + (kShareProbabilities ? 2 : 0)) <= 16,
                "a block has 16 barriers");
};

// Narrow: the tile for block masks whose blocks are narrower than kBlockN; void: none. Usual: that
// for plain scores of usual problems (is_usual in backward_main.cuh) of up to kMostUsual queries,
// since less code is faster: on an H200 head_dim 64 by 6 to 10 %, 128 by 1 to 4 % at 512, while it
// loses up to 7 % from 4k on. kEven: of those whose tiles are a range (BackwardGrid::even) as well.
//
// 64 keys a warp: an operand from shared memory serves four row blocks. 162 KB of the 163 of sm_80.
struct Narrow64;
struct Small64;
struct Usual64;
struct Usual128;
struct UsualNarrow64;
struct Backward64 {
  using Narrow = Narrow64;
  using Usual = Usual64;
  static constexpr bool kUsual = false, kEven = true;
  static constexpr int kMostUsual = 0x7fffffff;
  using Dropout = void;
  static constexpr int kHeadDim = 64, kHeadDimV = 64;
  static constexpr int kBlockM = 64, kBlockN = 256, kWarpKeys = 64, kDimWarps = 1;
  static constexpr int kStages = 2, kBlocksPerSm = 1;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  static constexpr int kSubQueries = 16;  // without stmatrix 32 spill
#else
  static constexpr int kSubQueries = 32;
#endif
};
struct Backward128 {
  using Narrow = void;
  using Usual = Usual128;
  static constexpr bool kUsual = false, kEven = true;
  static constexpr int kMostUsual = 1024;
  using Dropout = void;
  static constexpr int kHeadDim = 128, kHeadDimV = 128;
  static constexpr int kBlockM = 64, kBlockN = 128, kWarpKeys = 32, kDimWarps = 1;
  static constexpr int kSubQueries = 64, kStages = 2, kBlocksPerSm = 1;
};
struct Backward192 {
  using Narrow = void;
  using Usual = void;
  static constexpr bool kUsual = false, kEven = true;
  using Dropout = void;
  static constexpr int kHeadDim = 192, kHeadDimV = 128;
  static constexpr int kBlockM = 64, kBlockN = 64, kWarpKeys = 32, kDimWarps = 2;
  static constexpr int kSubQueries = 32, kStages = 2, kBlocksPerSm = 1;
};
struct Backward256 {
  using Narrow = void;
  using Usual = void;
  static constexpr bool kUsual = false, kEven = true;
  using Dropout = void;
  static constexpr int kHeadDim = 256, kHeadDimV = 256;
  static constexpr int kBlockM = 64, kBlockN = 64, kWarpKeys = 32, kDimWarps = 2;
  static constexpr int kSubQueries = 32, kStages = 2, kBlocksPerSm = 1;
};
struct Usual64 : Backward64 {
  using Narrow = void;
  using Usual = void;
  static constexpr bool kUsual = true;
};
struct Usual128 : Backward128 {
  using Usual = void;
  static constexpr bool kUsual = true;
};
struct Dropout64 : Backward64 {
  using Narrow = void;
  using Usual = void;
};
// The general kernels have more to keep beside the scores. Dropout: the tile where there is nothing
// but dropout.
struct General64 : Backward64 {
  using Narrow = Small64;
  using Usual = void;
  using Dropout = Dropout64;
  static constexpr int kSubQueries = 16;
};
struct General128 : Backward128 {
  using Usual = void;
  using Dropout = Backward128;
  static constexpr int kSubQueries = 32;
};

// Less shared memory: 163 KB (Medium), 99 KB (Small), 64 KB (Sm75).
struct Small64 : General64 {
  using Narrow = void;
  using Dropout = void;
  static constexpr int kBlockN = 128, kWarpKeys = 32;  // 64 keys a warp spill
};
struct Narrow64 : Backward64 {
  using Narrow = void;
  using Usual = UsualNarrow64;
  static constexpr int kBlockN = 128, kBlocksPerSm = 2;
};
struct UsualNarrow64 : Narrow64 {
  using Usual = void;
  static constexpr bool kUsual = true, kEven = false;
};
struct Medium256 : Backward256 {
  static constexpr int kStages = 1;
};
struct Small128 : Backward128 {
  using Usual = void;
  static constexpr int kBlockM = 32, kBlockN = 64, kSubQueries = 32;
};
struct Small256 : Backward256 {
  static constexpr int kBlockM = 32, kBlockN = 32, kSubQueries = 16, kStages = 1;
};
struct Sm75Backward64 : Backward64 {
  using Narrow = void;
  using Usual = void;
  static constexpr int kBlockN = 64, kWarpKeys = 32, kStages = 1;
};
struct Sm75Backward128 : Small128 {
  static constexpr int kStages = 1;
};
struct Sm75Backward256 : Small256 {
  static constexpr int kBlockN = 16, kWarpKeys = 16;
};

}  // namespace flash_attn::sm80
