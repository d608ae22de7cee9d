// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Finds the places of many parameters' gradients: none, their slots of a flat buffer, or where autograd left them.
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

// The place of a gradient. The names and values are those of grad_slots.py.
enum class GradState : char { NONE = 0, IN_BUFFER = 1, ELSEWHERE = 2 };

// The access to ELSEWHERE gradients. The names and values are those of InPlace in grad_slots.py.
enum class InPlace : int { NO = 0, READ = 1, WRITE = 2 };

struct GradStates {
  std::string states;              // one GradState for each parameter
  std::vector<int64_t> to_gather;  // the slots of ELSEWHERE gradients that cannot stay there
};

// The places of gradients for a kernel on another device than the CPU.
struct GradAddresses {
  std::string states;                   // one GradState for each parameter
  std::vector<int64_t> others;          // the slots of ELSEWHERE gradients without an address
  std::optional<at::ScalarType> dtype;  // of all gradients with an address
  bool views_are_free;                  // the views of all ELSEWHERE slots may become gradients
};

class GradSlots {
 public:
  // `shapes` have the slots' sizes, strides and dtype, on any device; `offsets` are their first elements. Kernels read
  // gradients on `device` in place; without a device no gradient can stay ELSEWHERE.
  GradSlots(const std::vector<at::Tensor>& shapes, std::vector<int64_t> offsets, std::optional<c10::Device> device);

  // Records `views`, one for each slot. A view that leaves its slot later is an ordinary gradient.
  void remember_views(const std::vector<at::Tensor>& views);

  // Returns the states of `params`, whose slots begin with number `first` and have these `views`. A gradient can stay
  // ELSEWHERE to be read if it is on `device`, and has its slot's order of elements and its dtype (for a float32 slot
  // also a narrower one). It can stay to be written if it has its slot's dtype and is alone. Gradients of fewer
  // elements than `least_numel` cannot stay. With `share_memory` gradients need not be alone, and stay to be written if
  // no two of them overlap.
  GradStates states(const Borrowed& params, const Borrowed& views, size_t first, InPlace in_place, int64_t least_numel,
                    bool share_memory) const;

  // Returns the existing gradients of these parameters as one operand of the kernels. It begins with the slot `first`.
  at::Tensor grad_list(const Borrowed& params, size_t first, int64_t numel, bool writable);

  // Multiplies the gradients of `params`, one for each slot, by `factor`. Gradients that are IN_BUFFER, or can stay
  // ELSEWHERE to be written, are multiplied in place. Others are multiplied while they are copied into their slots,
  // whose `views` become the gradients. found_inf (float32, one element), if given, becomes 1 if an element is inf or
  // nan. Returns false, with nothing written, if a gradient supports neither, or if a view is in use.
  bool unscale(const Borrowed& params, const Borrowed& views, double factor, const std::optional<at::Tensor>& found_inf,
               int64_t least_numel) const;

  // Finds the gradients of `params`, whose slots in the buffer `flat` begin with number `first`. If a gradient has its
  // slot's order of elements and is not in the buffer, addresses[slot] (int64, one for each slot, on the host) becomes
  // the address of the buffer if the gradient were in its slot; else 0. With `chosen`, slots that are not among these
  // are NONE.
  GradAddresses addresses(const Borrowed& params, const Borrowed& views, size_t first,
                          const std::optional<std::vector<int64_t>>& chosen, const at::Tensor& flat,
                          const at::Tensor& addresses) const;

  // Takes the memory of `flat`, which contains the remembered views. Only the tensors in slots own it then.
  void let_go(const at::Tensor& flat) { lent_.emplace(flat); }

  // The inverse: gives `flat` its memory back, and returns a view for each slot: the gradient of the slot's parameter,
  // or a new view. Returns nullopt, and gives up the memory, if it has been freed or slots have other tensors.
  std::optional<std::vector<at::Tensor>> take_up(const Borrowed& params, const at::Tensor& flat);

 private:
  struct Slot {
    int64_t offset, numel;
    c10::DimVector sizes, strides;
    at::ScalarType dtype;
  };

  // Returns whether a gradient in the slot may have the dtype: that of the slot, or for float32 also a narrower one.
  static bool may_be_of(at::ScalarType dtype, const Slot& slot);
  static bool has_order(const at::Tensor& grad, const Slot& slot);
  // Returns whether a gradient that is not in slot `i` can stay ELSEWHERE to be read, or written. Does not check
  // whether it is alone.
  bool can_stay(const at::Tensor& grad, size_t i, InPlace in_place) const;
  bool is_readable(const at::Tensor& grad, const Slot& slot) const;

  std::vector<Slot> slots_;
  std::optional<c10::Device> device_;
  std::optional<SlotTable> places_;  // of the views
  std::optional<LentMemory> lent_;
};

}  // namespace apex_npu
