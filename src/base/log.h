// Log lines for people, to standard error. Rank 0 speaks; set_log_rank silences the others except for errors.
#pragma once

#include <string>

namespace headrace {

void set_log_rank(int rank);
void log_info(const std::string& text);
void log_warning(const std::string& text);
void log_error(const std::string& text);

}  // namespace headrace
