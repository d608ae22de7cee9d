// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "combine_tensors/python_objects.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

#include "prefetch.h"

namespace apex_npu {

namespace py = pybind11;

Borrowed borrow(const py::sequence& tensors) {
  // Other sequences create their items on access, and nothing would keep these alive.
  TORCH_CHECK_TYPE(PyList_Check(tensors.ptr()) || PyTuple_Check(tensors.ptr()), "expected a list or tuple, got ",
                   Py_TYPE(tensors.ptr())->tp_name);
  Borrowed borrowed;
  constexpr Py_ssize_t kAhead = 16;
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(tensors.ptr());
  PyObject* const* items = PySequence_Fast_ITEMS(tensors.ptr());
  borrowed.reserve(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (i + kAhead < count) APEX_NPU_PREFETCH(items[i + kAhead]);
    PyObject* item = items[i];
    TORCH_CHECK_TYPE(THPVariable_Check(item), "expected a tensor at index ", i, ", got ", Py_TYPE(item)->tp_name);
    borrowed.push_back(&THPVariable_Unpack(item));
  }
  return borrowed;
}

py::list grads_of(const Borrowed& tensors) {
  py::list grads(tensors.size());
  look_at_each(tensors, prefetch_autograd, [&](size_t i) {
    PyList_SET_ITEM(grads.ptr(), static_cast<Py_ssize_t>(i), THPVariable_Wrap(tensors[i]->grad()));
  });
  return grads;
}

py::list versions_of(const py::list& tensors) {
  constexpr size_t kAhead = 16;
  py::list versions(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (i + kAhead < tensors.size()) {
      APEX_NPU_PREFETCH(PyList_GET_ITEM(tensors.ptr(), static_cast<Py_ssize_t>(i + kAhead)));
    }
    PyObject* item = PyList_GET_ITEM(tensors.ptr(), static_cast<Py_ssize_t>(i));
    TORCH_CHECK_TYPE(item == Py_None || THPVariable_Check(item), "expected a tensor or None at index ", i);
    const int64_t version = item == Py_None ? 0 : THPVariable_Unpack(item)._version();
    PyList_SET_ITEM(versions.ptr(), static_cast<Py_ssize_t>(i), PyLong_FromLongLong(version));
  }
  return versions;
}

bool is_alone(const at::Tensor& grad) {
  if (grad.storage().use_count() > 1 || grad.use_count() > 2) return false;
  if (grad.use_count() == 1) return true;
  // Held by the parameter and either by its object in Python, which is made here unless it is there, or by another.
  const py::object object = py::reinterpret_steal<py::object>(THPVariable_Wrap(grad));
  return grad.use_count() <= 2;
}

bool is_unused(const at::Tensor& listed) {
  const py::object object = py::reinterpret_steal<py::object>(THPVariable_Wrap(listed));
  return Py_REFCNT(object.ptr()) == 2 && listed.use_count() == 1;
}

std::vector<int64_t> kept_grads(const Borrowed& views, const Borrowed& params) {
  TORCH_CHECK_VALUE(views.size() == params.size(), "kept_grads: expected one view per parameter, got ", views.size(),
                    " and ", params.size());
  std::vector<int64_t> indices;
  look_at_grads(params, [&](const at::Tensor& grad, size_t i) {
    if (!is_unused(*views[i]) && !grad.is_same(*views[i])) indices.push_back(static_cast<int64_t>(i));
  });
  return indices;
}

bool are_same(const py::sequence& a, const py::sequence& b) {
  // Themselves, or lists of what other sequences have.
  const auto listed = [](const py::sequence& sequence) {
    PyObject* list = PySequence_Fast(sequence.ptr(), "expected a sequence");
    if (list == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(list);
  };
  const py::object left = listed(a), right = listed(b);
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(left.ptr());
  PyObject* const* items = PySequence_Fast_ITEMS(left.ptr());
  return count == PySequence_Fast_GET_SIZE(right.ptr()) &&
         std::equal(items, items + count, PySequence_Fast_ITEMS(right.ptr()));
}

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
