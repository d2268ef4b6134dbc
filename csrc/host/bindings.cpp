// SPDX-License-Identifier: BSD-3-Clause
// flash_attn._host: the planner for Python. It knows no torch and links no kernel; each op library
// hands it its table of rows (register_table), and a problem is described in plain numbers.
#include <algorithm>
#include <string>
#include <vector>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "plan/plan.h"
#include "plan/select.h"

namespace py = pybind11;

namespace flash_attn {

namespace {

std::vector<const KernelTable*> tables;  // those of _C_cpu and _C_cuda
std::vector<const KernelList*> lists;    // their lists, GPUs first

void register_table(const py::capsule& capsule) {
  if (capsule.name() == nullptr || std::string(capsule.name()) != kKernelTableCapsule) {
    throw py::value_error("flash_attn: a kernel table must be a capsule named " +
                          std::string(kKernelTableCapsule));
  }
  const KernelTable* table = capsule.get_pointer<KernelTable>();
  if (std::find(tables.begin(), tables.end(), table) != tables.end()) return;
  tables.push_back(table);
  lists.insert(lists.end(), table->lists, table->lists + table->size);
  // Each table is in the order in which its rows are tried; GPUs first.
  std::stable_sort(lists.begin(), lists.end(), [](const KernelList* a, const KernelList* b) {
    const auto on_gpu = [](const KernelList* list) { return list->size && list->rows[0].arch > 0; };
    return on_gpu(a) && !on_gpu(b);
  });
}

py::dict row_dict(const KernelRow& row) {
  py::dict d;
  d["name"] = row.name;
  d["family"] = row.family;
  d["pass"] = pass_name(row.pass);
  d["arch"] = row.arch;
  d["isa"] = row.isa;
  d["dtype"] = dtype_name(row.dtype);
  d["head_dim"] = row.head_dim;
  d["head_dim_v"] = row.head_dim_v;
  d["score"] = row.score == Score::kPlain ? "plain" : "general";
  d["block_m"] = row.block_m;
  d["block_n"] = row.block_n;
  d["arch_end"] = row.arch_end;
  d["smem_bytes"] = row.smem_bytes;
  return d;
}

py::list rows() {
  py::list all;
  for (const KernelList* list : lists) {
    for (size_t r = 0; r < list->size; ++r)
      all.append(row_dict(list->rows[r]));
  }
  return all;
}

// Reads a description: keys that are absent keep the neutral value, unknown keys are an error.
class Description {
 public:
  explicit Description(const py::dict& dict) : dict_(dict) {}

  template <class T>
  T take(const char* key, T neutral) {
    if (!dict_.contains(key)) return neutral;
    ++taken_;
    return dict_[key].cast<T>();
  }

  void finish() const {
    if (taken_ == dict_.size()) return;
    throw py::value_error("flash_attn: plan() got " + std::to_string(dict_.size() - taken_) +
                          " unknown keys among " + py::str(py::list(dict_)).cast<std::string>());
  }

