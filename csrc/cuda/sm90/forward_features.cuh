// SPDX-License-Identifier: BSD-3-Clause
// What kGeneral kernels do to scores and weights between the products, for a warp's 16 rows and a
// key tile: as tile/score.cuh, in the forms that suit the usual case here.
#pragma once

#include "cuda/ptx/shuffle.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/bias_boxes.cuh"
#include "cuda/tile/forward_state.cuh"

namespace flash_attn::sm90 {

// tanh(inside * x) where |inside * x| <= 1: x times a series in x^2, off by at most 8e-5 of it.
struct CapSeries {
  float inside = 0, factor[4] = {};  // inside is 0 where its powers are no numbers to reckon with

  CapSeries() = default;
  __host__ explicit CapSeries(double of) {
    if (of < 1e-4 || of > 1e4) return;
    inside = static_cast<float>(of);
    const double series[] = {0.9999185800552368, -0.3306542932987213, 0.11889753490686417,
                             -0.026629667729139328};
    double power = of;
    for (int i = 0; i < 4; ++i, power *= of * of)
      factor[i] = static_cast<float>(series[i] * power);
  }
};

// As cap_scores; where no score of the warp is beyond the cap, by the series, without special
// functions. `bound`: what no score of this thread's rows exceeds then. All lanes.
template <class Element, int kColumns>
__device__ __forceinline__ void cap_tile(float (&s)[1][kColumns][4],
                                         float inside,
                                         const CapSeries& series,
                                         float (&bound)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    bound[h] = 0;
#pragma unroll
    for (int e = 0; e < kColumns * 2; ++e)
      bound[h] = fmaxf(bound[h], fabsf(s[0][e / 2][2 * h + e % 2]));
    bound[h] = series.inside > 0 ? bound[h] * series.inside : INFINITY;
  }
  if (__builtin_expect(__any_sync(0xffffffffu, fmaxf(bound[0], bound[1]) > 1), false)) {
    cap_scores<Element>(s, inside);
    return;
  }
#pragma unroll
  for (int e = 0; e < kColumns * 4; ++e) {
    float& x = s[0][e / 4][e % 4];
    const float square = x * x;
    float y = fmaf(series.factor[3], square, series.factor[2]);
    y = fmaf(y, square, series.factor[1]);
    x *= fmaf(y, square, series.factor[0]);
  }
}

// Philox (core/philox.h) for one thread's rows: what the first three rounds make of the counter's
// other words is the same for all columns.
struct PhiloxRow {
  uint32_t word0, word2, round3_0, round3_2, last3;
  uint32_t seed_low, seed_high;

  PhiloxRow() = default;
  __device__ __forceinline__ PhiloxRow(const DropoutMask& mask, uint32_t rows) {
    static_assert(kPhiloxRounds == 7);
    seed_low = ptx::uniform(mask.seed_low), seed_high = ptx::uniform(mask.seed_high);
    const uint64_t plane = uint64_t{kPhiloxMul1} * mask.plane, first = uint64_t{kPhiloxMul0} * rows;
    word0 = high(plane) ^ seed_low;
    const uint64_t second = uint64_t{kPhiloxMul1} * (high(first) ^ mask.offset ^ seed_high);
    word2 = low(first) ^ key1(1);
    const uint64_t third = uint64_t{kPhiloxMul0} * (high(second) ^ low(plane) ^ key0(1));
    round3_0 = low(second) ^ key0(2);
    round3_2 = high(third) ^ key1(2);
    last3 = low(third);
  }

  // The call of a column: DropoutMask::call(rows, column).
  __device__ __forceinline__ Philox4 operator()(uint32_t column) const {
    const uint64_t second = uint64_t{kPhiloxMul0} * (column ^ word0);
    const uint64_t third = uint64_t{kPhiloxMul1} * (high(second) ^ word2);
    uint32_t c0 = high(third) ^ round3_0, c1 = low(third), c2 = low(second) ^ round3_2, c3 = last3;
#pragma unroll
    for (int round = 3; round < kPhiloxRounds; ++round) {
      const uint64_t p0 = uint64_t{kPhiloxMul0} * c0, p1 = uint64_t{kPhiloxMul1} * c2;
      c0 = high(p1) ^ c1 ^ key0(round), c1 = low(p1);
      c2 = high(p0) ^ c3 ^ key1(round), c3 = low(p0);
    }
    return {{c0, c1, c2, c3}};
  }

 private:
  __device__ __forceinline__ static uint32_t low(uint64_t x) {
    return static_cast<uint32_t>(x);
  }
  __device__ __forceinline__ static uint32_t high(uint64_t x) {
    return static_cast<uint32_t>(x >> 32);
  }
  __device__ __forceinline__ uint32_t key0(int round) const {
    return seed_low + kPhiloxAdd0 * round;
  }
  __device__ __forceinline__ uint32_t key1(int round) const {
    return seed_high + kPhiloxAdd1 * round;
  }
};

