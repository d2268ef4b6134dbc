// SPDX-License-Identifier: BSD-3-Clause
// Tile sizes of the portable family, with their reasons. Shared memory decides which devices a row
// fits: 227 KiB a block on sm_90, 163 on sm_80, 99 on sm_86, 89 and 120, 64 on sm_75.
#pragma once

namespace flash_attn::sm80 {

// ---- Forward. kWarps warps share kBlockM query rows; a warp has kRowBlocks blocks of 16 of them
// and all kBlockN keys of a tile. K and V have two stages. With kSlices > 1 a block makes only
// kHeadDimV of the kSlices * kHeadDimV columns of out, and as many blocks share a tile of rows.

// 32 rows a warp halve the reads of K and V from shared memory; two blocks a multiprocessor hide
// each other's softmax. 48 KiB.
struct Forward64 {
  static constexpr int kHeadDim = 64, kHeadDimV = 64, kBlockM = 128, kBlockN = 64, kWarps = 4;
  static constexpr int kBlocksPerSm = 2, kSlices = 1;
  static constexpr bool kPairs = false;
};
// 96 KiB.
struct Forward128 : Forward64 {
  static constexpr int kHeadDim = 128, kHeadDimV = 128;
};
// 128 KiB; the small one 88.
struct Forward192 : Forward128 {
  static constexpr int kHeadDim = 192, kBlocksPerSm = 1;
};
struct Forward192Small : Forward192 {
  static constexpr int kBlockN = 32;
};
// Out alone would take 256 registers at 32 rows a warp. Where there is shared memory for it two
// warps share 32 rows (forward_pair.cuh), K and V have one stage and P a place: 224 KiB. Elsewhere
// a warp has 16 rows: 128 KiB, the small one 96.
struct Forward256Pairs {
  static constexpr int kHeadDim = 256, kHeadDimV = 256, kBlockM = 128, kBlockN = 128, kWarps = 8;
  static constexpr int kBlocksPerSm = 1, kSlices = 1;
  static constexpr bool kPairs = true;
};
struct Forward256 {
  static constexpr int kHeadDim = 256, kHeadDimV = 256, kBlockM = 128, kBlockN = 32, kWarps = 8;
  static constexpr int kBlocksPerSm = 1, kSlices = 1;
  static constexpr bool kPairs = false;
};
struct Forward256Small : Forward256 {
  static constexpr int kBlockM = 64, kWarps = 4;
};
// Two blocks share a tile's rows: each repeats Q K^T and makes half of out's columns, since all of
// them are twice the registers there are. 160 KiB; the small one 80.
struct Forward512 : Forward256Small {
  static constexpr int kHeadDim = 512, kSlices = 2;
};
struct Forward512Small : Forward512 {
  static constexpr int kBlockM = 32, kBlockN = 16, kWarps = 2;
};

// Features (kGeneral) take registers for the bias, and more arithmetic than matrix products hide:
// 16 rows a warp, more warps. 40, 48, 64 and 80 KiB.
struct General64 : Forward64 {
  static constexpr int kBlockM = 64, kBlocksPerSm = 3;
};
struct General128 : General64 {
  static constexpr int kHeadDim = 128, kHeadDimV = 128, kBlockN = 32;
};
struct General192 : General128 {
  static constexpr int kHeadDim = 192, kBlocksPerSm = 2;
};
struct General256 : Forward256Small {
  static constexpr int kBlockN = 16;
};

// sm_75 gives a block 64 KiB: the general tiles of the smaller head_dims, and these of 44, 48, 56.
struct Sm75Forward192 : General192 {
  static constexpr int kBlockN = 16;
};
struct Sm75Forward256 : General256 {
  static constexpr int kBlockM = 32, kWarps = 2;
};
struct Sm75Forward512 : Forward512 {
  static constexpr int kHeadDimV = 128, kBlockM = 16, kBlockN = 16, kWarps = 1, kSlices = 4;
};

// fp32 (kGeneral alone): at most 99 KiB, so that one set of rows serves all from sm_80 on. 48, 96
// and 96 KiB.
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

// Rows of a warp, or of a pair.
template <class Tile>
constexpr int forward_warp_rows() {
  return Tile::kBlockM / (Tile::kPairs ? Tile::kWarps / 2 : Tile::kWarps);
}

// Bytes of the tiles in shared memory.
template <class Tile>
constexpr int forward_tile_bytes(int element_bytes) {
  constexpr int kStages = Tile::kPairs ? 1 : 2;
  constexpr int kP = Tile::kPairs ? Tile::kBlockM * Tile::kBlockN : 0;
  constexpr int kKv = kStages * Tile::kBlockN * (Tile::kHeadDim + Tile::kHeadDimV);
  return element_bytes * (Tile::kBlockM * Tile::kHeadDim + kKv + kP);
}

}  // namespace flash_attn::sm80
