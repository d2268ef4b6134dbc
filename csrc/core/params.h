// SPDX-License-Identifier: BSD-3-Clause
// One attention problem as plain data: what csrc/torch/checks.cpp fills from tensors and every
// kernel reads. An absent feature is a null pointer or a neutral value; there are no has_x flags.
// All strides count elements, not bytes. Passed by value to CUDA kernels (__grid_constant__).
#pragma once

#include "core/types.h"

namespace flash_attn {

// A tensor (batch, row, head, dim) whose dim is contiguous. Packed (varlen) tensors have batch 0;
// paged caches use `batch` as the stride of a page.
struct TensorRef {
  void* ptr = nullptr;
  int64_t batch = 0, row = 0, head = 0;
};

// Where the sequences of one side lie. All null: dense, every sequence has the same length.
struct Sequence {
  const int32_t* cu_seqlens = nullptr;  // (batch + 1,) rows at which packed sequences begin
  const int32_t* used = nullptr;        // (batch,) live length, at most the room of the sequence
  const int32_t* leftpad = nullptr;     // (batch,) first live slot; key side only
  const int32_t* cache_batch_idx = nullptr;  // (batch,) the cache entry of a batch; key side only
  int64_t total = 0;                         // rows in the packed tensor; 0 when not packed
  int entries = 0;                           // cache entries that cache_batch_idx may name
};

// Key slots in pages: slot j of a sequence is row j % page_size of its page j / page_size.
struct Pages {
  const int32_t* table = nullptr;  // (batch, max_pages); -1 is no page
  int64_t table_stride = 0;        // from one batch to the next
  int page_size = 0, max_pages = 0, num_pages = 0;
};

// Block-sparse: per (batch, head, block row) an ascending list of visible blocks. A stride of 0
// broadcasts. The transposed lists (per block column its rows) serve the backward pass.
struct BlockList {
  const int32_t* count = nullptr;  // (batch | 1, heads | 1, rows)
  const int32_t* index = nullptr;  // (batch | 1, heads | 1, rows, width); read up to count
  int64_t count_batch = 0, count_head = 0;
  int64_t index_batch = 0, index_head = 0;
  int rows = 0, width = 0;
  // Like index: the bit tile (MaskSpec::block_bits) of a partly visible block, -1 of a block that
  // is wholly visible. Null: all are.
  const int32_t* bits = nullptr;
};

struct MaskSpec {
  int window_left = kUnlimited;   // keys visible before the aligned position
  int window_right = kUnlimited;  // keys visible after it; causal is 0
  int block_q = 0, block_k = 0;   // block size in queries and keys; 0 when there is no block mask
  BlockList blocks;               // block rows -> block columns
  BlockList blocks_t;             // block columns -> block rows; null in the forward pass
  // (bit_tiles, block_q, ceil(block_k / 32)), contiguous: bit j % 32 of word j / 32 of row i is set
  // where query i of the block sees its key j.
  const uint32_t* block_bits = nullptr;
  int bit_tiles = 0;
};

// Added to the scores, or a boolean mask (true is visible) when `boolean`. Strides of 0 broadcast.
struct Bias {
  const void* ptr = nullptr;  // (batch | 1, heads | 1, seqlen_q | 1, seqlen_k | 1)
  int64_t batch = 0, head = 0, row = 0, col = 0;
  DType dtype = DType::kF32;
  uint8_t boolean = 0;
};

struct Alibi {
  const float* slopes = nullptr;  // (heads_q,) or (batch, heads_q); score -= slope * distance
  int64_t batch = 0;              // stride; 0 when shared by the batches
};

struct Dropout {
  const int64_t* philox = nullptr;  // {seed, offset}, on the device; null when off
  uint32_t keep_below = 65536;  // keep where the 16-bit lane is below this: round((1-p) * 65536)
  double scale = 1.0;           // 65536 / keep_below
};

struct Sinks {
  const void* ptr = nullptr;  // (heads_q,) fp32; fp64 with fp64 inputs. One more logit of every row
};

// Gradients. ptr == null for what is frozen. Strides of accumulators as documented beside them.
struct Gradients {
  TensorRef dout, dq, dk, dv;  // dtype of q
  const void* dlse = nullptr;  // layout of lse; null when lse has no gradient
  void* delta = nullptr;       // layout of lse: rowsum(out * dout) - dlse
  void* dbias = nullptr;       // contiguous, shape of the bias, fp32 (fp64 with fp64)
  // Strides of dbias, 0 where the bias broadcasts.
  int64_t dbias_batch = 0, dbias_head = 0, dbias_row = 0, dbias_col = 0;
  void* dslopes = nullptr;  // shape of the slopes, fp32
  void* dsinks = nullptr;   // (heads_q,), fp32 (fp64 with fp64)
  uint8_t deterministic = 0;
};

struct AttnParams {
  TensorRef q, k, v, out;
  // (batch, heads_q, seqlen_q) contiguous, packed (heads_q, total_q); fp32, fp64 with fp64.
  void* lse = nullptr;

  int batch = 0;
  int seqlen_q = 0, seqlen_k = 0;  // dense lengths; packed or paged: an upper bound of every length
  int heads_q = 0, heads_k = 0;
  int head_dim = 0, head_dim_v = 0;
  DType dtype = DType::kF32;

  double softmax_scale = 1.0;
  double softcap = 0.0;  // 0 is off

  Sequence seq_q, seq_k;
  Pages pages;
  MaskSpec mask;
  Bias bias;
  Alibi alibi;
  Dropout dropout;
  Sinks sinks;
  Gradients grad;

  FA_HD int group_size() const { return heads_q / heads_k; }
};

}  // namespace flash_attn
