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
#include "combine_tensors/slot_table.h"

namespace apex_npu {

// kLoose: not in its slot, and of no need to be. What that takes depends on what shall be done with it.
enum class GradState : char { kAbsent = 0, kPresent = 1, kForeign = 2, kLoose = 3 };

// What gradients outside of their slots are needed for; the values are those of LooseFor in grad_slots.py.
enum class LooseFor : int { kNothing = 0, kReading = 1, kStepping = 2, kWriting = 3, kWritingParts = 4 };

// Whether a parameter is the only owner of its gradient, so that it may be written: no other tensor shares its memory,
// and no other parameter has the same tensor.
using IsAlone = bool (*)(const at::Tensor& grad);

class PlacedGrads;

class GradSlots {
 public:
  // `shapes` have the slots' sizes, strides and dtype, on any device; `offsets` their first elements.
  GradSlots(const std::vector<at::Tensor>& shapes, std::vector<int64_t> offsets);

  // Records that `views` are in the slots, one in each; one that is found elsewhere later is an ordinary gradient.
  void remember_views(const std::vector<at::Tensor>& views);

  // One GradState for each of `params`, which are those of the slots from `first` on; `views` are those of their slots.
  // A gradient is kLoose to be read where it is on the CPU, has its slot's order of elements, and its dtype or, beside
  // float32, a narrower one; to be stepped where besides it is not the one that was stepped before, and has come to
  // stay; to be written where it has its slot's dtype, and is alone, or, as a part of a larger tensor, whatever else
  // looks at that. Those of fewer elements than `loose_numel` never are.
  std::string states(const Borrowed& params, const Borrowed& views, size_t first, LooseFor loose_for,
                     int64_t loose_numel, IsAlone is_alone) const;

  // The gradients of these parameters, all that there are, as one operand of the kernels, whose first element is that
  // of the slot `first`. Each is present or loose; with `stepped` remembered as such.
  at::Tensor place(const Borrowed& params, size_t first, int64_t numel, bool stepped);

  // Whether a gradient, which is not in slot `i`, may stay where it is; of an order, dtype and memory as above.
  bool is_loose(const at::Tensor& grad, size_t i, LooseFor loose_for, IsAlone is_alone = nullptr) const;

  // Makes those of `grads` foreign that are loose in `states` and overlap another one.
  static void leave_out_overlapping(const Borrowed& grads, std::string& states);

  // The same of gradients, which are loose to be read or undefined.
  at::Tensor place_grads(const Borrowed& grads, size_t first, int64_t numel) const;

  // Whatever is a gradient later is another one.
  void forget_stepped() { stepped_.clear(); }

  // Gives params[i] the gradient of sources[i], which is another, where that is loose to be read, and alone: one
  // memory, until either is written. Returns the indices of those where it is not.
  std::vector<int64_t> share(const Borrowed& sources, const Borrowed& params, int64_t loose_numel,
                             IsAlone is_alone) const;

 private:
  struct Slot {
    int64_t offset, numel;
    c10::DimVector sizes, strides;
    at::ScalarType dtype;
  };

  // Weak, and not an address: that could be another's by the time it is compared. Of a gradient's memory rather than of
  // its tensor, which torch.utils.swap_tensors refuses to swap while there is a weak reference to it.
  using Remembered = c10::weak_intrusive_ptr<c10::StorageImpl>;

  static bool is_readable(const at::Tensor& grad, const Slot& slot);
  bool was_stepped(const at::Tensor& grad, size_t slot) const;
  void place_one(PlacedGrads& placed, const at::Tensor& grad, size_t slot, int64_t begin) const;

  std::vector<Slot> slots_;
  std::optional<SlotTable> places_;  // of the views
  std::vector<Remembered> stepped_;  // none, or one for each
};

}  // namespace apex_npu
