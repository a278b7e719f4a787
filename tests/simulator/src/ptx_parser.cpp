#include "ptx_parser.hpp"

#include <algorithm>
#include <cstring>

#include "ptx_exec.hpp"

namespace ptx {

bool find_type(std::string_view name, Type &out)
{
    static const std::map<std::string_view, Type> types = {
        {"pred", Type::Pred}, {"b8", Type::B8},   {"s8", Type::S8},       {"u8", Type::U8},         {"b16", Type::B16},
        {"s16", Type::S16},   {"u16", Type::U16}, {"f16", Type::F16},     {"bf16", Type::BF16},     {"b32", Type::B32},
        {"s32", Type::S32},   {"u32", Type::U32}, {"f32", Type::F32},     {"b64", Type::B64},       {"s64", Type::S64},
        {"u64", Type::U64},   {"f64", Type::F64}, {"f16x2", Type::F16x2}, {"bf16x2", Type::BF16x2},
    };
    const auto found = types.find(name);
    if (found == types.end())
        return false;
    out = found->second;
    return true;
}

static Type type_directive(const Cursor &in, const std::string &word)
{
    Type type = Type::None;
    if (word.size() < 2 || word[0] != '.' || !find_type(std::string_view(word).substr(1), type))
        in.fail("unsupported type '" + word + "'");
    return type;
}

static size_t align_up(size_t value, size_t to) { return (value + to - 1) / to * to; }

// ---------------------------------------------------------------------------------------------- cursor

void Cursor::fail(const std::string &why) const
{
    throw LoadError("PTX line " + std::to_string(line()) + (context.empty() ? "" : " in " + context) + ": " + why);
}

void Cursor::expect(std::string_view text)
{
    if (!accept(text))
        fail("expected '" + std::string(text) + "', found '" + (done() ? "end of text" : tokens_[at_].text) + "'");
}

std::string Cursor::word()
{
    if (done())
        fail("unexpected end of text");
    return tokens_[at_++].text;
}

uint64_t Cursor::integer()
{
    const bool negative = accept("-");
    const std::string text = word();
    size_t used = 0;
    uint64_t value = 0;
    try {
        value = std::stoull(text, &used, 0);
    } catch (const std::exception &) {
        used = std::string::npos;
    }
    if (used != text.size() && text.substr(std::min(used, text.size())) != "U")
        fail("expected a number, found '" + text + "'");
    return negative ? 0 - value : value;
}

void Cursor::skip_line(int line)
{
    while (!done() && tokens_[at_].line == line)
        at_++;
}

void Cursor::skip_braces()
{
    while (!at("{"))
        word();
    int depth = 0;
    do {
        const std::string text = word();
        depth += text == "{" ? 1 : text == "}" ? -1 : 0;
    } while (depth > 0);
}

// ---------------------------------------------------------------------------------------------- module and entries

void Parser::run()
{
    for (int s = 0; s < static_cast<int>(Special::Count); s++) {
        static const char *const names[] = {"%tid.x",    "%tid.y",    "%tid.z",   "%ntid.x",  "%ntid.y",
                                            "%ntid.z",   "%ctaid.x",  "%ctaid.y", "%ctaid.z", "%nctaid.x",
                                            "%nctaid.y", "%nctaid.z", "%laneid",  "%warpid"};
        name(names[s], {Symbol::Register, special_register(static_cast<Special>(s))});
    }
    while (!in_.done())
        module_directive();
}

void Parser::module_directive()
{
    const int line = in_.line();
    const std::string word = in_.word();
    if (word == ".version") {
        module_.version = in_.word();
    } else if (word == ".target") {
        module_.target = in_.word();
        while (in_.accept(","))
            in_.word();
    } else if (word == ".address_size") {
        if (in_.integer() != 64)
            in_.fail("only 64-bit addresses are simulated");
    } else if (word == ".visible" || word == ".weak") {
        // linkage means nothing to a single module
    } else if (word == ".extern" && in_.accept(".shared")) {
        declare_variable(Space::Shared, true);
    } else if (word == ".entry") {
        entry();
    } else if (word == ".global" || word == ".const") {
        declare_variable(Space::Global, false);
    } else if (word == ".shared") {
        declare_variable(Space::Shared, false);
    } else if (word == ".file") {
        in_.skip_line(line);
    } else if (word == ".section") {
        in_.skip_braces();
    } else {
        in_.fail("unsupported directive '" + word + "'");
    }
}

void Parser::entry()
{
    const std::string kernel = in_.word();
    entry_ = &module_.entries[kernel];
    entry_->name = in_.context = kernel;
    labels_.clear();
    tables_.clear();
    unresolved_.clear();
    unresolved_tables_.clear();
    pending_constants_.clear();
    constant_index_.clear();
    scopes_.emplace_back();
    if (in_.accept("("))
        params();
    entry_limits();
    in_.expect("{");
    body();
    scopes_.pop_back();
    finish_entry();
    in_.context.clear();
}

void Parser::params()
{
    if (in_.accept(")"))
        return;
    do
        param();
    while (in_.accept(","));
    in_.expect(")");
}

void Parser::param()
{
    in_.expect(".param");
    size_t align = 0, count = 1;
    Type type = Type::None;
    std::string word = in_.word();
    for (; word[0] == '.'; word = in_.word()) {
        if (word == ".align")
            align = in_.integer();
        else if (word != ".ptr" && word != ".global" && word != ".const" && word != ".shared" && word != ".local")
            type = type_directive(in_, word);
    }
    if (in_.accept("[")) {
        count = in_.integer();
        in_.expect("]");
    }
    // ".ptr .align N" describes the memory pointed at, not the parameter; a parameter's own alignment is its size.
    if (count == 1 || align == 0)
        align = size_of(type);
    const size_t offset = align_up(entry_->param_bytes, align), size = size_of(type) * count;
    entry_->params.push_back({offset, size});
    entry_->param_bytes = offset + size;
    name(word, {Symbol::Param, offset});
}

void Parser::entry_limits()
{
    while (!in_.at("{")) {
        const std::string word = in_.word();
        if (word == ".maxntid" || word == ".reqntid") {
            auto threads = static_cast<unsigned>(in_.integer());
            while (in_.accept(","))
                threads *= static_cast<unsigned>(in_.integer());
            (word == ".maxntid" ? entry_->max_threads : entry_->required_threads) = threads;
        } else if (word == ".minnctapersm" || word == ".maxnreg") {
            in_.integer();
        } else {
            in_.fail("unsupported kernel directive '" + word + "'");
        }
    }
}

// ---------------------------------------------------------------------------------------------- bodies

void Parser::body()
{
    scopes_.emplace_back();
    while (statement()) {
    }
    scopes_.pop_back();
}

bool Parser::statement()
{
    if (in_.accept("}"))
        return false;
    if (in_.accept("{")) {
        body();
        return true;
    }
    if (in_.accept(";"))
        return true;
    const int line = in_.line();
    const std::string word = in_.word();
    if (word == ".reg") {
        declare_registers();
    } else if (word == ".shared" || word == ".local") {
        declare_variable(word == ".shared" ? Space::Shared : Space::Local, false);
    } else if (word == ".loc" || word == ".file") {
        in_.skip_line(line);
    } else if (word == ".pragma") {
        while (!in_.accept(";"))
            in_.word();
    } else if (in_.accept(":")) {
        if (in_.accept(".branchtargets"))
            branch_targets(word);
        else
            labels_[word] = static_cast<uint32_t>(entry_->code.size());
    } else if (word[0] == '.') {
        in_.fail("unsupported directive '" + word + "'");
    } else {
        instruction(word, line);
    }
    return true;
}

void Parser::declare_registers()
{
    type_directive(in_, in_.word());
    do {
        const std::string prefix = in_.word();
        if (!in_.accept("<")) {
            name(prefix, {Symbol::Register, kFirstDeclared + entry_->declared++});
            continue;
        }
        const uint64_t count = in_.integer();
        in_.expect(">");
        for (uint64_t i = 0; i < count; i++)
            name(prefix + std::to_string(i), {Symbol::Register, kFirstDeclared + entry_->declared++});
    } while (in_.accept(","));
    in_.expect(";");
}

// A .shared, .local, .global or .const variable.  Names of module scope live in the outermost scope.
void Parser::declare_variable(Space space, bool external)
{
    size_t align = 0, count = 1;
    std::string word = in_.word();
    for (; word == ".align"; word = in_.word())
        align = in_.integer();
    const Type type = type_directive(in_, word);
    const std::string variable = in_.word();
    bool open_ended = false;
    while (in_.accept("[")) {
        open_ended = in_.at("]");
        count *= open_ended ? 0 : in_.integer();
        in_.expect("]");
    }
    if (align == 0)
        align = size_of(type);
    if (open_ended && !(external && space == Space::Shared))
        in_.fail("unsupported array of unknown size '" + variable + "'");
    if (space == Space::Shared && entry_ == nullptr && !external)
        in_.fail("unsupported .shared variable of module scope '" + variable + "'");
    const size_t bytes = size_of(type) * count;
    if (space == Space::Global) {
        const size_t offset = align_up(module_.storage.size(), align);
        module_.storage.resize(offset + bytes);
        name(variable, {Symbol::Module, offset});
        if (in_.accept("="))
            initialise(offset, bytes, type);
    } else if (external) {
        name(variable, {Symbol::DynamicShared, 0});
    } else {
        size_t &total = space == Space::Shared ? entry_->shared_bytes : entry_->local_bytes;
        const size_t offset = align_up(total, align);
        total = offset + bytes;
        name(variable, {space == Space::Shared ? Symbol::Shared : Symbol::Local, offset});
    }
    in_.expect(";");
}

void Parser::initialise(size_t offset, size_t bytes, Type type)
{
    const bool list = in_.accept("{");
    for (size_t at = offset; at < offset + bytes; at += size_of(type)) {
        const bool negative = in_.accept("-");
        uint64_t value = 0;
        if (!literal(in_.word(), negative, value))
            in_.fail("unsupported initial value");
        std::memcpy(&module_.storage[at], &value, size_of(type));
        if (!list || !in_.accept(","))
            break;
    }
    if (list)
        in_.expect("}");
}

void Parser::branch_targets(const std::string &label)
{
    do
        tables_[label].push_back(in_.word());
    while (in_.accept(","));
    in_.expect(";");
}

void Parser::name(const std::string &name, Symbol symbol) { scopes_.back()[name] = symbol; }

const Symbol *Parser::find(const std::string &name) const
{
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
        const auto found = scope->find(name);
        if (found != scope->end())
            return &found->second;
    }
    return nullptr;
}

