// The sentence a refused call throws, for tests of what users are told.
#pragma once

#include <string>

#include "headrace/error.h"

namespace headrace::test_support {

/// The text of the UserError that `call` throws, or "" when it throws none.
template <typename Call>
std::string refusal(const Call& call) {
  try {
    call();
  } catch (const UserError& error) {
    return error.what();
  }
  return "";
}

}  // namespace headrace::test_support
