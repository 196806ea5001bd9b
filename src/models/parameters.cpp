#include "models/parameters.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "headrace/error.h"

namespace headrace {
namespace {

// Groups start at 128 bytes of bfloat16, 256 of float32: whole cache lines and 16-byte loads.
constexpr int64_t kGroupAlignment = 64;

}  // namespace

int64_t ParameterInfo::numel() const {
  int64_t product = 1;
  for (const int64_t size : shape) product *= size;
  return product;
}

void ParameterLayout::add_group(std::vector<ParameterInfo> group) {
  size_ = (size_ + kGroupAlignment - 1) / kGroupAlignment * kGroupAlignment;
  for (ParameterInfo& info : group) {
    check_argument(index_.emplace(info.name, entries_.size()).second, "parameter {} was added twice", info.name);
    info.offset = size_;
    size_ += info.numel();
    entries_.push_back(std::move(info));
  }
}

const ParameterInfo& ParameterLayout::find(const std::string& name) const {
  const auto found = index_.find(name);
  check_argument(found != index_.end(), "the model has no parameter {}", name);
  return entries_[found->second];
}

int64_t ParameterLayout::num_parameters() const {
  int64_t total = 0;
  for (const ParameterInfo& info : entries_) total += info.numel();
  return total;
}

Parameters::Parameters(ParameterLayout layout, at::ScalarType dtype, at::Device device)
    : layout_(std::move(layout)), flat_(at::zeros({layout_.size()}, at::TensorOptions().dtype(dtype).device(device))) {}

Parameters::OpenGradients Parameters::open_gradients(FlatRange range) {
  for (const FlatBuffer& open : gradients_) {
    if (open.range() == range) return {open, false};
    check_argument(range.end <= open.begin || open.range().end <= range.begin, "gradients [{}, {}) overlap the open [{}, {})",
                   range.begin, range.end, open.begin, open.range().end);
  }
  const FlatBuffer& buffer = gradients_.emplace_back(at::empty({range.size()}, flat_.options()), range.begin);
  // Whole stretches between the gradients that are stored, gaps included.
  int64_t begin = range.begin;
  const auto zero_until = [&](int64_t end) {
    if (end > begin) buffer.elements.narrow(0, begin - range.begin, end - begin).zero_();
  };
  for (const ParameterInfo& info : layout_.entries()) {
    if (!info.stored_first || info.offset < range.begin || info.offset >= range.end) continue;
    zero_until(info.offset);
    begin = info.offset + info.numel();
  }
  zero_until(range.end);
  return {buffer, true};
}

void Parameters::release_gradients(FlatRange range) {
  std::erase_if(gradients_, [&](const FlatBuffer& open) { return open.range() == range; });
}

at::Tensor Parameters::grad(const std::string& name) const {
  const int64_t offset = layout_.find(name).offset;
  for (const FlatBuffer& open : gradients_) {
    if (open.begin <= offset && offset < open.range().end) return view(open, name);
  }
  return {};
}

at::Tensor Parameters::view(const FlatBuffer& buffer, const std::string& name) const {
  if (!buffer.elements.defined()) return {};
  const ParameterInfo& info = layout_.find(name);
  return buffer.elements.narrow(0, info.offset - buffer.begin, info.numel()).view(info.shape);
}

at::Tensor Parameters::joined(const FlatBuffer& buffer, const std::vector<std::string>& names) const {
  if (!buffer.elements.defined()) return {};
  const ParameterInfo& first = layout_.find(names.at(0));
  std::vector<int64_t> shape = first.shape;
  shape[0] = 0;
  int64_t end = first.offset;
  for (const std::string& name : names) {
    const ParameterInfo& info = layout_.find(name);
    check_argument(info.offset == end && info.shape.size() == shape.size(), "parameters {} and {} are not adjacent", first.name,
                   name);
    end += info.numel();
    shape[0] += info.shape[0];
  }
  return buffer.elements.narrow(0, first.offset - buffer.begin, end - first.offset).view(shape);
}

}  // namespace headrace
