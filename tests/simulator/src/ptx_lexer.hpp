// Tokens of PTX text.
#pragma once

#include <string>
#include <vector>

namespace ptx {

struct Token {
    std::string text;
    int line;
};

// Words (with dots, dollars, percent signs, and the "::" inside modifiers such as L1::no_allocate), strings, and single
// punctuation characters.  Comments are dropped.
std::vector<Token> tokenize(const std::string &text);

} // namespace ptx
