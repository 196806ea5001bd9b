// checkpoint_tool: the C++ functions behind small commands, for the pytest files of this folder.
//   copy-file IN OUT                  reads a safetensors file and writes it anew
//   round-trip FOLDER OUT MAX_BYTES   loads a tiny qwen3_moe or mixtral and saves it
//   upcycle DENSE OUT NUM_EXPERTS TOP_K SEED ROUTER_STD MAX_BYTES
// Exit codes as the program's: 2 with one sentence for a user's fault.
#include <functional>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/test_tables.h"
#include "checkpoint/upcycle.h"
#include "config/model_config.h"
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

void round_trip(const Arguments& arguments) {
  const ModelConfig config = ModelConfig::read(arguments.at(0));
  const TestTable table = test_table(config);
  const CheckpointFolder folder(arguments.at(0));
  const std::string dtype = config.dtype().value_or("float32");
  const std::vector<NamedTensor> parameters = table.tensors(dtype == "bfloat16"  ? at::kBFloat16
                                                            : dtype == "float16" ? at::kHalf
                                                                                 : at::kFloat);
  const LoadedWeights loaded = load_weights(folder, table.map, parameters);
  SaveRequest request;
  request.folder = arguments.at(1);
  request.parameters = parameters;
  request.pieces = loaded.pieces;
  request.config = config.for_saving(dtype);
  request.source = folder.path();
  request.unknown = loaded.unknown;
  request.max_shard_size = std::stoull(arguments.at(2));
  save_checkpoint(request);
}

void run_upcycle(const Arguments& arguments) {
  UpcycleSettings settings;
  settings.num_experts = std::stoll(arguments.at(2));
  settings.top_k = std::stoll(arguments.at(3));
  settings.seed = std::stoull(arguments.at(4));
  settings.router_std = std::stod(arguments.at(5));
  settings.max_shard_size = std::stoull(arguments.at(6));
  upcycle(arguments.at(0), arguments.at(1), settings);
}

}  // namespace
}  // namespace headrace

int main(int argc, char** argv) {
  using namespace headrace;
  const std::map<std::string, std::function<void(const Arguments&)>> commands = {
      {"copy-file", copy_file}, {"round-trip", round_trip}, {"upcycle", run_upcycle}};
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
