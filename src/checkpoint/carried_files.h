// The other files of a model folder (tokenizer, generation config, chat template, custom code, licence), carried along into
// saves. Flow: save_checkpoint / upcycle -> [carry_other_files].
#pragma once

#include <filesystem>
#include <string>

namespace headrace {

/// Whether a save carries the file of that name: texts and tokenizer files by their ending (.json .jsonl .txt .md .py .jinja
/// .model .tiktoken .vocab .bpe .yaml .yml) and names that begin with tokenizer, LICENSE, LICENCE, NOTICE, README or
/// USE_POLICY. Never: hidden files, config.json, weights and their indexes, adapter files, what trainers keep (optimizer,
/// scheduler, rng, trainer state).
bool is_carried(const std::string& file_name);

/// Copies those files from the top level of `source` (links are followed) to `destination`, bytes unchanged and flushed to
/// disk. Throws UserError.
void carry_other_files(const std::filesystem::path& source, const std::filesystem::path& destination);

}  // namespace headrace
