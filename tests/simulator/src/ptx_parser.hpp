// The parser's two halves share this: a cursor over tokens, scopes of names, and the mnemonic being read.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ptx.hpp"
#include "ptx_lexer.hpp"

namespace ptx {

bool find_type(std::string_view name, Type &out);

constexpr uint32_t kConstantBit = 1u << 31; // an operand that is a constant, until the registers are counted

// A cursor over tokens.  Every failure is a LoadError with the line.
class Cursor {
public:
    explicit Cursor(const std::string &text) : tokens_(tokenize(text)) {}

    bool done() const { return at_ >= tokens_.size(); }
    bool at(std::string_view text) const { return !done() && tokens_[at_].text == text; }
    bool accept(std::string_view text)
    {
        const bool found = at(text);
        at_ += found;
        return found;
    }
    void expect(std::string_view text);
    std::string word();
    uint64_t integer(); // with an optional sign
    int line() const { return tokens_.empty() ? 0 : tokens_[done() ? tokens_.size() - 1 : at_].line; }
    void skip_line(int line);
    void skip_braces();
    [[noreturn]] void fail(const std::string &why) const;
    std::string context; // the kernel being read, for messages

private:
    std::vector<Token> tokens_;
    size_t at_ = 0;
};

// The words of one mnemonic after the opcode: types in order, everything else as modifiers that must all be taken.
struct Modifiers {
    std::vector<Type> types;
    std::vector<std::string> words;

    bool take(std::string_view word);
    void take_all(std::initializer_list<std::string_view> ignored);
    Type type(size_t i) const { return i < types.size() ? types[i] : Type::None; }
};

// A name that an operand can stand for.
struct Symbol {
    enum Kind : uint8_t { Register, Param, Shared, DynamicShared, Local, Module } kind = Register;
    uint64_t value = 0; // register index, or offset in its space
};

class Parser {
public:
    Parser(const std::string &text, Module &module) : in_(text), module_(module) {}
    void run();

private:
    // ptx_parser.cpp: directives
    void module_directive();
    void entry();
    void params();
    void param();
    void entry_limits();
    void body();
    bool statement();
    void declare_registers();
    void declare_variable(Space space, bool external);
    void initialise(size_t offset, size_t bytes, Type type);
    void branch_targets(const std::string &label);
    void resolve_labels();
    void finish_entry();
    void name(const std::string &name, Symbol symbol);
    const Symbol *find(const std::string &name) const;

    // ptx_forms.cpp: instructions
    void instruction(std::string mnemonic, int line);
    void form(const std::string &opcode);
    Operand operand();
    Operand predicate();
    Operand constant(Constant c);
    bool literal(const std::string &word, bool negative, uint64_t &value);
    void operands(int results, int sources);
    void vector(std::array<Operand, 8> &into, uint8_t &count);
    void address();
    bool form_arithmetic(const std::string &opcode);
    bool form_bits(const std::string &opcode);
    bool form_memory(const std::string &opcode);
    bool form_control(const std::string &opcode);
    void form_load();
    void form_store();
    void access_modifiers();
    void form_atomic(bool has_result);
    void form_move();
    void form_setp();
    void form_convert();
    void form_multiply(Op op, int sources);
    void form_branch_index();
    void form_barrier();
    void note_granule();

    Cursor in_;
    Module &module_;
    Entry *entry_ = nullptr;
    Insn insn_;
    Modifiers mods_;
    std::vector<std::map<std::string, Symbol>> scopes_{1};
    std::map<std::string, uint32_t> labels_;
    std::map<std::string, std::vector<std::string>> tables_;              // .branchtargets
    std::vector<std::pair<size_t, std::vector<std::string>>> unresolved_; // instruction -> labels
    std::vector<std::pair<size_t, std::string>> unresolved_tables_;
    std::vector<std::pair<uint32_t, Constant>> pending_constants_;
    std::map<std::pair<int, uint64_t>, uint32_t> constant_index_;
};

} // namespace ptx
