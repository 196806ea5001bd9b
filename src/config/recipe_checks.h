// Checks that look at more than one key of a recipe.
// Flow: recipe.cpp -> [recipe_checks] -> Recipe.
#pragma once

#include <string>

#include "headrace/recipe.h"

namespace headrace {

/// Throws UserError when values of `recipe` do not go together; `origin` (a path) begins the sentence.
void check_recipe(const Recipe& recipe, const std::string& origin);

}  // namespace headrace
