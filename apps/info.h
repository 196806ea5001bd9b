// `headrace info`: what a Hugging Face checkpoint folder holds, read from config.json and the headers alone.
#pragma once

#include <filesystem>
#include <ostream>

namespace headrace {

/// Prints family, sizes, parameter counts (all and active per token), dtypes, shards, the dtype it would be trained in, and
/// tensors that no table entry names. Throws UserError for a broken folder and for a missing or misshapen tensor.
void print_info(const std::filesystem::path& folder, std::ostream& out);

}  // namespace headrace