// Zeroes what dropout drops of the weights of any tile, slowly.
template <int kColumns>
__device__ __forceinline__ void drop_by_element(
    float (&s)[kColumns][4], const AttnParams& p, const WarpRows& rows, int batch, int key) {
#pragma unroll 1
  for (int h = 0; h < 2; ++h) {
    const RowPlace place = rows(0, h);
    const DropoutMask mask(p, batch, place.head);
#pragma unroll 1
    for (int e = 0; e < 2 * kColumns; ++e) {
      if (!mask.keep(place.position, key + 8 * (e / 2) + fragment_column(e)))
        s[e / 2][2 * h + e % 2] = 0;
    }
  }
}

// Copies an accumulator for a loop that is not unrolled: local memory, since registers have no
// index.
template <int kColumns, class Body>
__device__ __forceinline__ void by_copy(float (&s)[1][kColumns][4], const Body& body) {
  float copy[kColumns][4];
#pragma unroll
  for (int e = 0; e < 4 * kColumns; ++e)
    copy[e / 4][e % 4] = s[0][e / 4][e % 4];
  body(copy);
#pragma unroll
  for (int e = 0; e < 4 * kColumns; ++e)
    s[0][e / 4][e % 4] = copy[e / 4][e % 4];
}

// The feature of a problem that has one alone: whole tiles have a loop for each.
enum class Feature : uint8_t { kNone, kCap, kAlibi, kBias, kMask, kDropout, kSeveral };

// Shared memory of a block's features, behind all else.
template <class Element, class Tile>
constexpr int kFeatureBytes = Tile::kWarps*(BiasTile<Element, Tile>::kBytes + 8);

// A warp's features. All functions: all lanes.
template <class Element, class Tile>
struct Features {
  static constexpr int kColumns = Tile::kBlockN / 8;
  using Scores = float[1][kColumns][4];

  const AttnParams& p;
  const ForwardGrid& grid;
  const ScoreSteps& steps;
  const CapSeries& series;
  const ForwardState<Element, Tile>& state;
  BiasTile<Element, Tile> bias;
  Feature only;
  bool whole;  // dropout by whole calls: tiles begin at multiples of 16 rows and 32 keys
  PhiloxRow row;
  float slope[2];  // of the thread's two rows
  int away[2];     // their keys at distance 0

  // smem: kFeatureBytes, at a multiple of 1024.
  __device__ __forceinline__ Features(const AttnParams& p_,
                                      const ForwardGrid& grid_,
                                      const CapSeries& series_,
                                      const ForwardState<Element, Tile>& state_,
                                      const BiasMap& map,
                                      uint32_t smem)
      : p(p_), grid(grid_), steps(grid.steps), series(series_), state(state_), bias(map, smem) {
    const WarpRows rows = warp_rows();
    const bool drops = p.dropout.philox != nullptr, slopes = p.alibi.slopes != nullptr;
    const bool adds = p.bias.ptr != nullptr;
    only = drops            ? Feature::kDropout
           : slopes         ? Feature::kAlibi
           : steps.capped   ? Feature::kCap
           : !adds          ? Feature::kNone
           : p.bias.boolean ? Feature::kMask
                            : Feature::kBias;
    // The compiler is to see that all lanes agree.
    whole = rows.group == 1 && state.task.begin % 16 == 0 && grid.block_n % 32 == 0;
    if (drops + slopes + steps.capped + adds > 1 || steps.factor != 1 || (drops && !whole) ||
        (adds && map.sides.rows == 0))
      only = Feature::kSeveral;
    if (drops) {
      row = PhiloxRow(DropoutMask(p, state.task.batch, rows.place[0].head),
                      rows.first / 2 + fragment_row(0));
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (slopes)
        slope[h] = p.alibi.slopes[state.task.batch * p.alibi.batch + rows(0, h).head] * steps.slope;
      away[h] = rows(0, h).position + state.seq.k_len - state.seq.q_len - fragment_column(0);
    }
  }

  // Before the scores of a tile are waited for.
  template <Feature kOnly>
  __device__ __forceinline__ void begin(int n) {
    constexpr bool kBoxes = kOnly == Feature::kMask || kOnly == Feature::kBias;
    if (kBoxes || (kOnly == Feature::kSeveral && bias.from.sides.rows != 0))
      bias.fetch(p.bias, warp_rows(), state.task.batch, n, grid.block_n);
  }

