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
  static constexpr float kNegligible = 20;  // weights of 2^-20 of the largest

  float inside = 0, factor[4] = {};  // inside is 0 where its powers are no numbers to reckon with
  // Where c is the softmax's: factor * c; and of a shorter series that serves while |inside * x| is
  // at most 0.6, off by at most 6.4e-5, and grows with x everywhere. 0 where c is too small for it.
  float exponent[4] = {}, near_exponent[3] = {};
  float near = 0;  // exponents that it serves are at most this

  CapSeries() = default;
  __host__ CapSeries(double of, double c) {
    if (of < 1e-4 || of > 1e4) return;
    inside = static_cast<float>(of);
    const double series[] = {0.9999185800552368, -0.3306542932987213, 0.11889753490686417,
                             -0.026629667729139328};
    const double near_series[] = {0.9999368558561877, -0.3301280614571159, 0.10839797191186523};
    double power = of;
    for (int i = 0; i < 4; ++i, power *= of * of) {
      factor[i] = static_cast<float>(series[i] * power);
      exponent[i] = static_cast<float>(series[i] * power * c);
      if (i < 3) near_exponent[i] = static_cast<float>(near_series[i] * power * c);
    }
    near = static_cast<float>(0.536 * c);
    if (near < kNegligible) near = 0;
  }
};

__device__ __forceinline__ float polynomial(const float (&factor)[4], float x) {
  return fmaf(fmaf(fmaf(factor[3], x, factor[2]), x, factor[1]), x, factor[0]);
}

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
    x *= polynomial(series.factor, x * x);
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

// What a thread keeps of the features for the tiles of a loop; only what its features need is ever
// set, and takes registers.
struct FeatureRegisters {
  PhiloxRow row;
  float slope[2];    // of the thread's two rows
  int away[2];       // their keys at distance 0
  uint32_t at;       // BiasTile::place
  uint32_t bits[2];  // of a boolean mask's tile
};

// A warp's features. All functions: all lanes.
template <class Element, class Tile>
struct Features {
  static constexpr int kColumns = Tile::kBlockN / 8;
  using Scores = float[1][kColumns][4];
  using Weights = uint32_t[kColumns / 2][4];

  const AttnParams& p;
  const ForwardGrid& grid;
  const ScoreSteps& steps;
  const CapSeries& series;
  const ForwardState<Element, Tile>& state;
  BiasTile<Element, Tile> bias;
  Feature only;
  bool whole;  // dropout by whole calls: tiles begin at multiples of 16 rows and 32 keys

  // smem: kFeatureBytes, at a multiple of 1024.
  __device__ __forceinline__ Features(const AttnParams& p_,
                                      const ForwardGrid& grid_,
                                      const CapSeries& series_,
                                      const ForwardState<Element, Tile>& state_,
                                      const BiasMap& map,
                                      uint32_t smem)
      : p(p_), grid(grid_), steps(grid.steps), series(series_), state(state_), bias(map, smem) {
    const bool drops = has_dropout(), slopes = p.alibi.slopes != nullptr;
    const bool adds = p.bias.ptr != nullptr;
    only = drops            ? Feature::kDropout
           : slopes         ? Feature::kAlibi
           : steps.capped   ? Feature::kCap
           : !adds          ? Feature::kNone
           : p.bias.boolean ? Feature::kMask
                            : Feature::kBias;
    // The compiler is to see that all lanes agree.
    whole = state.task.rows.group == 1 && state.task.begin % 16 == 0 && grid.block_n % 32 == 0;
    const bool half = p.dropout.keep_below >= 0x8000u;
    if (drops + slopes + steps.capped + adds > 1 || steps.factor != 1 ||
        (drops && !(whole && half)) || (adds && map.sides.rows == 0))
      only = Feature::kSeveral;
  }

