// safetensors, reading: the header is parsed by events (a checkpoint of 37,000 tensors has megabytes of it) and believed only
// after every check. Flow: file -> [parse_safetensors_header] -> SafetensorsFile -> CheckpointFolder (checkpoint_folder.cpp).
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <set>
#include <tuple>
#include <utility>

#include "base/json.h"
#include "checkpoint/safetensors.h"
#include "headrace/error.h"

namespace headrace {
namespace {

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the reference reader's limit
constexpr int kMaxIgnoredDepth = 64;               // nesting of values that the format does not know and readers skip

// Builds the tensor list from the events of the JSON parser. Throws at the first event that does not fit the format.
class HeaderEvents : public Json::json_sax_t {
 public:
  HeaderEvents(SafetensorsHeader& header, const std::string& origin) : header_(header), origin_(origin) {}

  bool start_object(std::size_t /*size*/) override {
    if (skipping()) return enter_ignored();
    switch (place_) {
      case Place::kStart: place_ = Place::kTop; return true;
      case Place::kTop:
        place_ = is_metadata_ ? Place::kMetadata : Place::kTensor;
        if (!is_metadata_) begin_tensor();
        return true;
      case Place::kTensor:
        if (field_ == Field::kOther) return enter_ignored();
        wrong("an object");
      default: wrong("an object");
    }
  }

  bool end_object() override {
    if (skipping()) return leave_ignored();
    if (place_ == Place::kTensor) end_tensor();
    place_ = place_ == Place::kTop ? Place::kEnd : Place::kTop;
    return true;
  }

  bool key(string_t& text) override {
    if (skipping()) return true;
    if (place_ == Place::kTop) {
      name_ = text;
      is_metadata_ = text == "__metadata__";
      require(names_.insert(text).second, "{}: the name \"{}\" appears twice in the header", origin_, text);
    } else if (place_ == Place::kMetadata) {
      metadata_key_ = text;
      require(!header_.metadata.contains(text), "{}: __metadata__ has the key \"{}\" twice", origin_, text);
    } else {
      field_ = text == "dtype"          ? Field::kDtype
               : text == "shape"        ? Field::kShape
               : text == "data_offsets" ? Field::kOffsets
                                        : Field::kOther;
      if (field_ != Field::kOther) {
        bool& seen = field_ == Field::kDtype ? has_dtype_ : field_ == Field::kShape ? has_shape_ : has_offsets_;
        require(!seen, "{}: tensor {} has \"{}\" twice", origin_, name_, text);
        seen = true;
      }
    }
    return true;
  }

  bool string(string_t& text) override {
    if (skipping()) return true;
    if (place_ == Place::kMetadata) {
      header_.metadata.emplace(metadata_key_, text);
    } else if (place_ == Place::kTensor && field_ == Field::kDtype) {
      tensor_.dtype = text;
    } else if (place_ != Place::kTensor || field_ != Field::kOther) {
      wrong("a string");
    }
    return true;
  }

  bool start_array(std::size_t /*size*/) override {
    if (skipping()) return enter_ignored();
    if (place_ == Place::kTensor && field_ == Field::kShape) {
      place_ = Place::kShape;
    } else if (place_ == Place::kTensor && field_ == Field::kOffsets) {
      place_ = Place::kOffsets;
    } else if (place_ == Place::kTensor && field_ == Field::kOther) {
      enter_ignored();
    } else {
      wrong("an array");
    }
    return true;
  }

  bool end_array() override {
    if (skipping()) return leave_ignored();
    place_ = Place::kTensor;
    return true;
  }

  bool number_unsigned(number_unsigned_t value) override {
    if (skipping()) return true;
    if (place_ == Place::kShape) {
      require(value <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()),
              "{}: tensor {} has a dimension of {}, which no file can hold", origin_, name_, value);
      tensor_.shape.push_back(static_cast<int64_t>(value));
    } else if (place_ == Place::kOffsets) {
      offsets_.push_back(value);
    } else {
      other_scalar("a number");
    }
    return true;
  }

  // The parser calls this for texts with a minus sign only.
  bool number_integer(number_integer_t value) override {
    if (skipping()) return true;
    if (place_ == Place::kShape || place_ == Place::kOffsets) {
      fail("{}: tensor {} has the negative number {} in its {}", origin_, name_, value,
           place_ == Place::kShape ? "shape" : "data_offsets");
    }
    other_scalar("a negative number");
    return true;
  }

