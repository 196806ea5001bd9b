// JSON as the project uses it: key order is kept, numbers keep their int/float type (a config.json is written back as read).
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

namespace headrace {

using Json = nlohmann::ordered_json;

/// Parses `text`; `origin` (a path) names it in the error. Throws UserError with the byte offset when it is not JSON, and on
/// a duplicate key in any object.
Json parse_json(const std::string& text, const std::string& origin);

/// Reads and parses a file. Throws UserError when it is missing, unreadable or not JSON.
Json read_json_file(const std::filesystem::path& path);

/// The text that Python's json.dumps(value, indent=2, ensure_ascii=True) + "\n" gives (floats as Python's repr: 1e-06, 0.02).
std::string to_python_json(const Json& value, bool sort_keys = false);

}  // namespace headrace
