// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "combine_tensors/python_objects.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <unordered_set>

#include "combine_tensors/change_data_ptr.h"
#include "prefetch.h"

namespace apex_npu {

namespace py = pybind11;

// torch calls Tensor's metaclass for instances of subclasses, which takes longer than everything else, and searches the
// bases of Parameter.
static bool is_tensor(PyObject* object) {
  return THPVariable_CheckTypeExact(Py_TYPE(object)) ||
         PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(THPVariableClass)) || THPVariable_Check(object);
}

Borrowed borrow(const py::handle& tensors) {
  // Other sequences create their items on access, and would not keep them alive.
  TORCH_CHECK_TYPE(PyList_Check(tensors.ptr()) || PyTuple_Check(tensors.ptr()), "expected a list or tuple, got ",
                   Py_TYPE(tensors.ptr())->tp_name);
  const auto count = static_cast<size_t>(PySequence_Fast_GET_SIZE(tensors.ptr()));
  Borrowed borrowed;
  constexpr size_t kAhead = 16;
  PyObject* const* items = PySequence_Fast_ITEMS(tensors.ptr());
  borrowed.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) APEX_NPU_PREFETCH(items[i + kAhead]);
    PyObject* item = items[i];
    TORCH_CHECK_TYPE(is_tensor(item), "expected a tensor at index ", i, ", got ", Py_TYPE(item)->tp_name);
    borrowed.push_back(&THPVariable_Unpack(item));
  }
  return borrowed;
}

py::list grads_of(const Borrowed& tensors) {
  py::list grads(tensors.size());
  look_at_each(tensors, prefetch_autograd, [&](size_t i) {
    PyList_SET_ITEM(grads.ptr(), static_cast<Py_ssize_t>(i), THPVariable_Wrap(grad_of(*tensors[i])));
  });
  return grads;
}

bool is_alone(const at::Tensor& grad) {
  if (grad.storage().use_count() > 1 || grad.use_count() > 2) return false;
  if (grad.use_count() == 1) return true;
  // The second reference is that of the Python object, or another one. This makes the object if it does not exist.
  const py::object object = py::reinterpret_steal<py::object>(THPVariable_Wrap(grad));
  return grad.use_count() <= 2;
}

// Returns whether the one storage that `tensors` share has other references.
static bool have_unnamed_aliases(const Borrowed& tensors) {
  std::unordered_set<const c10::TensorImpl*> named;
  for (const at::Tensor* t : tensors) named.insert(t->unsafeGetTensorImpl());
  const c10::Storage& storage = tensors[0]->storage();
  // The Python object of the storage holds one reference. This makes the object if it does not exist.
  const py::object object = py::reinterpret_steal<py::object>(THPStorage_Wrap(storage));
  return storage.use_count() > named.size() + 1;
}

std::vector<int64_t> move_storages(const py::sequence& lists, const at::Tensor& src,
                                   const std::vector<int64_t>& offsets, bool copy_values) {
  std::vector<Borrowed> members;
  for (const py::handle list : lists) members.push_back(borrow(list));
  TORCH_CHECK_VALUE(members.size() == offsets.size(), "move_storages: expected one offset for each of ", members.size(),
                    " lists, got ", offsets.size());
  for (size_t i = 0; i < members.size(); ++i) {
    TORCH_CHECK_VALUE(!members[i].empty(), "move_storages: list ", i, " is empty");
    check_change_data_ptr(*members[i][0], src, offsets[i]);
  }
  std::vector<int64_t> stay;
  for (size_t i = 0; i < members.size(); ++i) {
    // Storage by storage, so that freed memory can be reused.
    if (copy_values) copy_storage(*members[i][0], src, offsets[i]);
    // An unnamed alias may be outside of torch. It cannot follow, and must not be left dangling. Tensor.numpy makes its
    // storage non-resizable.
    const bool keeps = have_unnamed_aliases(members[i]);
    if (keeps && !members[i][0]->storage().resizable()) stay.push_back(static_cast<int64_t>(i));
    change_data_ptr(*members[i][0], src, offsets[i], keeps);
  }
  return stay;
}

bool is_unused(const at::Tensor& listed) {
  const py::object object = py::reinterpret_steal<py::object>(THPVariable_Wrap(listed));
  return Py_REFCNT(object.ptr()) == 2 && listed.use_count() == 1;
}

std::pair<std::vector<int64_t>, std::vector<int64_t>> lost_and_kept(const SlotTable& table, const Borrowed& views,
                                                                    const Borrowed& params) {
  TORCH_CHECK_VALUE(views.size() == params.size() && views.size() == table.size(), "lost_and_kept: expected ",
                    table.size(), " views, one per parameter, got ", views.size(), " and ", params.size());
  std::vector<int64_t> lost, kept;
  look_at_each(views, prefetch_storage, [&](size_t i) {
    if (!table.is_intact(i, *views[i])) {
      lost.push_back(static_cast<int64_t>(i));
    } else if (!is_unused(*views[i]) && !grad_of(*params[i]).is_same(*views[i])) {
      kept.push_back(static_cast<int64_t>(i));
    }
  });
  return {std::move(lost), std::move(kept)};
}

bool are_same(const py::sequence& a, const py::sequence& b) {
  // Lists and tuples themselves, or lists of the items of other sequences.
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

bool has_values(const py::dict& dict, const py::list& values) {
  Py_ssize_t position = 0;
  size_t i = 0;
  for (PyObject* value = nullptr; PyDict_Next(dict.ptr(), &position, nullptr, &value); ++i) {
    if (i == values.size() || PyList_GET_ITEM(values.ptr(), static_cast<Py_ssize_t>(i)) != value) return false;
  }
  return i == values.size();
}

bool hold_values(const py::list& dicts, const py::list& keys, const py::list& values) {
  const size_t count = dicts.size();
  if (keys.size() != count || values.size() != count) {
    throw py::value_error("hold_values: dicts, keys and values must have one length");
  }
  const auto item = [](const py::list& list, size_t i) {
    return PyList_GET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i));
  };
  // As in look_at_each: the dict and then its table of entries are prefetched.
  constexpr size_t kAhead = 24;  // a few of them share each dict
  constexpr size_t kEntriesBytes = 128;
  for (size_t i = 0; i < count; ++i) {
    if (i + 2 * kAhead < count) prefetch_bytes(item(dicts, i + 2 * kAhead), sizeof(PyDictObject));
    if (i + kAhead < count && PyDict_Check(item(dicts, i + kAhead))) {
      prefetch_bytes(reinterpret_cast<PyDictObject*>(item(dicts, i + kAhead))->ma_keys, kEntriesBytes);
    }
    if (!PyDict_Check(item(dicts, i))) throw py::type_error("hold_values: expected dicts");
    PyObject* found = PyDict_GetItemWithError(item(dicts, i), item(keys, i));
    if (found == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
    if (found != item(values, i)) return false;
  }
  return true;
}

}  // namespace apex_npu
