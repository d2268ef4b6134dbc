// SPDX-License-Identifier: BSD-3-Clause
// The operators' signatures, defined once, in the CPU library (always loaded first); ops_cpu.cpp
// and ops_cuda.cpp only implement them. Names and shapes as in the glossary: q (batch, seqlen_q,
// num_heads, head_dim) or, packed, (total_q, num_heads, head_dim). All functional, but for
// append_kv, which writes into the caches. No operator takes a string (the boxing of torch up
// to 2.13 leaks them), so the family of kernels is a number: 0 any, 1 cpu, 2 sm80, 3 sm90.
#include "torch/compat.h"

STABLE_TORCH_LIBRARY(flash_attn, m) {
  // The optional tensors, in the order of the spec:
  //   cu_seqlens_q/k (batch + 1,) int32   packed rows; seqused_k (batch,) int32 live keys
  //   leftpad_k, cache_batch_idx (batch,) int32; block_table (batch, max_pages) int32: k, v are
  //   pages bias (batch|1, heads|1, seqlen_q|1, seqlen_k|1), additive or bool (true is visible)
  //   alibi_slopes (heads,) or (batch, heads) fp32; sinks (heads,) fp32 (fp64 with fp64)
  //   block_counts (batch|1, heads|1, rows), block_index (…, rows, width) int32; *_t their
  //   transpose; block_bits_index, block_bits_index_t int32, of the shape of the indices: the bit
  //   tile of a partly visible block, -1 of a whole one (null: all are whole); block_bits (tiles,
  //   block_q, ceil(block_k / 32)) int32: bit j % 32 of word j / 32 of row i is set where query i
  //   of the block sees its key j
  //   philox (2,) int64 {seed, offset}, on q's device
  // `deterministic` is for the backward pass that autograd runs; the forward always is.
  // Returns out (shape of q, head_dim of v) and lse (batch, heads, seqlen_q) or (heads, total_q).
  m.def(
      "forward(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
      "Tensor? seqused_k, Tensor? leftpad_k, Tensor? cache_batch_idx, Tensor? block_table, "
      "Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, Tensor? block_counts, Tensor? "
      "block_index, "
      "Tensor? block_counts_t, Tensor? block_index_t, Tensor? block_bits_index, "
      "Tensor? block_bits_index_t, Tensor? block_bits, Tensor? philox, float softmax_scale, "
      "float softcap, float dropout_p, int window_left, int window_right, int block_q, int "
      "block_k, "
      "bool deterministic, int family) -> (Tensor out, Tensor lse)");
  // `needs`: which gradients are wanted, a sum of 1 q, 2 k, 4 v, 8 bias, 16 alibi_slopes, 32 sinks.
  // The others come back with no elements, shape (0,). dbias has the bias's shape, in fp32 (fp64
  // with fp64).
  m.def(
      "backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
      "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, Tensor? bias, "
      "Tensor? alibi_slopes, Tensor? sinks, Tensor? block_counts, Tensor? block_index, "
      "Tensor? block_counts_t, Tensor? block_index_t, Tensor? block_bits_index, "
      "Tensor? block_bits_index_t, Tensor? block_bits, Tensor? philox, float softmax_scale, "
      "float softcap, float dropout_p, int window_left, int window_right, int block_q, int "
      "block_k, "
      "bool deterministic, int needs, int family) -> "
      "(Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dslopes, Tensor dsinks)");
  // rowsum(out * dout) in fp32 (fp64 with fp64): (batch, heads, seqlen_q), packed (heads, total_q).
  m.def("delta(Tensor out, Tensor dout) -> Tensor");
  // Writes k, v (batch, seqlen_new, num_heads_k, head_dim) at slots cache_seqlens[b] + i, k after
  // rotary when cos and sin (positions, rotary_dim / 2) are given.
  m.def(
      "append_kv(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor? cos, Tensor? "
      "sin, "
      "Tensor cache_seqlens, Tensor? cache_batch_idx, Tensor? block_table, bool interleaved) -> "
      "()");
  // Rotates x (batch, seqlen, heads, head_dim) to position offsets[b] + i, or all rows to
  // offsets[b].
  m.def(
      "rotary(Tensor x, Tensor cos, Tensor sin, Tensor offsets, bool interleaved, bool per_row) -> "
      "Tensor");
}
