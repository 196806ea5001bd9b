// Parameters: all weights of a model in one flat buffer; their gradients in buffers for stretches of the same layout, which a
// backward opens as it comes to them.
// Names, shapes and layouts are those of transformers v5 in memory; each tensor is a view. Parameters added as one group lie
// next to each other without a gap, so that q|k|v or gate|up can be used as one matrix.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace headrace {

struct ParameterInfo {
  std::string name;
  std::vector<int64_t> shape;
  bool decay = true;    // weight decay applies (matrices and embeddings; not norms and biases, as transformers' Trainer)
  bool expert = false;  // of one of the experts, stacked: [num_experts, ...]
  // A backward stores this gradient into new memory instead of adding to it, so nobody needs to zero it: the experts' and the
  // output head's, which are most of all.
  bool stored_first = false;
  int64_t offset = 0;  // first element in the flat buffer
  int64_t numel() const;
};

/// Elements [begin, end) of the flat layout.
struct FlatRange {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
  bool operator==(const FlatRange&) const = default;
};

/// Memory for a stretch of the flat layout that starts at element `begin`: a whole buffer, or one layer's part.
struct FlatBuffer {
  FlatBuffer(at::Tensor flat_elements, int64_t first = 0) : elements(std::move(flat_elements)), begin(first) {}
  at::Tensor elements;
  int64_t begin;
  FlatRange range() const { return {begin, begin + (elements.defined() ? elements.numel() : 0)}; }
};

/// Where everything lies; knows no memory.
class ParameterLayout {
 public:
  /// Appends parameters that must be adjacent; the group starts at a multiple of 64 elements. Throws std::invalid_argument on a
  /// name that is there already.
  void add_group(std::vector<ParameterInfo> group);
  const std::vector<ParameterInfo>& entries() const { return entries_; }
  const ParameterInfo& find(const std::string& name) const;  // throws std::invalid_argument
  bool contains(const std::string& name) const { return index_.contains(name); }
  int64_t size() const { return size_; }  // elements of the flat buffer, gaps included
  int64_t num_parameters() const;         // elements without gaps

 private:
  std::vector<ParameterInfo> entries_;
  std::map<std::string, std::size_t> index_;
  int64_t size_ = 0;
};

class Parameters {
 public:
  /// Weights allocated and zero.
  Parameters(ParameterLayout layout, at::ScalarType dtype, at::Device device);

  const ParameterLayout& layout() const { return layout_; }
  const at::Tensor& flat() const { return flat_; }  // [layout.size()]
  at::Tensor weight(const std::string& name) const { return view(flat_, name); }

  struct OpenGradients {
    FlatBuffer buffer;
    bool is_new;  // what is stored first (ParameterInfo::stored_first) is not set yet; everything else is zero
  };
  /// Memory for the gradients of a stretch; the same again until it is released. So gradients take memory only from the moment
  /// they are computed, when that layer's activations are about to be freed.
  OpenGradients open_gradients(FlatRange range);
  const std::vector<FlatBuffer>& gradients() const { return gradients_; }  // all that are open
  void release_gradients() { gradients_.clear(); }
  void release_gradients(FlatRange range);
  at::Tensor grad(const std::string& name) const;  // undefined unless open

  /// Adjacent parameters as one tensor: rows of all, in order. Undefined when `buffer` is.
  at::Tensor joined(const FlatBuffer& buffer, const std::vector<std::string>& names) const;
  /// One parameter as a view of `buffer` (flat(), gradients, optimizer state of the same layout).
  at::Tensor view(const FlatBuffer& buffer, const std::string& name) const;

 private:
  ParameterLayout layout_;
  at::Tensor flat_;
  std::vector<FlatBuffer> gradients_;
};

}  // namespace headrace
