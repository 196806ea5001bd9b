// Errors: who is at fault decides the type.
//
// UserError              the recipe, a file or the data is wrong: one sentence with what was found, what is needed and what
//                        to try. The program prints the message alone and exits with code 2.
// std::invalid_argument  a library call was given a wrong argument (ValueError in Python).
// InternalError          a broken invariant: a bug of ours; the message carries file and line.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace headrace {

class UserError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class InternalError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

/// Throws UserError with the formatted text.
template <typename... Args>
[[noreturn]] void fail(fmt::format_string<Args...> text, Args&&... args) {
  throw UserError(fmt::format(text, std::forward<Args>(args)...));
}

/// Throws UserError with the formatted text unless `condition` holds.
template <typename... Args>
void require(bool condition, fmt::format_string<Args...> text, Args&&... args) {
  if (!condition) throw UserError(fmt::format(text, std::forward<Args>(args)...));
}

/// Throws std::invalid_argument with the formatted text unless `condition` holds.
template <typename... Args>
void check_argument(bool condition, fmt::format_string<Args...> text, Args&&... args) {
  if (!condition) throw std::invalid_argument(fmt::format(text, std::forward<Args>(args)...));
}

/// Throws InternalError unless `condition` holds; `where` is HEADRACE_HERE.
inline void check_invariant(bool condition, const char* where, const char* what) {
  if (!condition) throw InternalError(fmt::format("{}: {} (this is a bug in Headrace)", where, what));
}

}  // namespace headrace

#define HEADRACE_STRINGIFY_(x) #x
#define HEADRACE_STRINGIFY(x) HEADRACE_STRINGIFY_(x)
#define HEADRACE_HERE __FILE__ ":" HEADRACE_STRINGIFY(__LINE__)
