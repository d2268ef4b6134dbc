// SPDX-License-Identifier: BSD-3-Clause
// dbias in 16 bits, of calls without softcap, ALiBi and dropout: the walk of backward_bias_walk.cuh
// with few instructions an element. A warp has kWarpRows rows of the block's tile, and in registers
// their bias, read once, and their sums.
#pragma once

#include "cuda/sm80/backward_bias_walk.cuh"

namespace flash_attn::sm80 {

// Scores are made for kChunkKeys keys at a time. Two blocks a multiprocessor hide what each waits
// for; a second stage gains nothing beside that (H200).
struct Bias64 {
  static constexpr int kHeadDim = 64, kOwn = 128, kWalk = 64, kBiasKeys = 64, kDimWarps = 1;
  static constexpr int kWarpRows = 32, kChunkKeys = 32, kStages = 1, kBlocksPerSm = 2;
};
struct Bias128 : Bias64 {
  static constexpr int kHeadDim = 128;
};
// The tile of the kernels without atomics: where there is no better one or less shared memory, and
// for a bias in fp32, which takes twice the registers.
template <class Ordered>
struct SmallBias : Ordered {
  static constexpr int kDimWarps = 1, kWarpRows = 16, kChunkKeys = min_of(Ordered::kBiasKeys, 32);
};

template <class Element_, class Numbers>
struct PlainBiasTile : OrderedTile<Element_, Numbers> {
  static constexpr int kOwnWarps = Numbers::kOwn / Numbers::kWarpRows, kWarps = kOwnWarps;
  static constexpr int kThreads = 32 * kWarps;
};

// Calls that bias_kernel serves.
inline bool is_plain_bias(const AttnParams& p) {
  return p.softcap == 0 && p.alibi.slopes == nullptr && p.dropout.philox == nullptr;
}

// The tile for a call whose other kernels have OrderedTile<Element, Ordered> and kBytes. Number: of
// the bias, Element or float.
template <class Element, class Number, class Ordered, int kBytes>
struct PlainBiasChoice {
  template <class Numbers, int kStages>
  using Tile = BiasTile<PlainBiasTile<Element, Numbers>, kStages>;
  using Small = SmallBias<Ordered>;
  static constexpr int kLarge = sizeof(Number) == 2 ? Ordered::kHeadDim : 0;
  using Large =
      std::conditional_t<kLarge == 64, Bias64, std::conditional_t<kLarge == 128, Bias128, Small>>;
  using Type =
      typename FirstThatFits<kBytes, Tile<Large, Large::kStages>, Tile<Small, 2>, Tile<Small, 1>>::
          Type;
};

template <class Tile, class Number>
struct PlainBias : BiasLoop<Tile> {
  static constexpr int kKeys = Tile::kBiasKeys, kColumns = kKeys / 8;
  static constexpr int kRowBlocks = Tile::kWarpRows / 16;
  using Element = typename Tile::Element;
  using Sums = float[kRowBlocks][kColumns][4];
  using BiasLoop<Tile>::block;
  using BiasLoop<Tile>::state;
  using BiasLoop<Tile>::BiasLoop;

  // Two neighbours of the block's own bias, 0 where it has no element.
  using Pair = std::conditional_t<sizeof(Number) == 2, uint32_t, float2>;
  Pair own[kRowBlocks][2][kColumns];

  // As numbers, converted where they are used: the loop would keep them in twice the registers.
  __device__ __forceinline__ static float2 numbers(Pair pair) {
    if constexpr (sizeof(Number) == 2) {
      pair = here(pair);
      const Number* element = reinterpret_cast<const Number*>(&pair);
      return make_float2(to_float(element[0]), to_float(element[1]));
    } else {
      return pair;
    }
  }

  __device__ __forceinline__ int warp_row() const { return threadIdx.x / 32 * Tile::kWarpRows; }

  // Loads that do not wait for each other.
  __device__ __forceinline__ void load_own() {
    const AttnParams& p = block.p;
    const Bias& bias = p.bias;
    const BiasWalk& walk = state.walk;
    const int row = walk.queries.begin + warp_row() + fragment_row(0);
    const int column = walk.keys.begin + fragment_column(0);
    const Number* first = static_cast<const Number*>(bias.ptr) + walk.batches.begin * bias.batch +
                          walk.heads.begin * bias.head;
    const bool pairs = bias.col == 1 && bias.row % 2 == 0 &&
                       reinterpret_cast<uintptr_t>(first) % sizeof(Pair) == 0 &&
                       walk.keys.begin + kKeys <= p.seqlen_k;
    constexpr int kPairs = 2 * kRowBlocks * kColumns;
    const auto pair_at = [&](int at) -> Pair& {
      return own[at / kColumns / 2][at / kColumns % 2][at % kColumns];
    };
    if (!pairs) {
      Pair all[kPairs];  // in local memory: registers have no index
#pragma unroll 1
      for (int at = 0; at < 2 * kPairs; ++at) {
        const int i = row + at / 2 / kColumns * 8, j = column + at / 2 % kColumns * 8 + at % 2;
        const bool exists = i < p.seqlen_q && j < p.seqlen_k;
        reinterpret_cast<Number*>(all)[at] =
            exists ? first[i * bias.row + j * bias.col] : Number(0.0f);
      }
#pragma unroll
      for (int at = 0; at < kPairs; ++at)
        pair_at(at) = all[at];
      return;
    }
#pragma unroll
    for (int at = 0; at < kPairs; ++at) {
      const int i = row + at / kColumns * 8, j = column + at % kColumns * 8;
      const Number* from = first + i * bias.row + j;
      pair_at(at) = i < p.seqlen_q ? *reinterpret_cast<const Pair*>(from) : Pair{};
    }
  }

