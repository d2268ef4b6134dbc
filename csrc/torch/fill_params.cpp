// SPDX-License-Identifier: BSD-3-Clause
// Tensors -> AttnParams, and what can only be checked where their contents can be read: the CPU.
#include <algorithm>
#include <cmath>

#include "core/mask.h"
#include "torch/checks.h"

namespace flash_attn {

namespace {

int64_t step(const Tensor& t, int64_t d) {
  return t.size(d) == 1 ? 0 : t.stride(d);
}

int narrowed(int64_t size) {
  return static_cast<int>(std::min<int64_t>(size, INT32_MAX));
}

// ---- features

void fill_lengths(Problem& problem, const OpInputs& in) {
  AttnParams& p = problem.params;
  const auto ints = [&](const OptTensor& t) {
    return t ? int_data(as_contiguous(*t, problem.kept)) : nullptr;
  };
  p.seq_q.cu_seqlens = ints(in.cu_seqlens_q);
  p.seq_k.cu_seqlens = ints(in.cu_seqlens_k);
  p.seq_k.used = ints(in.seqused_k);
  p.seq_k.leftpad = ints(in.leftpad_k);
  p.seq_k.cache_batch_idx = ints(in.cache_batch_idx);
  p.seq_k.entries = narrowed(in.k.size(0));
  if (in.cu_seqlens_q) p.seq_q.total = in.q.size(0);
  p.seqlen_q = narrowed(in.q.size(in.cu_seqlens_q ? 0 : 1));
  if (in.block_table) {
    Tensor table = *in.block_table;
    if (table.size(1) > 1 && table.stride(1) != 1) table = as_contiguous(table, problem.kept);
    p.pages.table = int_data(table);
    p.pages.table_stride = step(table, 0);
    p.pages.page_size = narrowed(in.k.size(1));
    p.pages.max_pages = narrowed(table.size(1));
    p.pages.num_pages = narrowed(in.k.size(0));
    p.seqlen_k = narrowed(in.k.size(1) * table.size(1));
  } else if (in.cu_seqlens_k) {
    p.seq_k.total = in.k.size(0);
    p.seqlen_k = narrowed(in.k.size(0));
  } else {
    p.seqlen_k = narrowed(in.k.size(1));
  }
}

BlockList block_list(Problem& problem,
                     const OptTensor& counts,
                     const OptTensor& index,
                     const OptTensor& bits) {
  if (!counts) return {};
  const Tensor c = as_contiguous(*counts, problem.kept), i = as_contiguous(*index, problem.kept);
  BlockList list;
  list.count = int_data(c);
  list.index = int_data(i);
  list.count_batch = step(c, 0);
  list.count_head = step(c, 1);
  list.index_batch = step(i, 0);
  list.index_head = step(i, 1);
  list.rows = static_cast<int>(c.size(2));
  list.width = static_cast<int>(i.size(3));
  if (bits) list.bits = int_data(as_contiguous(*bits, problem.kept));
  return list;
}

void fill_mask(Problem& problem, const OpInputs& in) {
  MaskSpec& mask = problem.params.mask;
  mask.window_left = narrowed(in.window_left);
  mask.window_right = narrowed(in.window_right);
  if (!in.block_counts) return;
  mask.block_q = static_cast<int>(in.block_q);
  mask.block_k = static_cast<int>(in.block_k);
  mask.blocks = block_list(problem, in.block_counts, in.block_index, in.block_bits_index);
  mask.blocks_t = block_list(problem, in.block_counts_t, in.block_index_t, in.block_bits_index_t);
  if (!in.block_bits) return;
  mask.block_bits =
      reinterpret_cast<const uint32_t*>(int_data(as_contiguous(*in.block_bits, problem.kept)));
  mask.bit_tiles = narrowed(in.block_bits->size(0));
}

void fill_scores(Problem& problem, const OpInputs& in) {
  AttnParams& p = problem.params;
  p.softmax_scale = in.softmax_scale;
  p.softcap = in.softcap;
  if (in.bias && !in.q.is_cpu()) {  // lengths that nobody has read must not lead past the bias
    const auto cut = [&](int& seqlen, int64_t size) {
      if (size != 1) seqlen = narrowed(std::min<int64_t>(seqlen, size));
    };
    cut(p.seqlen_q, in.bias->size(2));
    cut(p.seqlen_k, in.bias->size(3));
  }
  // Without elements there is no row or no key that would read it: on the CPU check_content says
  // so, elsewhere the cut.
  if (in.bias && in.bias->numel() > 0) {
    const Tensor& bias = *in.bias;
    p.bias.ptr = bias.data_ptr();
    p.bias.batch = step(bias, 0);
    p.bias.head = step(bias, 1);
    p.bias.row = step(bias, 2);
    p.bias.col = step(bias, 3);
    p.bias.boolean = bias.scalar_type() == ScalarType::Bool;
    if (!p.bias.boolean) p.bias.dtype = dtype_of(bias, "attn_bias");
  }
  if (in.alibi_slopes) {
    const Tensor slopes = as_contiguous(*in.alibi_slopes, problem.kept);
    p.alibi.slopes = static_cast<const float*>(slopes.data_ptr());
    p.alibi.batch = slopes.dim() == 2 ? step(slopes, 0) : 0;
  }
  if (in.sinks) p.sinks.ptr = as_contiguous(*in.sinks, problem.kept).data_ptr();
  // Rounded as Python rounds; at least one lane value is kept, so that the scale is finite.
  const double kept = std::max(1.0, std::nearbyint((1.0 - in.dropout_p) * 65536));
  if (in.philox && kept < 65536) {
    p.dropout.philox =
        static_cast<const int64_t*>(as_contiguous(*in.philox, problem.kept).data_ptr());
    p.dropout.keep_below = static_cast<uint32_t>(kept);
    p.dropout.scale = 65536 / kept;
  }
}

// ---- contents, on the CPU

std::string values_text(const int32_t* values, int64_t count) {
  std::string text = "[";
  for (int64_t i = 0; i < std::min<int64_t>(count, 16); ++i)
    text += (i ? ", " : "") + int_text(values[i]);
  return text + (count > 16 ? ", …]" : "]");
}

// The longest sequence.
int check_cumulative(const int32_t* cu, int64_t batch, int64_t rows, const char* name) {
  int longest = 0;
  bool right = cu[0] == 0 && cu[batch] <= rows;
  for (int64_t b = 0; b < batch; ++b) {
    right = right && cu[b + 1] >= cu[b];
    if (right) longest = std::max(longest, cu[b + 1] - cu[b]);
  }
  if (!right) {
    raise("ValueError", message(name, " must start at 0, not decrease and end at no more than the ",
                                rows, " rows, got ", values_text(cu, batch + 1)));
  }
  return longest;
}

// The longest live length of the keys.
int check_key_lengths(const AttnParams& p, int room) {
  const int32_t* cu = p.seq_k.cu_seqlens;
  int longest = 0;
  for (int b = 0; b < p.batch; ++b) {
    if (is_padding(p.pages, b)) continue;
    const int most = cu != nullptr ? cu[b + 1] - cu[b] : room;
    if (most > room) {
      raise("ValueError", message("cu_seqlens_k gives sequence ", b, " ", most,
                                  " keys, block_table has pages for ", room));
    }
    const int length = p.seq_k.used != nullptr ? p.seq_k.used[b] : most;
    if (length < 0 || length > most) {
      raise("ValueError",
            message("seqused_k[", b, "] (cache_seqlens, with what is appended) must lie in 0 to ",
                    most, ", got ", int_text(length)));
    }
    if (p.seq_k.leftpad != nullptr && p.seq_k.leftpad[b] < 0) {
      raise("ValueError",
            message("leftpad_k[", b, "] must not be negative, got ", int_text(p.seq_k.leftpad[b])));
    }
    longest = std::max(longest, length);
  }
  return longest;
}

// Each line of a list: its count, and entries that ascend inside [0, columns), with bit tiles that
// exist.
void check_block_list(const BlockList& list,
                      const OptTensor& counts,
                      int64_t columns,
                      int bit_tiles) {
  const int64_t lines = counts->numel();
  for (int64_t line = 0; line < lines; ++line) {
    const int count = list.count[line];
    if (count < 0 || count > list.width) {
      raise("ValueError", message("block_mask's counts must lie in 0 to ", list.width,
                                  " (the width of its indices), got ", count));
    }
    int64_t before = -1;
    for (int entry = 0; entry < count; ++entry) {
      const int64_t block = list.index[line * list.width + entry];
      if (block <= before || block >= columns) {
        raise("ValueError", message("block_mask's indices must ascend within 0 to ", columns - 1,
                                    ", got ", block, " after ", before));
      }
      before = block;
      const int tile = list.bits == nullptr ? -1 : list.bits[line * list.width + entry];
      if (tile < -1 || tile >= bit_tiles) {
        raise("ValueError", message("block_mask's bits_index must lie in 0 to ", bit_tiles - 1,
                                    ", or be -1 for a whole block, got ", tile));
      }
    }
  }
}

void check_block_mask(const AttnParams& p, const OpInputs& in) {
  const BlockList &blocks = p.mask.blocks, &blocks_t = p.mask.blocks_t;
  const bool transposed = blocks_t.index != nullptr;
  const int64_t columns = transposed ? blocks_t.rows : ceil_div<int64_t>(INT32_MAX, p.mask.block_k);
  check_block_list(blocks, in.block_counts, columns, p.mask.bit_tiles);
  if (transposed) check_block_list(blocks_t, in.block_counts_t, blocks.rows, p.mask.bit_tiles);
  const int64_t rows = int64_t{blocks.rows} * p.mask.block_q;
  if (p.seqlen_q > rows || p.seqlen_k > columns * p.mask.block_k) {
    raise("ValueError",
          message("block_mask has ", blocks.rows, " rows and ", columns, " columns of blocks of (",
                  p.mask.block_q, ", ", p.mask.block_k, "), too few for ", p.seqlen_q,
                  " queries and ", p.seqlen_k, " keys"));
  }
}

// Finds what is wrong inside the integer tensors, and the longest lengths.
void check_content(AttnParams& p, const OpInputs& in) {
  const int room = p.seqlen_k;
  if (in.cu_seqlens_q) {
    p.seqlen_q = check_cumulative(p.seq_q.cu_seqlens, p.batch, in.q.size(0), "cu_seqlens_q");
  }
  if (in.cu_seqlens_k) {
    const int64_t rows = in.block_table ? INT32_MAX : in.k.size(0);
    p.seqlen_k = check_cumulative(p.seq_k.cu_seqlens, p.batch, rows, "cu_seqlens_k");
  }
  if (p.seq_k.cache_batch_idx != nullptr) {
    check_entries(p.seq_k.cache_batch_idx, p.batch, in.k.size(0));
  }
  if (p.batch > 0) p.seqlen_k = check_key_lengths(p, room);
  for (int b = 0; p.pages.table != nullptr && b < p.batch; ++b) {
    check_pages(p.pages, b, SeqInfo(p, b).k_len);
  }
  if (in.bias) {
    const int64_t rows = in.bias->size(2), columns = in.bias->size(3);
    if ((rows != 1 && rows < p.seqlen_q) || (columns != 1 && columns < p.seqlen_k)) {
      raise("ValueError",
            message("attn_bias must reach the longest sequences, ", p.seqlen_q, " queries and ",
                    p.seqlen_k, " keys, or be 1 there, got shape ", shape_text(in.bias->sizes())));
    }
  }
  if (p.mask.blocks.index != nullptr) check_block_mask(p, in);
}

}  // namespace

std::string int_text(int32_t value) {
  const char* beyond = value == INT32_MAX ? " or more" : value == INT32_MIN ? " or less" : "";
  return std::to_string(value) + beyond;
}

void check_pages(const Pages& pages, int batch, int64_t length) {
  const int32_t* row = pages.table + batch * pages.table_stride;
  const int64_t used =
      std::min<int64_t>(ceil_div<int64_t>(length, pages.page_size), pages.max_pages);
  for (int64_t column = 0; column < used; ++column) {
    if (row[column] < -1 || row[column] >= pages.num_pages) {
      raise("ValueError",
            message("block_table[", batch, ", ", column, "] must lie in 0 to ", pages.num_pages - 1,
                    ", or be -1 for no page, got ", int_text(row[column])));
    }
  }
}

bool is_padding(const Pages& pages, int batch) {
  if (pages.table == nullptr) return false;
  const int32_t* row = pages.table + batch * pages.table_stride;
  return std::all_of(row, row + pages.max_pages, [](int32_t page) { return page == -1; });
}

void check_entries(const int32_t* index, int64_t batch, int64_t entries) {
  for (int64_t b = 0; b < batch; ++b) {
    if (index[b] < 0 || index[b] >= entries) {
      raise("ValueError", message("cache_batch_idx[", b, "] must lie in 0 to ", entries - 1,
                                  ", got ", int_text(index[b])));
    }
  }
}

Problem fill_params(const OpInputs& in) {
  check_inputs(in);
  Problem problem;
  AttnParams& p = problem.params;
  p.dtype = dtype_of(in.q, "q");
  p.batch = narrowed(in.cu_seqlens_q ? in.cu_seqlens_q->size(0) - 1 : in.q.size(0));
  p.heads_q = narrowed(in.q.size(in.q.dim() - 2));
  p.heads_k = narrowed(in.k.size(in.k.dim() - 2));
  p.head_dim = narrowed(in.q.size(in.q.dim() - 1));
  p.head_dim_v = narrowed(in.v.size(in.v.dim() - 1));
  p.q = tensor_ref(with_unit_stride(in.q, problem.kept));
  p.k = tensor_ref(with_unit_stride(in.k, problem.kept));
  p.v = tensor_ref(with_unit_stride(in.v, problem.kept));
  fill_lengths(problem, in);
  fill_mask(problem, in);
  fill_scores(problem, in);
  if (in.q.is_cpu()) check_content(p, in);
  return problem;
}

}  // namespace flash_attn
