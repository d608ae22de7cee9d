// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "combine_tensors/python_dicts.h"

#include "prefetch.h"

namespace apex_npu {

namespace py = pybind11;

bool hold_values(const py::list& dicts, const py::list& keys, const py::list& values) {
  const size_t count = dicts.size();
  if (keys.size() != count || values.size() != count) {
    throw py::value_error("hold_values: dicts, keys and values must have one length");
  }
  const auto item = [](const py::list& list, size_t i) {
    return PyList_GET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i));
  };
  // As in look_at_each: the dict, then what it keeps its entries in, are fetched before they are needed.
  constexpr size_t kAhead = 8;
  for (size_t i = 0; i < count; ++i) {
    if (i + 2 * kAhead < count) APEX_NPU_PREFETCH(item(dicts, i + 2 * kAhead));
    if (i + kAhead < count && PyDict_Check(item(dicts, i + kAhead))) {
      APEX_NPU_PREFETCH(reinterpret_cast<PyDictObject*>(item(dicts, i + kAhead))->ma_keys);
    }
    if (!PyDict_Check(item(dicts, i))) throw py::type_error("hold_values: expected dicts");
    PyObject* found = PyDict_GetItemWithError(item(dicts, i), item(keys, i));
    if (found == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
    if (found != item(values, i)) return false;
  }
  return true;
}

}  // namespace apex_npu
