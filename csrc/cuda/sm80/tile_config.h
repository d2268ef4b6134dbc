// SPDX-License-Identifier: BSD-3-Clause
// Tile sizes of the portable family, with their reasons. Shared memory decides which devices a row
// fits: 227 KiB a block on sm_90, 163 on sm_80, 99 on sm_86, 89 and 120, 64 on sm_75.
#pragma once

namespace flash_attn::sm80 {

// ---- Forward. kWarps warps share kBlockM query rows; a warp has kRowBlocks blocks of 16 of them
// and all kBlockN keys of a tile. K and V have two stages. With kSlices > 1 a block makes only
// kHeadDimV of the kSlices * kHeadDimV columns of out, and as many blocks share a tile of rows.
// Fragments of K are read kAhead steps before their use; the first kKept steps of 16 columns of Q
// stay in registers where tiles hide nothing.

// 32 rows a warp halve the reads of K and V from shared memory; two blocks a multiprocessor hide
// each other's softmax. 48 KiB.
struct Forward64 {
  static constexpr int kHeadDim = 64, kHeadDimV = 64, kBlockM = 128, kBlockN = 64, kWarps = 4;
  static constexpr int kBlocksPerSm = 2, kSlices = 1, kAhead = 1, kKept = 4;
  static constexpr bool kPairs = false;
};
// The same for forward_even.cuh where two blocks of 80 KiB fit: twice the keys for a barrier, 7 %
// faster (H200) than with 64.
struct Even64 : Forward64 {
  static constexpr int kBlockN = 128, kKept = 0;
};
// 96 KiB.
struct Forward128 : Forward64 {
  static constexpr int kHeadDim = 128, kHeadDimV = 128, kKept = 0;
};
// 88 KiB, so that two blocks fit there too.
struct Forward192 : Forward128 {
  static constexpr int kHeadDim = 192, kBlockN = 32;
};
// Out alone would take 256 registers at 32 rows a warp. Where there is shared memory for it two
// warps share 32 rows (forward_pair.cuh), K and V have one stage and P a place: 224 KiB. Elsewhere
// a warp has 16 rows: 96 KiB.
struct Forward256Pairs {
  static constexpr int kHeadDim = 256, kHeadDimV = 256, kBlockM = 128, kBlockN = 128, kWarps = 8;
  static constexpr int kBlocksPerSm = 1, kSlices = 1, kAhead = 2;
  static constexpr bool kPairs = true;
};
struct Forward256 : Forward64 {
  static constexpr int kHeadDim = 256, kHeadDimV = 256, kBlockM = 64, kBlockN = 32, kKept = 0;
};
// Two blocks share a tile's rows: each repeats Q K^T and makes half of out's columns, since all of
// them are twice the registers there are. 160 KiB; the small one 80.
struct Forward512 : Forward256 {
  static constexpr int kHeadDim = 512, kBlocksPerSm = 1, kSlices = 2;
};
struct Forward512Small : Forward512 {
  static constexpr int kBlockM = 32, kBlockN = 16, kWarps = 2;
};

// Features (kGeneral) take registers: half the scores where out has many. 64 KiB.
struct General128 : Forward128 {
  static constexpr int kBlockN = 32;
};

// sm_75 gives a block 64 KiB: the tiles of head_dim 64, and these of 48, 44, 48 and 56.
struct Sm75Forward128 : Forward128 {
  static constexpr int kBlockM = 64, kBlockN = 32;
};
struct Sm75Forward192 : Forward192 {
  static constexpr int kBlockM = 64, kBlockN = 16;
};
struct Sm75Forward256 : Forward256 {
  static constexpr int kBlockM = 32, kBlockN = 16, kWarps = 2;
};
struct Sm75Forward512 : Forward512 {
  static constexpr int kHeadDimV = 128, kBlockM = 16, kBlockN = 16, kWarps = 1, kSlices = 4;
};

// fp32 (kGeneral alone): up to head_dim 256 at most 99 KiB, so that one set of rows serves all from
// sm_80 on. 48, 96 and 96 KiB.
struct F32Forward64 {
  static constexpr int kHeadDim = 64, kHeadDimV = 64, kBlockM = 64, kBlockN = 32, kWarps = 4;
  static constexpr int kBlocksPerSm = 3, kSlices = 1;
  static constexpr bool kPairs = false;
};
struct F32Forward128 : F32Forward64 {
  static constexpr int kHeadDim = 128, kHeadDimV = 128, kBlocksPerSm = 2;
};
struct F32Forward256 {
  static constexpr int kHeadDim = 256, kHeadDimV = 256, kBlockM = 32, kBlockN = 16, kWarps = 2;
  static constexpr int kBlocksPerSm = 2, kSlices = 1;
  static constexpr bool kPairs = false;
};

// Two blocks share a tile's rows, as with 16 bits. 176 KiB; the small one 80.
struct F32Forward512 {
  static constexpr int kHeadDim = 512, kHeadDimV = 256, kBlockM = 64, kBlockN = 8, kWarps = 4;
  static constexpr int kBlocksPerSm = 1, kSlices = 2;
  static constexpr bool kPairs = false;
};
struct F32Forward512Small : F32Forward512 {
  static constexpr int kBlockM = 16, kWarps = 1;
};

// Bytes of the tiles in shared memory.
template <class Tile>
constexpr int forward_tile_bytes(int element_bytes) {
  constexpr int kStages = Tile::kPairs ? 1 : 2;
  constexpr int kP = Tile::kPairs ? Tile::kBlockM * Tile::kBlockN : 0;
  constexpr int kKv = kStages * Tile::kBlockN * (Tile::kHeadDim + Tile::kHeadDimV);
  return element_bytes * (Tile::kBlockM * Tile::kHeadDim + kKv + kP);
}

}  // namespace flash_attn::sm80