  // For the tiles of a loop.
  template <Feature kOnly>
  __device__ __forceinline__ FeatureRegisters hold() const {
    constexpr bool kAny = kOnly == Feature::kSeveral;
    FeatureRegisters held;
    const WarpRows rows = warp_rows();
    if (kOnly == Feature::kDropout || (kAny && has_dropout() && whole)) {
      held.row = PhiloxRow(DropoutMask(p, state.task.batch, rows.place[0].head),
                           rows.first / 2 + fragment_row(0));
    }
    if (kOnly == Feature::kAlibi || (kAny && p.alibi.slopes != nullptr)) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const RowPlace place = rows(0, h);
        held.slope[h] = p.alibi.slopes[state.task.batch * p.alibi.batch + place.head] * steps.slope;
        held.away[h] = place.position + state.seq.k_len - state.seq.q_len - fragment_column(0);
      }
    }
    if (kOnly == Feature::kBias || kOnly == Feature::kMask || kAny)
      held.at = bias.place(rows.group);
    return held;
  }

  // Before the scores of a tile are waited for.
  template <Feature kOnly>
  __device__ __forceinline__ void begin(FeatureRegisters& held, int n) {
    constexpr bool kBoxes = kOnly == Feature::kMask || kOnly == Feature::kBias;
    if (kBoxes || (kOnly == Feature::kSeveral && bias.from.sides.rows != 0)) {
      bias.fetch(p.bias, warp_rows(), state.task.batch, n, grid.block_n);
      if (kOnly == Feature::kMask || (kOnly == Feature::kSeveral && p.bias.boolean)) {
        bias.read_bits(held.bits, held.at);
        fetch_before(n);
      }
    }
  }

  // Whether the scores may ask for a higher m.
  template <Feature kOnly>
  __device__ __forceinline__ bool score(Scores& s,
                                        const FeatureRegisters& held,
                                        int n,
                                        const Softmax<Element, 1>& softmax,
                                        const ScoreScale& scale) {
    float bound[2];
    if constexpr (kOnly == Feature::kCap) {
      cap_tile<Element>(s, steps.inside, series, bound);
      return __any_sync(0xffffffffu, softmax.may_pass(bound, scale));
    } else if constexpr (kOnly == Feature::kAlibi) {
      slant(s, held, n);
    } else if constexpr (kOnly == Feature::kBias) {
      bias.add(s, steps.unit, held.at);
      fetch_before(n);
    } else if constexpr (kOnly == Feature::kMask) {
      bias.hide(s, held.bits);
    } else if constexpr (kOnly == Feature::kSeveral) {
      if (only == Feature::kNone || only == Feature::kDropout) return true;
      if (steps.capped) cap_tile<Element>(s, steps.inside, series, bound);
      if (steps.factor != 1) {
#pragma unroll
        for (int e = 0; e < kColumns * 4; ++e)
          s[0][e / 4][e % 4] *= steps.factor;
      }
      if (p.alibi.slopes != nullptr) slant(s, held, n);
      if (p.bias.ptr != nullptr) add_bias(s, held, n);
    }
    return true;
  }

  // Scores -> weights by the m that is there, and their sums; false where they are of no use
  // (Softmax::weigh_ahead), and then begin has not been undone: `score` may follow.
  template <Feature kOnly>
  __device__ __forceinline__ bool weigh_ahead(Scores& s,
                                              float (&sum)[2],
                                              const FeatureRegisters& held,
                                              int n,
                                              const Softmax<Element, 1>& softmax,
                                              const ScoreScale& scale) {
    const float c = scale.c;
    if constexpr (kOnly == Feature::kCap) {
      if (series.near > 0) {
        const float(&f)[3] = series.near_exponent;
        bool right = softmax.weigh_ahead(s, sum, scale, [&](float x, int, int, float base) {
          const float square = x * x;
          return fmaf(x, fmaf(fmaf(f[2], square, f[1]), square, f[0]), -base);
        });
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          // A score beyond the series has a weight beyond this, or, below, one of no importance.
          const float base = __fmul_rn(softmax.m[0][h], c);
          right &= sum[h] <= ptx::exp2_approx(series.near - base) &&
                   base >= CapSeries::kNegligible - series.near;
        }
        return right;
      }
      float squares[2] = {0, 0};
      const bool right = softmax.weigh_ahead(s, sum, scale, [&](float x, int, int i, float base) {
        const float square = x * x;
        squares[i / 2] += square;
        return fmaf(x, polynomial(series.exponent, square), -base);
      });
      const float inside = series.inside * series.inside;
      return right && inside > 0 && fmaxf(squares[0], squares[1]) * inside <= 1;
    } else if constexpr (kOnly == Feature::kAlibi) {
      float distance[2], slant_by[2];
      bool mixed = false;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int far = held.away[h] - n * grid.block_n;
        mixed |= far > 0 && far < 8 * kColumns - 7;
        distance[h] = static_cast<float>(far);
        slant_by[h] = (far > 0 ? held.slope[h] : -held.slope[h]) * c;
      }
      if (__any_sync(0xffffffffu, mixed)) {
        slant(s, held, n);
        return softmax.weigh_ahead(s, sum, scale);
      }
      return softmax.weigh_ahead(s, sum, scale, [&](float x, int k, int i, float base) {
        const float of_row = fmaf(-slant_by[i / 2], distance[i / 2], -base);
        return fmaf(x, c, fmaf(slant_by[i / 2], static_cast<float>(8 * k + i % 2), of_row));
      });
    } else if constexpr (kOnly == Feature::kBias) {
      const float unit = steps.unit * c;
      const float base[2] = {__fmul_rn(softmax.m[0][0], c), __fmul_rn(softmax.m[0][1], c)};
      bias.each_number(held.at, [&](int k, int i, float more) {
        s[0][k][i] = fmaf(s[0][k][i], unit, fmaf(more, c, -base[i / 2]));
      });
      return softmax.weigh_ahead(s, sum, scale, [&](float x, int, int, float) { return x; });
    } else {
      if constexpr (kOnly == Feature::kMask) bias.hide(s, held.bits);
      return softmax.weigh_ahead(s, sum, scale);
    }
  }

  // After weigh_ahead, which was right, or was not and `score` follows.
  template <Feature kOnly>
  __device__ __forceinline__ void end_ahead(FeatureRegisters& held, int n, bool right) {
    if constexpr (kOnly == Feature::kBias) {
      if (right) fetch_before(n);
    }
    // The compiler would keep a predicate for each bit until then.
    if constexpr (kOnly == Feature::kMask) {
      if (right) return;
#pragma unroll
      for (int h = 0; h < 2; ++h)
        held.bits[h] = __shfl_sync(0xffffffffu, held.bits[h], threadIdx.x % 32);
    }
  }

  // Zeroes the weights that dropout drops, where it does not do so by whole calls.
  template <Feature kOnly>
  __device__ __forceinline__ void drop_slowly(Scores& s, int n) const {
    if constexpr (kOnly == Feature::kSeveral) {
      if (!has_dropout() || whole) return;
      by_copy(s, [&](float(&copy)[kColumns][4]) {
        drop_by_element(copy, p, warp_rows(), state.task.batch, n * grid.block_n);
      });
    }
  }

  // The same where it does.
  template <Feature kOnly>
  __device__ __forceinline__ void drop(Weights& weights,
                                       const FeatureRegisters& held,
                                       int n) const {
    if constexpr (kOnly == Feature::kDropout) drop_calls<true>(weights, held.row, n);
    if constexpr (kOnly == Feature::kSeveral) {
      if (has_dropout() && whole) drop_calls<false>(weights, held.row, n);
    }
  }

  // Nothing is on its way any more.
  __device__ __forceinline__ void finish() {
    bias.wait();
  }

 private:
  __device__ __forceinline__ bool has_dropout() const {
    return Tile::kDropout && p.dropout.philox != nullptr;
  }

  __device__ __forceinline__ WarpRows warp_rows() const {
    return state.warp_rows(ptx::thread_index() / 32 * 16);
  }

  // The tile before n is brought next.
  __device__ __forceinline__ void fetch_before(int n) {
    bias.fetch_before(p.bias, warp_rows(), state.task.batch, n, grid.block_n);
  }

  // A call of Philox covers rows g, g + 8 and the same column of four neighbouring accumulators:
  // two calls serve four pairs of neighbours in each of the rows. kHalf: half of the weights are
  // kept or more.
  template <bool kHalf>
  __device__ __forceinline__ void drop_calls(Weights& weights, const PhiloxRow& row, int n) const {
    static_assert(!Tile::kDropout || Tile::kBlockN % 32 == 0);
#pragma unroll
    for (int block = 0; block < kColumns / 4; ++block) {
      const uint32_t column = n * (grid.block_n / 4) + block * 8 + fragment_column(0);
      const Philox4 even = row(column), odd = row(column + 1);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint32_t a = signs<kHalf>(even.word[w]), b = signs<kHalf>(odd.word[w]);
        uint32_t(&pairs)[4] = weights[block * 2 + w % 2];
        pairs[w / 2] &= ~ptx::bytes_of(a, b, 0xdd99);
        pairs[w / 2 + 2] &= ~ptx::bytes_of(a, b, 0xffbb);
      }
    }
  }

  // The highest bits of both halves of a word: whether they are keep_below or more.
  template <bool kHalf>
  __device__ __forceinline__ uint32_t signs(uint32_t word) const {
    if constexpr (kHalf) {
      const uint32_t least = (p.dropout.keep_below - 0x8000u) * 0x10001u;
      return __vmaxu2(word, least) - least;
    }
    const uint32_t more = (0x10000u - p.dropout.keep_below) * 0x10001u;
    const uint32_t sum = (word & 0x7fff7fffu) + (more & 0x7fff7fffu);
    return (word & more) | ((word | more) & sum);  // the carry of word + more
  }

  // As apply_alibi.
  __device__ __forceinline__ void slant(Scores& s, const FeatureRegisters& held, int n) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float distance = static_cast<float>(held.away[h] - n * grid.block_n);