 private:
  const py::dict& dict_;
  size_t taken_ = 0;
};

DType parse_dtype(const std::string& name) {
  for (DType type : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
    if (name == dtype_name(type)) return type;
  }
  throw py::value_error("flash_attn: dtype must be float16, bfloat16, float32 or float64, got " +
                        name);
}

Pass parse_pass(const std::string& name) {
  for (Pass pass : {Pass::kForward, Pass::kBackward, Pass::kDelta}) {
    if (name == pass_name(pass)) return pass;
  }
  throw py::value_error("flash_attn: pass must be forward, backward or delta, got " + name);
}

// Features are pointers in AttnParams; the planner only asks whether they are null.
template <class T>
T* present(bool yes) {
  static T value{};
  return yes ? &value : nullptr;
}

AttnParams parse_params(Description& d) {
  AttnParams p;
  p.dtype = parse_dtype(d.take<std::string>("dtype", "float32"));
  p.batch = d.take("batch", 1);
  p.seqlen_q = d.take("seqlen_q", 1);
  p.seqlen_k = d.take("seqlen_k", 1);
  p.heads_q = d.take("heads_q", 1);
  p.heads_k = d.take("heads_k", 1);
  p.head_dim = d.take("head_dim", 1);
  p.head_dim_v = d.take("head_dim_v", p.head_dim);
  if (p.heads_k < 1 || p.heads_q % p.heads_k != 0) {
    throw py::value_error("flash_attn: heads_q must be a multiple of heads_k, got " +
                          std::to_string(p.heads_q) + " and " + std::to_string(p.heads_k));
  }
  // Whether keys and values lie as the copy engine reads them: rows of whole 16 bytes, none twice.
  const bool boxes = d.take("boxes", true);
  for (TensorRef* t : {&p.k, &p.v})
    t->batch = t->row = t->head = boxes ? 8 : 1;
  p.pages.page_size = d.take("page_size", 0);
  if (p.pages.page_size > 0) {
    p.pages.table = present<int32_t>(true);
    p.pages.max_pages = ceil_div(p.seqlen_k, p.pages.page_size);
    p.pages.num_pages = p.batch * p.pages.max_pages;
  }
  p.softmax_scale = d.take("softmax_scale", 1.0);
  p.softcap = d.take("softcap", 0.0);
  if (d.take("bias", false)) {
    alignas(16) static const char nothing[16] = {};
    p.bias.ptr = nothing;
    p.bias.dtype = p.dtype;
    // Whether it lies as the copy engine reads it: keys side by side, rows of whole 16 bytes.
    p.bias.col = d.take("bias_boxes", true);
  }
  p.alibi.slopes = present<float>(d.take("alibi", false));
  p.dropout.philox = present<int64_t>(d.take("dropout", false));
  p.sinks.ptr = present<double>(d.take("sinks", false));
  p.mask.window_left = d.take("window_left", kUnlimited);
  p.mask.window_right = d.take("window_right", kUnlimited);
  p.mask.block_q = d.take("block_q", 0);
  p.mask.block_k = d.take("block_k", 0);
  if (p.mask.block_q > 0) p.mask.blocks.index = p.mask.blocks_t.index = present<int32_t>(true);
  // A backward pass as training asks for it: dq, dk and dv.
  p.grad.dq.ptr = p.grad.dk.ptr = p.grad.dv.ptr = present<double>(true);
  return p;
}

DeviceInfo parse_device(Description& d) {
  DeviceInfo device;
  const std::string kind = d.take<std::string>("device", "cpu");
  if (kind != "cpu" && kind != "cuda") {
    throw py::value_error("flash_attn: device must be cpu or cuda, got " + kind);
  }
  d.take("device_index", 0);
  const int threads = d.take("threads", 1);
  device.arch = d.take("arch", 0);
  device.sm_count = d.take("sm_count", 1);
  device.smem_per_block = d.take("smem_per_block", 0);
  device.l2_bytes = d.take("l2_bytes", int64_t{0});
  device.any_speed = d.take("any_speed", false);
  if (kind == "cuda") {
    if (device.arch < 10) {
      throw py::value_error("flash_attn: arch must be the compute capability times 10, got " +
                            std::to_string(device.arch));
    }
    return device;
  }
  device.arch = 0;
  device.sm_count = threads;
  for (const KernelTable* table : tables) {
    if (table->cpu_isa != nullptr) device.isa = table->cpu_isa();
  }
  device.isa = d.take("isa", device.isa);
  return device;
}

py::dict plan(const py::dict& description) {
  Description d(description);
  const Pass pass = parse_pass(d.take<std::string>("pass", "forward"));
  const std::string family = d.take<std::string>("backend", "");
  const AttnParams params = parse_params(d);
  const DeviceInfo device = parse_device(d);
  d.finish();
  const KernelTable table = {lists.data(), lists.size()};
  const Plan made = make_plan(params, pass, device, table, family.c_str());
  py::dict result;
  result["text"] = made.text();
  result["reasons"] = row_reasons(params, pass, device, table, family.c_str());
  result["kernel"] = made.row ? py::object(py::str(made.row->name)) : py::none();
  result["backend"] = made.row ? py::object(py::str(made.row->family)) : py::none();
  result["block_m"] = made.block_m;
  result["block_n"] = made.block_n;
  result["num_splits"] = made.num_splits;
  result["group"] = made.group;
  result["blocks"] = made.blocks;
  result["workers"] = made.workers;
  result["worker_bytes"] = made.worker_bytes;
  result["shared_bytes"] = made.shared_bytes;
  result["workspace_bytes"] = made.workspace_bytes();
  return result;
}

// Compute capability * 10 of the code that the current CUDA device takes; 0 without any.
int cuda_code() {
  for (const KernelTable* table : tables) {
    if (table->cuda_code != nullptr) return table->cuda_code();
  }
  return 0;
}

}  // namespace

PYBIND11_MODULE(_host, m) {
  m.doc() = "Which kernel runs, with which tiles and how many splits: csrc/plan for Python.";
  m.def("register_table", &register_table, py::arg("capsule"),
        "Adds the rows of an op library: its module's `kernel_rows`.");
  m.def("cuda_code", &cuda_code,
        "Compute capability * 10 for which the code that the current CUDA device takes was "
        "compiled; 0 when there is none.");
  m.def("rows", &rows, "All compiled kernels, a dict each, in the order in which they are tried.");
  m.def(
      "plan", &plan, py::arg("description"),
      "The plan of a problem: a dict with the keys pass, backend, device (cpu or cuda), threads or "
      "arch "
      "(compute capability * 10) and sm_count, dtype, batch, seqlen_q, seqlen_k, heads_q, heads_k, "
      "head_dim, head_dim_v, softmax_scale, softcap, bias, bias_boxes, alibi, dropout, sinks, "
      "window_left, "
      "window_right, smem_per_block, "
      "block_q, "
      "block_k. Returns a dict: text, reasons (why no other kernel), kernel, backend, tiles, "
      "splits, "
      "scratch.");
}

}  // namespace flash_attn
