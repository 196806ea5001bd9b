// Data preparation: runs `python -m headrace.prepare` (Hugging Face's tokenizers and templates) when its cached result is
// missing or stale. Flow: recipe -> [prepare_data] -> folder of token shards -> TokenShards.
#pragma once

#include <filesystem>
#include <string>

#include "headrace/error.h"
#include "headrace/recipe.h"

namespace headrace {

/// A fault of the user's whose one sentence has been printed already, by the Python side.
class ReportedError : public UserError {
 public:
  using UserError::UserError;
};

/// The Python that holds transformers and tokenizers, recorded when the program was built.
struct PythonInterpreter {
  std::string executable;
  std::string module_path;  // put in front of PYTHONPATH; may be empty when the package is installed

  /// The recorded one; the environment variable HEADRACE_PYTHON names another executable.
  static PythonInterpreter recorded();
};

/// Runs `python -m MODULE arguments...` and returns its standard output; its standard error goes through to the user. Throws
/// UserError with the interpreter's name when it cannot be started or when the module ends with an exit code other than 0;
/// ReportedError for 2.
std::string run_python_module(const PythonInterpreter& python, const std::string& module,
                              const std::vector<std::string>& arguments);

/// The folder with the token shards of the recipe's data, tokenised with the tokenizer of `model_path`. The cache lies in
/// recipe.output_dir/data. Throws UserError when there is no dataset.path or preparation fails (its own sentence has been
/// printed).
std::filesystem::path prepare_data(const Recipe& recipe, const std::filesystem::path& model_path,
                                   const PythonInterpreter& python);

}  // namespace headrace
