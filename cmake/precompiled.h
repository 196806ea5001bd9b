// Headers that most sources need and that take long to read. No torch/torch.h: it alone takes over 20 s.
#pragma once

#include <ATen/core/Tensor.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>
