// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "data_parallel/shards.h"

#include <structmember.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <utility>

#include "combine_tensors/python_objects.h"

namespace apex_npu {

namespace py = pybind11;

namespace {

constexpr size_t kObjectBytes = 64;

// Releases of torch have one of two names. Null if neither exists, which only costs time.
template <typename Slot>
auto object_in(const Slot& slot, int) -> decltype(slot.load_pyobj()) {
  return slot.load_pyobj();
}
template <typename Slot>
auto object_in(const Slot& slot, int64_t) -> decltype(slot._unchecked_untagged_pyobj()) {
  return slot._unchecked_untagged_pyobj();
}
template <typename Slot>
PyObject* object_in(const Slot&, ...) {
  return nullptr;
}

bool are_cut_alike(PyObject* a, PyObject* b) {
  if (a == nullptr || b == nullptr || a == b) return a == b;
  const py::object left = py::handle(a).attr("placements"), right = py::handle(b).attr("placements");
  return left.is(right) || left.equal(right);
}

PyObject* item(const py::list& list, size_t i) { return PyList_GET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i)); }

// Returns the Python object of each tensor's gradient; null without a gradient.
std::vector<py::object> objects_of_grads(const Borrowed& tensors) {
  std::vector<const at::Tensor*> grads(tensors.size());
  look_at_each(tensors, prefetch_autograd, [&](size_t i) { grads[i] = &tensors[i]->grad(); }, kPointersBytes);
  std::vector<py::object> objects(tensors.size());
  for (size_t i = 0; i < grads.size(); ++i) {
    if (i + 2 * kAhead < grads.size()) prefetch_impl(*grads[i + 2 * kAhead], kPointersBytes);
    if (i + kAhead < grads.size() && grads[i + kAhead]->defined()) {
      APEX_NPU_PREFETCH(object_in(*grads[i + kAhead]->unsafeGetTensorImpl()->pyobj_slot(), 0));
    }
    if (!grads[i]->defined()) continue;
    // torch's function, which makes missing objects, takes longer than everything else.
    PyObject* object = object_in(*grads[i]->unsafeGetTensorImpl()->pyobj_slot(), 0);
    objects[i] = object != nullptr ? py::reinterpret_borrow<py::object>(object)
                                   : py::reinterpret_steal<py::object>(THPVariable_Wrap(*grads[i]));
  }
  return objects;
}

// Returns whether two of `grads` overlap. Each of them fills its memory.
bool overlap(const Borrowed& grads) {
  std::vector<std::pair<const char*, const char*>> ranges;
  ranges.reserve(grads.size());
  look_at_each(grads, prefetch_storage, [&](size_t i) {
    const at::Tensor& grad = *grads[i];
    if (grad.numel() == 0) return;
    const auto item_size = static_cast<int64_t>(grad.itemsize());
    const char* begin = static_cast<const char*>(grad.storage().data()) + grad.storage_offset() * item_size;
    ranges.emplace_back(begin, begin + grad.numel() * item_size);
  });
  if (!std::is_sorted(ranges.begin(), ranges.end())) std::sort(ranges.begin(), ranges.end());
  const auto overlaps_next = [](const auto& range, const auto& next) { return next.first < range.second; };
  return std::adjacent_find(ranges.begin(), ranges.end(), overlaps_next) != ranges.end();
}

}  // namespace

ObjectSlot::ObjectSlot(const py::type& cls, const char* name) : descriptor_(cls.attr(name)) {
  const auto* descriptor = reinterpret_cast<PyMemberDescrObject*>(descriptor_.ptr());
  TORCH_CHECK_TYPE(Py_TYPE(descriptor_.ptr()) == &PyMemberDescr_Type && descriptor->d_member->type == T_OBJECT_EX, name,
                   " must be one of the __slots__ of the class");
  offset_ = descriptor->d_member->offset;
}

void ObjectSlot::set(PyObject* object, PyObject* value) const {
  if (Py_TYPE(descriptor_.ptr())->tp_descr_set(descriptor_.ptr(), object, value) < 0) throw py::error_already_set();
}

Shards::Shards(const py::type& cls, py::list full_params, py::list parts)
    : cls_(cls),
      full_params_(std::move(full_params)),
      parts_(std::move(parts)),
      local_tensor_(cls, "_local_tensor"),
      spec_(cls, "_spec") {
  TORCH_CHECK_VALUE(full_params_.size() == parts_.size(), "Shards: expected one part for each parameter");
  for (size_t i = 0; i < full_params_.size(); ++i) {
    TORCH_CHECK_TYPE(PyObject_TypeCheck(item(full_params_, i), reinterpret_cast<PyTypeObject*>(cls_.ptr())),
                     "Shards: parameter ", i, " is no instance of the class");
  }
}

bool Shards::have_parts() const {
  for (size_t i = 0; i < full_params_.size(); ++i) {
    if (i + 2 * kAhead < full_params_.size()) prefetch_bytes(item(full_params_, i + 2 * kAhead), kObjectBytes);
    if (local_tensor_(item(full_params_, i)) != item(parts_, i)) return false;
  }
  return true;
}

