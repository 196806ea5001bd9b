// "Did you mean": the nearest known name to a misspelt one.
#pragma once

#include <string>
#include <vector>

namespace headrace {

/// Levenshtein distance in bytes.
int edit_distance(const std::string& a, const std::string& b);

/// The known name nearest to `name` by edit distance, or "" when none is within half of the longer name's length.
std::string nearest_name(const std::string& name, const std::vector<std::string>& known);

}  // namespace headrace