  bool number_float(number_float_t /*value*/, const string_t& text) override {
    if (!skipping()) other_scalar(text);
    return true;
  }
  bool boolean(bool value) override {
    if (!skipping()) other_scalar(value ? "true" : "false");
    return true;
  }
  bool null() override {
    if (skipping() || (place_ == Place::kTop && is_metadata_)) return true;  // the reference takes a null __metadata__ for none
    other_scalar("null");
    return true;
  }
  bool binary(binary_t& /*value*/) override { return false; }

  bool parse_error(std::size_t position, const std::string& /*token*/, const Json::exception& error) override {
    fail("{}: the header is not valid JSON at byte {}: {}", origin_, kLengthBytes + position, error.what());
  }

 private:
  enum class Place { kStart, kTop, kMetadata, kTensor, kShape, kOffsets, kEnd };
  enum class Field { kNone, kDtype, kShape, kOffsets, kOther };

  bool skipping() const { return ignored_depth_ > 0; }
  bool enter_ignored() {
    require(++ignored_depth_ <= kMaxIgnoredDepth, "{}: the entry of tensor {} is nested more than {} deep", origin_, name_,
            kMaxIgnoredDepth);
    return true;
  }
  bool leave_ignored() {
    --ignored_depth_;
    return true;
  }

  void other_scalar(const std::string& what) {
    if (place_ != Place::kTensor || field_ != Field::kOther) wrong(what);
  }

  [[noreturn]] void wrong(const std::string& what) const {
    switch (place_) {
      case Place::kStart: fail("{}: the header is {}, but it must be a JSON object", origin_, what);
      case Place::kTop:
        fail("{}: the entry of {} is {}, but it must be an object with dtype, shape and data_offsets", origin_, name_, what);
      case Place::kMetadata:
        fail("{}: __metadata__ has {} under \"{}\", but only strings are allowed", origin_, what, metadata_key_);
      default:
        fail("{}: tensor {} has {} in its {}, but {} is needed", origin_, name_, what,
             field_ == Field::kDtype   ? "dtype"
             : field_ == Field::kShape ? "shape"
                                       : "data_offsets",
             field_ == Field::kDtype ? "a string" : "an array of non-negative integers");
    }
  }

  void begin_tensor() {
    tensor_ = {};
    tensor_.name = name_;
    offsets_.clear();
    field_ = Field::kNone;
    has_dtype_ = has_shape_ = has_offsets_ = false;
  }

  void end_tensor() {
    require(has_dtype_ && has_shape_ && has_offsets_, "{}: the entry of tensor {} lacks \"{}\"", origin_, name_,
            !has_dtype_   ? "dtype"
            : !has_shape_ ? "shape"
                          : "data_offsets");
    require(offsets_.size() == 2, "{}: tensor {} has {} data_offsets, but 2 are needed (begin and end)", origin_, name_,
            offsets_.size());
    tensor_.begin = offsets_[0];
    tensor_.end = offsets_[1];
    header_.tensors.push_back(std::move(tensor_));
  }

