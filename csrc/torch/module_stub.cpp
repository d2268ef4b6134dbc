// SPDX-License-Identifier: BSD-3-Clause
// The Python module of an op library. Importing it runs the static registrations of the operators;
// the module itself holds one thing, `kernel_rows`, a capsule with the library's kernel table,
// which the planner's module (flash_attn._host) reads. Limited C API, so one binary serves every
// CPython >= 3.10. FA_INIT (PyInit__C_cpu or PyInit__C_cuda) and FA_KERNEL_TABLE (kCpuTable or
// kCudaTable) come from the build.
#include <Python.h>

#include "plan/kernel_list.h"

static int add_kernel_rows(PyObject* module) {
  void* table = const_cast<flash_attn::KernelTable*>(&flash_attn::FA_KERNEL_TABLE);
  PyObject* capsule = PyCapsule_New(table, flash_attn::kKernelTableCapsule, nullptr);
  if (capsule == nullptr) return -1;
  const int failed = PyModule_AddObjectRef(module, "kernel_rows", capsule);
  Py_DECREF(capsule);
  return failed;
}

static PyModuleDef_Slot kSlots[] = {{Py_mod_exec, reinterpret_cast<void*>(add_kernel_rows)},
                                    {0, nullptr}};

static PyModuleDef kModule = {
    PyModuleDef_HEAD_INIT, "flash_attn", nullptr, 0, nullptr, kSlots, nullptr, nullptr, nullptr};

PyMODINIT_FUNC FA_INIT(void) {
  return PyModuleDef_Init(&kModule);
}