#pragma unroll
      for (int e = 0; e < 2 * kColumns; ++e) {
        float& x = s[0][e / 2][2 * h + e % 2];
        x = fmaf(-held.slope[h], fabsf(distance - static_cast<float>(8 * (e / 2) + e % 2)), x);
      }
    }
  }

  __device__ __forceinline__ void add_bias(Scores& s, const FeatureRegisters& held, int n) {
    const WarpRows rows = warp_rows();
    const int batch = state.task.batch;
    if (bias.from.sides.rows == 0) {
      by_copy(s, [&](float(&copy)[kColumns][4]) {
        bias.add_by_element(copy, p.bias, steps.unit, rows, batch, n * grid.block_n,
                            state.seq.k_len);
      });
    } else if (p.bias.boolean) {
      bias.hide(s, held.bits);
    } else {
      bias.add(s, steps.unit, held.at);
      fetch_before(n);
    }
  }
};

// Of kernels without.
struct NoFeatures {
  template <Feature kOnly>
  __device__ __forceinline__ FeatureRegisters hold() const {
    return {};
  }
  template <Feature kOnly>
  __device__ __forceinline__ void begin(FeatureRegisters&, int) const {}
  template <Feature kOnly, class Scores, class... Others>
  __device__ __forceinline__ bool score(Scores&, const Others&...) const {
    return true;
  }
  template <Feature kOnly, class Scores>
  __device__ __forceinline__ void drop_slowly(Scores&, int) const {}
  template <Feature kOnly, class Weights>
  __device__ __forceinline__ void drop(Weights&, const FeatureRegisters&, int) const {}
  __device__ __forceinline__ void finish() const {}
};

}  // namespace flash_attn::sm90