  // Whether the window leaves something of a tile to this warp's rows.
  __device__ __forceinline__ bool sees(const TilePlace& tile) const {
    const int query = tile.query + warp_row(), last = query + Tile::kWarpRows - 1;
    return tile.key_end - 1 - query >= tile.low && tile.key - last < tile.high;
  }

  // sums += dS of a tile in shared memory.
  template <bool kHuge>
  __device__ __forceinline__ void add(Sums& sums, const TilePlace& tile, int stage) const {
    constexpr int kChunk = kHuge ? 16 : Tile::kChunkKeys;  // by registers
    const uint32_t q = this->tiles(stage), k = q + 2 * Tile::kOwnBytes;
    const uint32_t q_rows = q + warp_row() * 128 + row_lane(), k_rows = k + column_lane();
#pragma unroll
    for (int chunk = 0; chunk < kKeys; chunk += kChunk) {
      float s[kRowBlocks][kChunk / 8][4], dp[kRowBlocks][kChunk / 8][4];
      const auto multiply = [&](float(&c)[kRowBlocks][kChunk / 8][4], uint32_t rows,
                                uint32_t keys) {
        warp_matmul_qk<Element, Tile::kHeadDim, kChunk, kKeys, Tile::kOwn>(
            c, here(rows), here(keys + chunk * 128));
      };
      multiply(s, q_rows, k_rows);
      multiply(dp, q_rows + Tile::kOwnBytes, k_rows + Tile::kKeyBytes);
#pragma unroll
      for (int b = 0; b < kRowBlocks; ++b) {
        const BiasQuery* rows = state.rows[stage] + warp_row() + 16 * b + fragment_row(0);
        const BiasQuery queries[2] = {rows[0], rows[8]};
#pragma unroll
        for (int n = 0; n < kChunk / 8; n += 2)
          add_chunk<kHuge>(sums[b] + chunk / 8 + n, s[b] + n, dp[b] + n, tile, queries, 16 * b,
                           chunk + 8 * n);
      }
    }
  }

  // The same of 16 x 16 elements, from two accumulators of each; `row` of the warp's, `key` of the
  // tile's.
  template <bool kHuge>
  __device__ __forceinline__ void add_chunk(float (*sums)[4],
                                            const float (*s)[4],
                                            const float (*dp)[4],
                                            const TilePlace& tile,
                                            const BiasQuery (&queries)[2],
                                            int row,
                                            int key) const {
    const AttnParams& p = block.p;
    const float scale = static_cast<float>(p.softmax_scale), to_log2 = scale * kLog2e;
    // What is added to a score: -inf hides, as the bias does, and the base of a row that saw
    // nothing.
    float rest[8];
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      const BiasQuery& query = queries[e / 2 % 2];
      const float2 pair = numbers(own[row / 16][e / 2 % 2][key / 8 + e / 4]);
      const float biases[2] = {pair.x, pair.y};
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        rest[e + c] = !kHuge                   ? fmaf(biases[c], kLog2e, -query.base_log2)
                      : query.base == INFINITY ? -INFINITY
                                               : biases[c];
      }
    }
    if (!tile.full) {
      const Visible visible{p.mask, tile.low, tile.high, tile.key_end, tile.query_end, tile.bits};
      hide<QueriesDown>(rest, visible, tile.query + warp_row() + row, tile.key + key, -INFINITY);
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const BiasQuery& query = queries[e / 2 % 2];
      const float product = s[e / 4][e % 4];
      const float x = !kHuge ? fmaf(product, to_log2, rest[e])
                             : (__fmul_rn(product, scale) + rest[e] - query.base) * kLog2e;
      const float gradient = (dp[e / 4][e % 4] - query.delta) * (kHuge ? query.weight : 1);
      float& sum = sums[e / 4][e % 4];
      ptx::add_product_if(rest[e] != -INFINITY, sum, ptx::exp2_approx(x), gradient);
    }
  }

  __device__ __forceinline__ void run(Sums& sums) {
    const auto begin = [&] { load_own(); };
    BiasLoop<Tile>::run(begin, [&](const TilePlace& tile, int stage) {
      if (!sees(tile)) return;
      if (state.huge)
        add<true>(sums, tile, stage);
      else
        add<false>(sums, tile, stage);
    });
  }
};

template <class Tile, class Number>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    bias_kernel(const __grid_constant__ AttnParams p,
                const __grid_constant__ OrderedGrid rows,
                const __grid_constant__ BiasGrid grid) {
  extern __shared__ __align__(1024) uint8_t smem[];
  PlainBias<Tile, Number> bias(p, rows, grid, smem);
  typename PlainBias<Tile, Number>::Sums sums = {};
  bias.run(sums);
  write_bias<Tile>(p.grad, sums, bias.state.walk, smem, bias.warp_row(), true);
}

}  // namespace flash_attn::sm80
