// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The places of many parameters' gradients: none, their slots of a flat buffer, or where autograd left them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/DimVector.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "combine_tensors/borrowed.h"
#include "combine_tensors/change_data_ptr.h"
#include "combine_tensors/slot_table.h"

namespace apex_npu {

// Where a gradient is; the names and values are those of grad_slots.py.
enum class GradState : char { NONE = 0, IN_BUFFER = 1, ELSEWHERE = 2 };

// What is done with gradients that are ELSEWHERE; the names and values are those of InPlace in grad_slots.py.
enum class InPlace : int { NO = 0, READ = 1, WRITE = 2 };

struct GradStates {
  std::string states;              // one GradState for each parameter
  std::vector<int64_t> to_gather;  // the slots of those that are ELSEWHERE and cannot stay there
};

// Whether a parameter is the only owner of its gradient, so that it may be written: no other tensor shares its memory,
// and no other parameter has the same tensor.
using IsAlone = bool (*)(const at::Tensor& grad);

class GradList;

// Where a kernel on another device than the CPU finds gradients.
struct GradAddresses {
  std::string states;                   // one GradState for each parameter: of its source's gradient
  std::vector<int64_t> others;          // the slots of those that are ELSEWHERE and have no address
  std::optional<at::ScalarType> dtype;  // of all that have one
  bool views_are_free;                  // the views of all that are ELSEWHERE may become gradients
};

class GradSlots {
 public:
  // `shapes` have the slots' sizes, strides and dtype, on any device; `offsets` their first elements. Kernels read
  // gradients of `device` where they are; without one none can stay ELSEWHERE.
  GradSlots(const std::vector<at::Tensor>& shapes, std::vector<int64_t> offsets, std::optional<c10::Device> device);

  // Records that `views` are in the slots, one in each; one that is found elsewhere later is an ordinary gradient.
  void remember_views(const std::vector<at::Tensor>& views);

  // The states of `params`, which are those of the slots from `first` on; `views` are those of their slots. A gradient
  // can stay ELSEWHERE to be read where it is on `device`, has its slot's order of elements, and its dtype or, beside
  // float32, a narrower one, and is not the one that was stepped before; to be written where it has its slot's dtype,
  // and is alone. Those of fewer elements than `least_numel` never can.
  GradStates states(const Borrowed& params, const Borrowed& views, size_t first, InPlace in_place, int64_t least_numel,
                    IsAlone is_alone) const;

  // The gradients of these parameters, all that there are, as one operand of the kernels, whose first element is that
  // of the slot `first`; with `stepped` remembered as such, and only to be read.
  at::Tensor grad_list(const Borrowed& params, size_t first, int64_t numel, bool stepped);

  // Multiplies the gradients of `params`, of which there is one for each slot, by `factor`: in place those IN_BUFFER
  // and those that can stay ELSEWHERE to be written, as for `states`; the others on their way into their slots, whose
  // `views` become the gradients. found_inf (float32, one element), if given, becomes 1 where an element is inf or nan.
  // False, with nothing written, where a gradient is in none of these ways, or a view is not `is_unused`.
  bool unscale(const Borrowed& params, const Borrowed& views, double factor, const std::optional<at::Tensor>& found_inf,
               int64_t least_numel, IsAlone is_alone, IsAlone is_unused) const;

  // Where the gradients of `sources` are, which have the slots from `first` on of the buffer `flat`; what they are made
  // for are `params`: themselves, or their masters. Of each that has its slot's order of elements, and is not in the
  // buffer, addresses[slot] (int64, one for each slot, on the host) becomes the address that the buffer would begin at
  // if the gradient were in its slot; of all others 0. With `chosen` the slots that are not among these are NONE.
  GradAddresses addresses(const Borrowed& sources, const Borrowed& params, const Borrowed& views, size_t first,
                          const std::optional<std::vector<int64_t>>& chosen, const at::Tensor& flat,
                          const at::Tensor& addresses, IsAlone is_unused) const;

  // Whether a gradient that is not in slot `i` can stay ELSEWHERE to be read, or written, whatever else has it, and
  // whether or not it has been stepped before.
  bool can_stay(const at::Tensor& grad, size_t i, InPlace in_place) const;

  // The same as grad_list of gradients themselves: those that can_stay there, to be written where `writable`, or
  // undefined ones.
  at::Tensor list_of(const Borrowed& grads, size_t first, int64_t numel, bool writable) const;

  // Whatever is a gradient later is another one.
  void forget_stepped() { stepped_.clear(); }

  // Leaves `flat`, in which the views are that have been remembered, without memory: whatever is in slots owns it.
  void let_go(const at::Tensor& flat) { lent_.emplace(flat); }

  // The other way: `flat` has its memory, and there is a view for each slot: the gradient of its one of `params`, or a
  // new one. Nothing, for good, where it is free, or something else than these gradients is in a slot.
  std::optional<std::vector<at::Tensor>> take_up(const Borrowed& params, const at::Tensor& flat);

  // Views of `flat`, which is of any dtype, where the slots are in it; each has a version counter of its own.
  std::vector<at::Tensor> views_in(const at::Tensor& flat) const;

  // The states of `params`, one for each slot, where all gradients that are there are views of one tensor with
  // `total_numel` elements of 16 bits, as `views_in` makes them: all ELSEWHERE.
  std::optional<std::string> packed_states(const Borrowed& params, int64_t total_numel) const;

 private:
  struct Slot {
    int64_t offset, numel;
    c10::DimVector sizes, strides;
    at::ScalarType dtype;
  };

  // Weak, and not an address: that could be another's by the time it is compared. Of a gradient's memory rather than of
  // its tensor, which torch.utils.swap_tensors refuses to swap while there is a weak reference to it.
  using Remembered = c10::weak_intrusive_ptr<c10::StorageImpl>;

  // Whether a parameter's gradient may have the dtype: its own, or beside float32 a narrower one.
  static bool may_be_of(at::ScalarType dtype, const Slot& slot);
  static bool has_order(const at::Tensor& grad, const Slot& slot);
  bool is_readable(const at::Tensor& grad, const Slot& slot) const;
  bool was_stepped(const at::Tensor& grad, size_t slot) const;
  void add_to(GradList& grads, const at::Tensor& grad, size_t slot, size_t first) const;

  std::vector<Slot> slots_;
  std::optional<c10::Device> device_;
  std::optional<SlotTable> places_;  // of the views
  std::vector<Remembered> stepped_;  // none, or one for each
  std::optional<LentMemory> lent_;
};

}  // namespace apex_npu
