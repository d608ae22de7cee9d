// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "combine_tensors/shards.h"

#include <torch/csrc/autograd/python_variable.h>

#include <utility>

#include "combine_tensors/python_objects.h"

namespace apex_npu {

namespace py = pybind11;

namespace {

py::object slot_of(const py::object& descriptor, PyObject* object) {
  PyObject* found = Py_TYPE(descriptor.ptr())
                        ->tp_descr_get(descriptor.ptr(), object, reinterpret_cast<PyObject*>(Py_TYPE(object)));
  if (found == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(found);
}

bool are_cut_alike(const py::object& a, const py::object& b) {
  if (a.is(b)) return true;
  const py::object left = a.attr("placements"), right = b.attr("placements");
  return left.is(right) || left.equal(right);
}

PyObject* item(const py::list& list, size_t i) { return PyList_GET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i)); }

// The object of each tensor's gradient in Python, which is there already; null where it has none.
std::vector<py::object> objects_of_grads(const Borrowed& tensors) {
  std::vector<py::object> objects(tensors.size());
  look_at_grads(tensors, [&](const at::Tensor& grad, size_t i) {
    if (grad.defined()) objects[i] = py::reinterpret_steal<py::object>(THPVariable_Wrap(grad));
  });
  return objects;
}

}  // namespace

Shards::Shards(const py::type& cls, py::list owners, py::list parts)
    : cls_(cls),
      owners_(std::move(owners)),
      parts_(std::move(parts)),
      local_tensor_(cls.attr("_local_tensor")),
      spec_(cls.attr("_spec")) {
  TORCH_CHECK_VALUE(owners_.size() == parts_.size(), "Shards: expected one part for each owner");
  TORCH_CHECK_TYPE(Py_TYPE(local_tensor_.ptr())->tp_descr_set != nullptr && Py_TYPE(spec_.ptr())->tp_descr_get,
                   "Shards: _local_tensor and _spec must be slots of the class");
  for (size_t i = 0; i < owners_.size(); ++i) {
    TORCH_CHECK_TYPE(PyObject_TypeCheck(item(owners_, i), reinterpret_cast<PyTypeObject*>(cls_.ptr())),
                     "Shards: owner ", i, " is no instance of the class");
  }
}

bool Shards::have_parts() const {
  constexpr size_t kAhead = 16;
  for (size_t i = 0; i < owners_.size(); ++i) {
    if (i + kAhead < owners_.size()) prefetch_bytes(item(owners_, i + kAhead), 128);
    if (slot_of(local_tensor_, item(owners_, i)).ptr() != item(parts_, i)) return false;
  }
  return true;
}

std::vector<int64_t> Shards::bring_grads() const {
  const Borrowed owners = borrow(owners_), parts = borrow(parts_);
  const std::vector<py::object> grads = objects_of_grads(owners);
  std::vector<int64_t> others;
  look_at_each(parts, prefetch_autograd, [&](size_t i) {
    if (i + kAhead < grads.size() && grads[i + kAhead]) prefetch_bytes(grads[i + kAhead].ptr(), 128);
    at::Tensor& brought = parts[i]->mutable_grad();
    PyObject* grad = grads[i].ptr();
    if (grad == nullptr) {
      if (brought.defined()) brought.reset();
      return;
    }
    if (PyObject_TypeCheck(grad, reinterpret_cast<PyTypeObject*>(cls_.ptr())) &&
        are_cut_alike(slot_of(spec_, grad), slot_of(spec_, item(owners_, i)))) {
      const py::object local = slot_of(local_tensor_, grad);
      if (THPVariable_Check(local.ptr())) {
        const at::Tensor& inside = THPVariable_Unpack(local.ptr());
        if (!inside.unsafeGetTensorImpl()->is_python_dispatch()) {
          if (!brought.is_same(inside)) brought = inside;
          return;
        }
      }
    }
    brought.reset();
    others.push_back(static_cast<int64_t>(i));
  });
  return others;
}

void Shards::return_grads() const {
  const Borrowed owners = borrow(owners_), parts = borrow(parts_);
  const std::vector<py::object> grads = objects_of_grads(owners);
  look_at_grads(parts, [&](const at::Tensor& grad, size_t i) {
    if (!grad.defined() || !grads[i]) return;
    const py::object now = py::reinterpret_steal<py::object>(THPVariable_Wrap(grad));
    if (slot_of(local_tensor_, grads[i].ptr()).is(now)) return;
    if (Py_TYPE(local_tensor_.ptr())->tp_descr_set(local_tensor_.ptr(), grads[i].ptr(), now.ptr()) < 0) {
      throw py::error_already_set();
    }
  });
}

void Shards::drop_grads(bool stepped) const {
  const Borrowed owners = borrow(owners_), parts = borrow(parts_);
  std::vector<at::Tensor> dropped;
  dropped.reserve(parts.size());
  look_at_grads(parts, [&](const at::Tensor& grad, size_t i) {
    if (stepped && i + 2 * kAhead < owners.size()) prefetch_impl(*owners[i + 2 * kAhead]);
    if (!grad.defined()) return;
    dropped.push_back(std::move(parts[i]->mutable_grad()));
    if (!stepped) return;
    c10::TensorImpl* impl = owners[i]->unsafeGetTensorImpl();
    if (!impl->is_inference()) impl->bump_version();
  });
}

}  // namespace apex_npu
