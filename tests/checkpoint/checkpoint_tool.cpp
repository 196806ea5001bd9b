// checkpoint_tool: the C++ functions behind small commands, for the pytest files of this folder.
//   copy-file IN OUT     reads a safetensors file and writes it anew
// Exit codes as the program's: 2 with one sentence for a user's fault.
#include <functional>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/safetensors.h"
#include "headrace/error.h"

namespace headrace {
namespace {

using Arguments = std::vector<std::string>;

void copy_file(const Arguments& arguments) {
  const SafetensorsFile file(arguments.at(0));
  std::vector<TensorToWrite> tensors;
  for (const TensorInfo& info : file.header().tensors) {
    tensors.push_back({info.name, info.dtype, info.shape, [&file, &info](const auto& sink) { sink(file.bytes(info)); }});
  }
  write_safetensors(arguments.at(1), std::move(tensors), file.header().metadata);
}

}  // namespace
}  // namespace headrace

int main(int argc, char** argv) {
  using namespace headrace;
  const std::map<std::string, std::function<void(const Arguments&)>> commands = {{"copy-file", copy_file}};
  try {
    commands.at(argc > 1 ? argv[1] : "")(Arguments(argv + 2, argv + argc));
    return 0;
  } catch (const UserError& error) {
    std::cerr << error.what() << "\n";
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "unexpected: " << error.what() << "\n";
    return 1;
  }
}