template <typename Look, typename LookAtOther>
void Shards::look_inside(const Look& look, const LookAtOther& look_at_other) const {
  const std::vector<py::object> grads = objects_of_grads(borrow(full_params_));
  std::vector<PyObject*> inside(grads.size());
  for (size_t i = 0; i < grads.size(); ++i) {
    if (i + kAhead < grads.size() && grads[i + kAhead]) prefetch_bytes(grads[i + kAhead].ptr(), kObjectBytes);
    PyObject* grad = grads[i].ptr();
    if (grad == nullptr || !PyObject_TypeCheck(grad, reinterpret_cast<PyTypeObject*>(cls_.ptr()))) continue;
    PyObject* local = local_tensor_(grad);
    if (local == nullptr) continue;
    APEX_NPU_PREFETCH(local);
    if (are_cut_alike(spec_(grad), spec_(item(full_params_, i)))) inside[i] = local;
  }
  const auto impl_inside = [&](size_t i) -> const c10::TensorImpl* {
    const bool is_plain = i < grads.size() && inside[i] != nullptr && THPVariable_CheckExact(inside[i]);
    return is_plain ? THPVariable_Unpack(inside[i]).unsafeGetTensorImpl() : nullptr;
  };
  for (size_t i = 0; i < grads.size(); ++i) {
    if (const auto* impl = impl_inside(i + kAhead)) prefetch_bytes(impl, sizeof(*impl));
    if (const auto* impl = impl_inside(i + kAhead / 2)) prefetch_storage(*impl);
    if (!grads[i]) {
      look(i, nullptr);
    } else if (inside[i] != nullptr && THPVariable_CheckExact(inside[i])) {
      look(i, inside[i]);
    } else {
      look_at_other(i);
    }
  }
}

std::optional<std::string> Shards::hold_grads(const GradSlots& slots, InPlace in_place) {
  std::string states(full_params_.size(), static_cast<char>(GradState::NONE));
  std::vector<py::object> held(full_params_.size());
  Borrowed grads;
  grads.reserve(full_params_.size());
  bool all_stay = true;
  look_inside(
      [&](size_t i, PyObject* grad) {
        if (grad == nullptr || !all_stay) return;
        grads.push_back(&THPVariable_Unpack(grad));
        all_stay = slots.can_stay(*grads.back(), i, in_place);
        states[i] = static_cast<char>(GradState::ELSEWHERE);
        held[i] = py::reinterpret_borrow<py::object>(grad);
      },
      [&](size_t) { all_stay = false; });
  if (!all_stay || (in_place == InPlace::WRITE && overlap(grads))) return std::nullopt;
  held_ = std::move(held);
  writable_ = in_place == InPlace::WRITE;
  return states;
}

at::Tensor Shards::grad_list(const GradSlots& slots, size_t first, size_t count, int64_t numel) const {
  TORCH_CHECK_VALUE(first + count <= held_.size(), "grad_list: gradients ", first, " to ", first + count,
                    " have to be held before");
  const at::Tensor none;
  Borrowed grads(count);
  for (size_t i = 0; i < count; ++i) {
    const py::object& grad = held_[first + i];
    grads[i] = grad ? &THPVariable_Unpack(grad.ptr()) : &none;
  }
  return slots.list_of(grads, first, numel, writable_);
}

std::vector<int64_t> Shards::bring_grads() {
  held_.clear();
  const Borrowed parts = borrow(parts_);
  std::vector<int64_t> others;
  look_inside(
      [&](size_t i, PyObject* grad) {
        at::Tensor& brought = parts[i]->mutable_grad();
        if (grad == nullptr) {
          brought.reset();
        } else if (!brought.is_same(THPVariable_Unpack(grad))) {
          brought = THPVariable_Unpack(grad);
        }
      },
      [&](size_t i) {
        parts[i]->mutable_grad().reset();
        others.push_back(static_cast<int64_t>(i));
      });
  return others;
}

void Shards::return_grads() const {
  const std::vector<py::object> grads = objects_of_grads(borrow(full_params_));
  look_at_grads(borrow(parts_), [&](const at::Tensor& grad, size_t i) {
    if (!grad.defined() || !grads[i]) return;
    const py::object now = py::reinterpret_steal<py::object>(THPVariable_Wrap(grad));
    if (local_tensor_(grads[i].ptr()) != now.ptr()) local_tensor_.set(grads[i].ptr(), now.ptr());
  });
}

void Shards::drop_grads(bool stepped) {
  std::vector<py::object> held = std::exchange(held_, {});
  Borrowed written;
  std::vector<at::Tensor> brought;
  if (!held.empty()) {
    const Borrowed params = stepped ? borrow(full_params_) : Borrowed();
    for (size_t i = 0; i < params.size(); ++i) {
      if (held[i]) written.push_back(params[i]);
    }
  } else {
    const Borrowed params = borrow(full_params_), parts = borrow(parts_);
    look_at_grads(parts, [&](const at::Tensor& grad, size_t i) {
      if (!grad.defined()) return;
      brought.push_back(std::move(parts[i]->mutable_grad()));
      if (stepped) written.push_back(params[i]);
    });
  }
  increment_versions(written);
  for (size_t i = 0; i < held.size(); ++i) {
    if (i + 2 * kAhead < held.size()) APEX_NPU_PREFETCH(held[i + 2 * kAhead].ptr());
    held[i] = py::object();
  }
}

}  // namespace apex_npu