  SafetensorsHeader& header_;
  const std::string& origin_;
  std::set<std::string> names_;
  Place place_ = Place::kStart;
  Field field_ = Field::kNone;
  bool is_metadata_ = false, has_dtype_ = false, has_shape_ = false, has_offsets_ = false;
  int ignored_depth_ = 0;
  std::string name_, metadata_key_;
  TensorInfo tensor_;
  std::vector<uint64_t> offsets_;
};

std::string shape_text(const std::vector<int64_t>& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

// Bytes that the shape and dtype call for.
uint64_t needed_bytes(const TensorInfo& tensor, const std::string& origin) {
  const int bits = dtype_bits(tensor.dtype);
  require(bits > 0, "{}: tensor {} has the dtype \"{}\", which safetensors does not know", origin, tensor.name, tensor.dtype);
  uint64_t total = static_cast<uint64_t>(bits);
  // Multiplied in the order of the reference, which refuses an overflow even when a later dimension is 0.
  uint64_t elements = 1;
  for (const int64_t dimension : tensor.shape) {
    require(!__builtin_mul_overflow(elements, static_cast<uint64_t>(dimension), &elements),
            "{}: tensor {} has the shape {}, whose number of elements overflows 64 bits", origin, tensor.name,
            shape_text(tensor.shape));
  }
  require(!__builtin_mul_overflow(total, elements, &total),
          "{}: tensor {} has the shape {}, whose number of bits overflows 64 bits", origin, tensor.name,
          shape_text(tensor.shape));
  require(total % 8 == 0, "{}: tensor {} of dtype {} and shape {} does not fill whole bytes", origin, tensor.name, tensor.dtype,
          shape_text(tensor.shape));
  return total / 8;
}

}  // namespace

int dtype_bits(const std::string& dtype) {
  static const std::map<std::string, int> bits = {
      {"BOOL", 8},    {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6},     {"U8", 8},          {"I8", 8},
      {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},
      {"U16", 16},    {"F16", 16},    {"BF16", 16},   {"I32", 32},        {"U32", 32},        {"F32", 32},
      {"C64", 64},    {"F64", 64},    {"I64", 64},    {"U64", 64}};
  const auto found = bits.find(dtype);
  return found == bits.end() ? 0 : found->second;
}

SafetensorsHeader parse_safetensors_header(std::span<const std::byte> file, const std::string& origin) {
  require(file.size() >= kLengthBytes,
          "{}: the file has {} bytes, too few for a safetensors file; it may be an unfinished download", origin, file.size());
  uint64_t header_bytes = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i) header_bytes |= std::to_integer<uint64_t>(file[i]) << (8 * i);
  require(header_bytes <= kMaxHeaderBytes,
          "{}: the header claims {} bytes, but at most {} are allowed; this is no safetensors file", origin, header_bytes,
          kMaxHeaderBytes);
  require(header_bytes <= file.size() - kLengthBytes,
          "{}: the header claims {} bytes, but the file has only {} after the length; it may be an "
          "unfinished download",
          origin, header_bytes, file.size() - kLengthBytes);
  const char* text = reinterpret_cast<const char*>(file.data()) + kLengthBytes;

  SafetensorsHeader header;
  header.data_begin = kLengthBytes + header_bytes;
  HeaderEvents events(header, origin);
  Json::sax_parse(text, text + header_bytes, &events);

  std::sort(header.tensors.begin(), header.tensors.end(), [](const TensorInfo& a, const TensorInfo& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  const uint64_t buffer_bytes = file.size() - header.data_begin;
  uint64_t position = 0;
  for (const TensorInfo& tensor : header.tensors) {
    require(tensor.begin <= tensor.end, "{}: tensor {} begins at byte {} of the data and ends before it, at {}", origin,
            tensor.name, tensor.begin, tensor.end);
    require(tensor.begin >= position,
            "{}: tensor {} begins at byte {} of the data, inside the tensor before it, which ends at {}", origin, tensor.name,
            tensor.begin, position);
    require(tensor.begin == position, "{}: no tensor covers bytes {} to {} of the data, before tensor {}", origin, position,
            tensor.begin, tensor.name);
    const uint64_t needed = needed_bytes(tensor, origin);
    require(tensor.end - tensor.begin == needed,
            "{}: tensor {} of dtype {} and shape {} needs {} bytes, but its data_offsets span {}", origin, tensor.name,
            tensor.dtype, shape_text(tensor.shape), needed, tensor.end - tensor.begin);
    require(tensor.end <= buffer_bytes,
            "{}: tensor {} ends at byte {} of the data, but the file holds only {} bytes of data; it may be an "
            "unfinished download",
            origin, tensor.name, tensor.end, buffer_bytes);
    position = tensor.end;
  }
  require(position == buffer_bytes, "{}: {} bytes follow the end of the last tensor{}; the file is damaged", origin,
          buffer_bytes - position, header.tensors.empty() ? std::string() : " (" + header.tensors.back().name + ")");
  return header;
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : file_(path), header_(parse_safetensors_header(file_.bytes(), path.string())) {
  for (std::size_t i = 0; i < header_.tensors.size(); ++i) index_.emplace(header_.tensors[i].name, i);
}

const TensorInfo* SafetensorsFile::find(const std::string& name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &header_.tensors[found->second];
}

std::span<const std::byte> SafetensorsFile::bytes(const TensorInfo& tensor) const {
  return file_.bytes().subspan(header_.data_begin + tensor.begin, tensor.end - tensor.begin);
}

}  // namespace headrace