  // Whether the scores may ask for a higher m.
  template <Feature kOnly>
  __device__ __forceinline__ bool score(Scores& s,
                                        int n,
                                        const Softmax<Element, 1>& softmax,
                                        const ScoreScale& scale) {
    float bound[2];
    if constexpr (kOnly == Feature::kCap) {
      cap_tile<Element>(s, steps.inside, series, bound);
      return __any_sync(0xffffffffu, softmax.may_pass(bound, scale));
    } else if constexpr (kOnly == Feature::kAlibi) {
      slant(s, n);
    } else if constexpr (kOnly == Feature::kBias || kOnly == Feature::kMask) {
      bias.template add<kOnly == Feature::kMask>(s, p.bias, steps.unit, warp_rows(),
                                                 state.task.batch, n, grid.block_n);
    } else if constexpr (kOnly == Feature::kSeveral) {
      if (only == Feature::kNone || only == Feature::kDropout) return true;
      if (steps.capped) cap_tile<Element>(s, steps.inside, series, bound);
      if (steps.factor != 1) {
#pragma unroll
        for (int e = 0; e < kColumns * 4; ++e)
          s[0][e / 4][e % 4] *= steps.factor;
      }
      if (p.alibi.slopes != nullptr) slant(s, n);
      if (p.bias.ptr != nullptr) add_bias(s, n);
    }
    return true;
  }

  // Zeroes the weights that dropout drops.
  template <Feature kOnly>
  __device__ __forceinline__ void drop(Scores& s, int n) const {
    if constexpr (kOnly == Feature::kDropout) {
      drop_calls(s, n);
    } else if constexpr (kOnly == Feature::kSeveral) {
      if (p.dropout.philox == nullptr) return;
      if (whole) {
        drop_calls(s, n);
      } else {
        by_copy(s, [&](float(&copy)[kColumns][4]) {
          drop_by_element(copy, p, warp_rows(), state.task.batch, n * grid.block_n);
        });
      }
    }
  }

  // Nothing is on its way any more.
  __device__ __forceinline__ void finish() {
    bias.wait();
  }

 private:
  __device__ __forceinline__ WarpRows warp_rows() const {
    return state.warp_rows(ptx::thread_index() / 32 * 16);
  }

  // A call of Philox covers rows g, g + 8 and the same column of four neighbouring accumulators.
  __device__ __forceinline__ void drop_calls(Scores& s, int n) const {
    static_assert(Tile::kBlockN % 32 == 0);
    const float limit = 8388608.0f + static_cast<float>(p.dropout.keep_below);
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      const Philox4 call = row(n * (grid.block_n / 4) + i / 2 * 8 + fragment_column(i));
#pragma unroll
      for (int lane = 0; lane < 8; ++lane) {
        // The lane as the mantissa of 2^23 + lane: limit - that is 1 or more where it is kept.
        const uint32_t word = call.word[lane / 2];
        const uint32_t number = __byte_perm(word, 0x4b00u, lane % 2 == 0 ? 0x5410 : 0x5432);
        s[0][i / 2 * 4 + lane % 4][lane / 4 * 2 + i % 2] *=
            __saturatef(limit - __uint_as_float(number));
      }
    }
  }

  // As apply_alibi.
  __device__ __forceinline__ void slant(Scores& s, int n) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float distance = static_cast<float>(away[h] - n * grid.block_n);
#pragma unroll
      for (int e = 0; e < 2 * kColumns; ++e) {
        float& x = s[0][e / 2][2 * h + e % 2];
        x = fmaf(-slope[h], fabsf(distance - static_cast<float>(8 * (e / 2) + e % 2)), x);
      }
    }
  }

  __device__ __forceinline__ void add_bias(Scores& s, int n) {
    const WarpRows rows = warp_rows();
    const int batch = state.task.batch;
    if (bias.from.sides.rows == 0) {
      by_copy(s, [&](float(&copy)[kColumns][4]) {
        bias.add_by_element(copy, p.bias, steps.unit, rows, batch, n * grid.block_n,
                            state.seq.k_len);
      });
    } else if (p.bias.boolean) {
      bias.template add<true>(s, p.bias, steps.unit, rows, batch, n, grid.block_n);
    } else {
      bias.template add<false>(s, p.bias, steps.unit, rows, batch, n, grid.block_n);
    }
  }
};

// Of kernels without.
struct NoFeatures {
  template <Feature kOnly>
  __device__ __forceinline__ void begin(int) const {}
  template <Feature kOnly, class Scores, class Softmax>
  __device__ __forceinline__ bool score(Scores&, int, const Softmax&, const ScoreScale&) const {
    return true;
  }
  template <Feature kOnly, class Scores>
  __device__ __forceinline__ void drop(Scores&, int) const {}
  __device__ __forceinline__ void finish() const {}
};

}  // namespace flash_attn::sm90
