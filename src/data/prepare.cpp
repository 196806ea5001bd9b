#include "data/prepare.h"

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "headrace/error.h"

#ifndef HEADRACE_PYTHON_EXECUTABLE
#error "the build records the Python interpreter: see src/data/CMakeLists.txt"
#endif

namespace headrace {
namespace {

// The environment with PYTHONPATH extended, as posix_spawn wants it.
std::vector<std::string> child_environment(const PythonInterpreter& python) {
  std::vector<std::string> environment;
  std::string path = python.module_path;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    if (text.starts_with("PYTHONPATH=")) {
      if (!path.empty()) path += ":";
      path += text.substr(std::strlen("PYTHONPATH="));
    } else {
      environment.push_back(text);
    }
  }
  if (!path.empty()) environment.push_back("PYTHONPATH=" + path);
  return environment;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  result.reserve(texts.size() + 1);
  for (std::string& text : texts) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

std::string read_all(int descriptor) {
  std::string text;
  std::array<char, 4096> buffer;
  for (;;) {
    const ssize_t count = ::read(descriptor, buffer.data(), buffer.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return text;
    text.append(buffer.data(), static_cast<std::size_t>(count));
  }
}

Json dataset_json(const DatasetSection& dataset) {
  return {{"path", dataset.path},
          {"format", dataset.format},
          {"limit", dataset.limit},
          {"train_on_prompt", dataset.train_on_prompt},
          {"chat_template", dataset.chat_template}};
}

}  // namespace

PythonInterpreter PythonInterpreter::recorded() {
  const char* chosen = std::getenv("HEADRACE_PYTHON");
  return {chosen != nullptr && *chosen != '\0' ? chosen : HEADRACE_PYTHON_EXECUTABLE, HEADRACE_PYTHON_MODULE_PATH};
}

std::string run_python_module(const PythonInterpreter& python, const std::string& module,
                              const std::vector<std::string>& arguments) {
  std::array<int, 2> pipe_ends{};
  require(::pipe(pipe_ends.data()) == 0, "cannot make a pipe: {}", std::strerror(errno));
  std::vector<std::string> command = {python.executable, "-m", module};
  command.insert(command.end(), arguments.begin(), arguments.end());
  std::vector<std::string> environment = child_environment(python);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, pipe_ends[1], STDOUT_FILENO);
  posix_spawn_file_actions_addclose(&actions, pipe_ends[0]);
  posix_spawn_file_actions_addclose(&actions, pipe_ends[1]);
  pid_t child = 0;
  const int error =
      ::posix_spawnp(&child, command[0].c_str(), &actions, nullptr, pointers(command).data(), pointers(environment).data());
  posix_spawn_file_actions_destroy(&actions);
  ::close(pipe_ends[1]);
  const std::string output = error == 0 ? read_all(pipe_ends[0]) : "";
  ::close(pipe_ends[0]);
  require(error == 0, "cannot start the Python interpreter {}: {}. Set HEADRACE_PYTHON to one that has transformers.",
          python.executable, std::strerror(error));
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  constexpr int kUserFault = 2;  // the exit code of the module for a fault of the user's, after its one sentence
  if (WIFEXITED(status) && WEXITSTATUS(status) == kUserFault)
    throw ReportedError(fmt::format("{} -m {} failed", python.executable, module));
  require(WIFEXITED(status) && WEXITSTATUS(status) == 0, "{} -m {} failed; its message stands above", python.executable,
          module);
  return output;
}

std::filesystem::path prepare_data(const Recipe& recipe, const std::filesystem::path& model_path,
                                   const PythonInterpreter& python) {
  require(!recipe.dataset.path.empty(), "the recipe names no data: set dataset.path to a json or jsonl file");
  const std::filesystem::path cache = std::filesystem::path(recipe.output_dir) / "data";
  Json config = {
      {"model_path", model_path.string()},
      {"dataset", dataset_json(recipe.dataset)},
      {"validation_dataset", recipe.validation_dataset.path.empty() ? Json(nullptr) : dataset_json(recipe.validation_dataset)},
      {"val_set_size", recipe.val_set_size},
      {"max_length", recipe.packed_sequence.packed_sequence_size},
      {"seed", recipe.seed},
      {"output_dir", cache.string()}};
  create_folder(cache);
  const std::filesystem::path config_file = cache / fmt::format("prepare-{}.json", ::getpid());
  write_file_atomically(config_file, to_python_json(config));
  std::string output;
  try {
    output = run_python_module(python, "headrace.prepare", {"--config", config_file.string()});
  } catch (...) {
    std::filesystem::remove(config_file);
    throw;
  }
  std::filesystem::remove(config_file);

  const std::size_t last_line = output.find_last_of('\n', output.size() < 2 ? 0 : output.size() - 2);
  const Json result =
      parse_json(last_line == std::string::npos ? output : output.substr(last_line + 1), "the answer of headrace.prepare");
  const std::filesystem::path folder = result.at("folder").get<std::string>();
  for (const auto& split : result.at("splits").items()) {
    log_info(fmt::format("{} data: {} documents, {} tokens, {} of them trained{}", split.key(),
                         split.value().at("num_documents").get<int64_t>(), split.value().at("num_tokens").get<int64_t>(),
                         split.value().at("num_trained_tokens").get<int64_t>(),
                         result.at("reused").get<bool>() ? " (from the cache)" : ""));
  }
  return folder;
}

}  // namespace headrace