void Parser::resolve_labels()
{
    for (const auto &[at, table] : unresolved_tables_)
        unresolved_.emplace_back(at, tables_[table]);
    for (const auto &[at, names] : unresolved_) {
        for (const std::string &label : names) {
            const auto found = labels_.find(label);
            if (found == labels_.end())
                in_.fail("unknown label '" + label + "'");
            entry_->code[at].targets.push_back(found->second);
        }
        if (names.empty())
            in_.fail("a branch without targets");
    }
}

void Parser::finish_entry()
{
    Insn end; // falling off the end is a return
    end.op = Op::Ret;
    end.name = "ret";
    end.run = find_handler(end);
    entry_->code.push_back(end);
    resolve_labels();
    for (const auto &[index, value] : pending_constants_)
        entry_->constants.push_back(value);
    // Constants were numbered from zero while the number of registers was still growing.
    const uint32_t base = kFirstDeclared + entry_->declared;
    const auto relocate = [base](Operand &o) {
        if (o.index & kConstantBit)
            o.index = base + (o.index & ~kConstantBit);
    };
    for (Insn &i : entry_->code) {
        std::for_each(i.d.begin(), i.d.end(), relocate);
        std::for_each(i.s.begin(), i.s.end(), relocate);
    }
    entry_ = nullptr;
}

std::unique_ptr<Module> parse(const std::string &text)
{
    auto module = std::make_unique<Module>();
    Parser(text, *module).run();
    return module;
}

} // namespace ptx
