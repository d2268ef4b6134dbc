// SPDX-License-Identifier: BSD-3-Clause
// The bias of each warp's 16 rows, one key tile at a time in shared memory. Where it lies as the
// copy engine wants it, each warp asks for its own box a tile ahead; elsewhere it reads element by
// element, which is slow.
//
// A box is (rows, heads, keys), since the rows of a tile may be of several heads (core/rows.h);
// what is broadcast has a side of 1 there. Its lines are 128 bytes, swizzled: 64 numbers, so that a
// tile has one or two boxes, or as many booleans.
#pragma once

#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/shuffle.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/sm90/tensor_map.h"
#include "cuda/tile/masking.cuh"

namespace flash_attn::sm90 {

// The sides of a warp's box beside its keys; none: not for the copy engine.
struct BiasSides {
  int heads = 0, rows = 0;
};

struct BiasMap {
  CUtensorMap map;
  BiasSides sides;
};

inline BiasSides bias_sides(const Bias& bias, int group) {
  const bool wide = !bias.boolean && bias.dtype == DType::kF32;
  if (bias.ptr == nullptr || bias.col != 1 || wide || 16 % group != 0) return {};
  const int64_t bytes = bias.boolean ? 1 : 2;
  const int64_t bits =
      reinterpret_cast<int64_t>(bias.ptr) | (bias.batch | bias.head | bias.row) * bytes;
  if (bits % 16 != 0) return {};
  return {bias.head != 0 ? group : 1, bias.row != 0 ? 16 / group : 1};
}

// False where the driver refuses.
inline bool make_bias_map(BiasMap* to, const AttnParams& p, int group) {
  const Bias& bias = p.bias;
  if (p.seqlen_q > 0 && p.seqlen_k > 0) to->sides = bias_sides(bias, group);
  if (to->sides.rows == 0) return true;
  const EncodeTiled encode = encode_tiled();
  if (encode == nullptr) return false;
  const int64_t bytes = bias.boolean ? 1 : 2;
  const auto size = [](int64_t stride, int count) {
    return static_cast<cuuint64_t>(stride != 0 ? count : 1);
  };
  const auto step = [&](int64_t stride) {
    return static_cast<cuuint64_t>(stride != 0 ? stride * bytes : 16);
  };
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(p.seqlen_k), size(bias.head, p.heads_q),
                              size(bias.row, p.seqlen_q), size(bias.batch, p.batch)};
  const cuuint64_t steps[] = {step(bias.head), step(bias.row), step(bias.batch)};
  const cuuint32_t keys = 128 / static_cast<cuuint32_t>(bytes), ones[] = {1, 1, 1, 1};
  const cuuint32_t box[] = {keys, static_cast<cuuint32_t>(to->sides.heads),
                            static_cast<cuuint32_t>(to->sides.rows), 1};
  const CUtensorMapDataType type = bias.boolean                ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : bias.dtype == DType::kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                               : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return encode(&to->map, type, 4, const_cast<void*>(bias.ptr), sizes, steps, box, ones,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// A warp's buffer and what is in it or on its way. All functions: all lanes of the warp.
template <class Element, class Tile>
struct BiasTile {
  static constexpr int kColumns = Tile::kBlockN / 8;
  static constexpr uint32_t kPanels = ceil_div(Tile::kBlockN, 64), kPanel = 16 * 128;
  static constexpr uint32_t kBytes = kPanels * kPanel;
  static_assert(Tile::kBlockN <= 128 && Tile::kBlockN % 16 == 0);
  using Scores = float[1][kColumns][4];

  const BiasMap& from;
  uint32_t smem;    // kWarps buffers, then kWarps barriers
  int coming = -1;  // tile on its way, -1: none
  uint32_t parity = 0;

  __device__ __forceinline__ BiasTile(const BiasMap& from_, uint32_t smem_)
      : from(from_), smem(smem_) {
    if (threadIdx.x % 32 == 0) {
      ptx::mbarrier_init(barrier(), 1);
      ptx::mbarrier_init_fence();
    }
    __syncwarp();
  }

  // Registers are few: what is cheap is made when it is needed.
  __device__ __forceinline__ uint32_t buffer() const {
    return smem + ptx::thread_index() / 32 * kBytes;
  }
  __device__ __forceinline__ uint32_t barrier() const {
    return smem + Tile::kWarps * kBytes + ptx::thread_index() / 32 * 8;
  }

  // The line of the box that holds a row of the warp.
  __device__ __forceinline__ int line(int row, int group) const {
    const BiasSides sides = from.sides;
    const int position = row / group, head = row - position * group;
    return (sides.rows > 1 ? position * sides.heads : 0) + (sides.heads > 1 ? head : 0);
  }

  // What this thread names first where the warp reads as matrices.
  __device__ __forceinline__ uint32_t place(int group) const {
    const uint32_t lane = threadIdx.x % 32, row = line(lane % 16, group);
    return buffer() + row * 128 + (lane / 16 ^ row % 8) * 16;
  }

  __device__ __forceinline__ void ask(
      const Bias& bias, const WarpRows& rows, int batch, int n, int width) {
    __syncwarp();  // all lanes have read what is there
    coming = n;
    if (!ptx::elect()) return;
    const RowPlace first = rows.place[0];
    const int at_head = bias.head != 0 ? first.head : 0,
              at_row = bias.row != 0 ? first.position : 0;
    const int at_batch = bias.batch != 0 ? batch : 0;
    const int lines = from.sides.heads * from.sides.rows, key = n * width;
    const uint32_t to = buffer(), full = barrier();
    const int panels = bias.boolean ? 1 : kPanels;
    ptx::mbarrier_expect(full, panels * lines * 128);
    for (int panel = 0; panel < panels; ++panel) {
      ptx::load_box(to + panel * kPanel, &from.map, key + panel * 64, at_head, at_row, at_batch,
                    full);
    }
  }

  __device__ __forceinline__ void wait() {
    if (coming < 0) return;
    ptx::mbarrier_wait(barrier(), parity);
    parity ^= 1, coming = -1;
  }

  // The box of tile n is there. width: keys from tile to tile.
  __device__ __forceinline__ void fetch(
      const Bias& bias, const WarpRows& rows, int batch, int n, int width) {
    if (coming != n) {  // the first, or one after a gap
      wait();
      ask(bias, rows, batch, n, width);
    }
    wait();
  }

  // What is there has been read; the tile before n is brought next.
  __device__ __forceinline__ void fetch_before(
      const Bias& bias, const WarpRows& rows, int batch, int n, int width) {
    if (n > 0) ask(bias, rows, batch, n - 1, width);
  }

  // To the scores of the tile that is there.
  __device__ __forceinline__ void add(Scores& s, float unit, uint32_t at) const {
    each_number(at, [&](int n, int i, float more) { add_to(s[0][n][i], unit, more); });
  }

  // use(n, i, bias), for element i of the n-th eight columns.
  template <class Use>
  __device__ __forceinline__ void each_number(uint32_t at, const Use& use) const {
#pragma unroll
    for (int n = 0; n < kColumns; n += 2) {
      if (n == kColumns / 4 * 2) __syncwarp();  // not all at once: registers are few
      uint32_t pairs[4];
      ptx::load_matrix_x4(pairs, (at ^ (n % 8 * 16)) + n / 8 * kPanel);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int h = e / 2 % 2;
        use(n + e / 4, 2 * h + e % 2, number(pairs[e / 4 * 2 + h], e % 2 != 0));
      }
    }
  }

  // The booleans of the tile that is there, of this thread's two rows: bit visible_bit(n, c) for
  // its column c of the n-th eight. They are read four neighbours a thread, as matrices of 16 bits,
  // packed, and exchanged with the three other threads of the rows.
  __device__ __forceinline__ void read_bits(uint32_t (&bits)[2], uint32_t at) const {
    uint32_t read[2] = {0, 0};
#pragma unroll
    for (int n = 0; n < kColumns; n += 4) {
      uint32_t fours[4];
      ptx::load_matrix_x4(fours, at ^ (n / 2 * 16));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t eight = __dp4a(fours[h], 0x08040201u, __dp4a(fours[2 + h], 0x80402010u, 0u));
        read[h] += eight << 2 * n;
      }
    }
    const int thread = threadIdx.x % 4, from = threadIdx.x % 32 - thread + thread / 2;
    const int shift = thread % 2 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t even = __shfl_sync(0xffffffffu, read[h], from) >> shift;
      const uint32_t odd = __shfl_sync(0xffffffffu, read[h], from + 2) << (2 - shift);
      bits[h] = (even & 0x33333333u) | (odd & 0xccccccccu);
    }
  }
  __device__ __forceinline__ static constexpr int visible_bit(int n, int c) {
    return 2 * n + c;
  }

  __device__ __forceinline__ static void hide(Scores& s, const uint32_t (&bits)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int e = 0; e < 2 * kColumns; ++e)
        ptx::hide_unless(s[0][e / 2][2 * h + e % 2], bits[h], 1u << visible_bit(e / 2, e % 2));
    }
  }

  // To the scores of any tile, slowly. Nothing from key `end` on is read.
  __device__ __forceinline__ static void add_by_element(float (&s)[kColumns][4],
                                                        const Bias& bias,
                                                        float unit,
                                                        const WarpRows& rows,
                                                        int batch,
                                                        int key,
                                                        int end) {
#pragma unroll 1
    for (int h = 0; h < 2; ++h) {
      const RowPlace place = rows(0, h);
      const int64_t row = batch * bias.batch + place.head * bias.head + place.position * bias.row;
#pragma unroll 2
      for (int e = 0; e < 2 * kColumns; ++e) {
        const int j = key + 8 * (e / 2) + fragment_column(e);
        const float value = j < end ? element(bias, row + j * bias.col) : 0;
        add_to(s[e / 2][2 * h + e % 2], bias.boolean ? 1.0f : unit, value);
      }
    }
  }

 private:
  __device__ __forceinline__ static float number(uint32_t pair, bool high) {
    if constexpr (std::is_same_v<Element, bf16>)
      return __uint_as_float(high ? pair & 0xffff0000u : pair << 16);
    const __half2 both = *reinterpret_cast<const __half2*>(&pair);
    return high ? __high2float(both) : __low2float(both);
  }

  // -inf hides even a score that is inf.
  __device__ __forceinline__ static void add_to(float& x, float unit, float more) {
    x = fmaf(ptx::min_or_nan(x, 3.4e38f), unit, more);
  }

  __device__ __forceinline__ static float element(const Bias& bias, int64_t at) {
    if (bias.boolean) return static_cast<const uint8_t*>(bias.ptr)[at] != 0 ? 0.0f : -INFINITY;
    if (bias.dtype == DType::kF32) return static_cast<const float*>(bias.ptr)[at];
    return static_cast<float>(static_cast<const Element*>(bias.ptr)[at]);
  }
};

}  // namespace flash_attn::sm90
