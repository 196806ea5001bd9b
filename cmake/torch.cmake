# libtorch from the PyPI torch wheel of HEADRACE_PYTHON's environment, as one interface target: headrace_torch.
# torch's own CMake config wants the CUDA toolkit; plain imported libraries also build on a machine without it.
set(HEADRACE_TORCH_VERSION 2.11)
set(HEADRACE_PYTHON "${CMAKE_SOURCE_DIR}/.venv/bin/python" CACHE FILEPATH "Python whose torch wheel is linked")

execute_process(
  COMMAND ${HEADRACE_PYTHON} -c "import importlib.util as u, importlib.metadata as m; print(u.find_spec('torch').submodule_search_locations[0]); print(m.version('torch'))"
  OUTPUT_VARIABLE torch_answer RESULT_VARIABLE torch_status OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT torch_status EQUAL 0)
  message(FATAL_ERROR "${HEADRACE_PYTHON} has no torch. Run `make setup`, or give -DHEADRACE_PYTHON=<python with torch ${HEADRACE_TORCH_VERSION}>.")
endif()
string(REPLACE "\n" ";" torch_answer "${torch_answer}")
list(GET torch_answer 0 HEADRACE_TORCH_DIR)
list(GET torch_answer 1 torch_version)
if(NOT torch_version MATCHES "^${HEADRACE_TORCH_VERSION}(\\.|\\+|$)")
  message(FATAL_ERROR "torch ${torch_version} found in ${HEADRACE_TORCH_DIR}, but Headrace needs torch ${HEADRACE_TORCH_VERSION}. Try: pip install torch==${HEADRACE_TORCH_VERSION}.0")
endif()

add_library(headrace_torch INTERFACE)
# The wheel brings its own copies of fmt and nlohmann-json headers: -idirafter, so that Debian's are found first.
target_compile_options(headrace_torch INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:SHELL:-idirafter ${HEADRACE_TORCH_DIR}/include>"
  "$<$<COMPILE_LANGUAGE:CXX>:SHELL:-idirafter ${HEADRACE_TORCH_DIR}/include/torch/csrc/api/include>")
target_link_directories(headrace_torch INTERFACE ${HEADRACE_TORCH_DIR}/lib)
# libstdc++ first: the wheel's libtorch.so exports a few std::filesystem symbols of the compiler it was built with, and a program
# bound to those crashes in std::filesystem::remove_all (tests/base/file_test.cpp shows it).
target_link_libraries(headrace_torch INTERFACE stdc++ torch torch_cpu c10)
set(CMAKE_BUILD_RPATH ${HEADRACE_TORCH_DIR}/lib)
message(STATUS "torch ${torch_version}: ${HEADRACE_TORCH_DIR}")
