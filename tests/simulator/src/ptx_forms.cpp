// The operand forms of instructions.  A form takes the modifiers that the executor implements; one that is left over,
// and a combination without a handler, is a load error.  Nothing is ever ignored because it "should not matter", except
// the cache and memory-order hints listed here, which cannot change results in a sequentially consistent simulator.
#include <algorithm>

#include "ptx_exec.hpp"
#include "ptx_parser.hpp"

namespace ptx {

bool Modifiers::take(std::string_view word)
{
    const auto found = std::find(words.begin(), words.end(), word);
    if (found == words.end())
        return false;
    words.erase(found);
    return true;
}

void Modifiers::take_all(std::initializer_list<std::string_view> ignored)
{
    for (std::string_view word : ignored)
        while (take(word)) {
        }
}

template <class T>
static bool take_one(Modifiers &mods, std::initializer_list<std::pair<std::string_view, T>> choices, T &out)
{
    for (const auto &[word, value] : choices) {
        if (mods.take(word)) {
            out = value;
            return true;
        }
    }
    return false;
}

static Modifiers split(const std::string &mnemonic, std::string &opcode)
{
    Modifiers mods;
    size_t dot = mnemonic.find('.');
    opcode = mnemonic.substr(0, dot);
    while (dot != std::string::npos) {
        const size_t next = mnemonic.find('.', dot + 1);
        const std::string word = mnemonic.substr(dot + 1, next == std::string::npos ? next : next - dot - 1);
        Type type;
        if (find_type(word, type))
            mods.types.push_back(type);
        else
            mods.words.push_back(word);
        dot = next;
    }
    return mods;
}

// ---------------------------------------------------------------------------------------------- operands

bool Parser::literal(const std::string &word, bool negative, uint64_t &value)
{
    const bool hex_float =
        word.size() > 2 && word[0] == '0' && std::string_view("fFdD").find(word[1]) != std::string_view::npos;
    try {
        size_t used = 0;
        if (hex_float) {
            const bool single = word[1] == 'f' || word[1] == 'F';
            if (word.size() != (single ? 10u : 18u))
                return false;
            value = std::stoull(word.substr(2), &used, 16);
            value ^= negative ? (single ? uint64_t{1} << 31 : uint64_t{1} << 63) : 0;
            return used + 2 == word.size();
        }
        value = std::stoull(word, &used, 0);
        if (used < word.size() && word[used] == 'U')
            used++;
        value = negative ? 0 - value : value;
        return used == word.size();
    } catch (const std::exception &) {
        return false;
    }
}

Operand Parser::constant(Constant c)
{
    const auto [found, added] =
        constant_index_.try_emplace({c.kind, c.value}, static_cast<uint32_t>(pending_constants_.size()));
    if (added)
        pending_constants_.emplace_back(found->second, c);
    Operand o;
    o.index = kConstantBit | found->second;
    return o;
}

Operand Parser::operand()
{
    const bool invert = in_.accept("!"), negative = in_.accept("-");
    const std::string word = in_.word();
    Operand o;
    o.invert = invert;
    if (word == "_")
        return o;
    const Symbol *symbol = find(word);
    if (symbol == nullptr) {
        uint64_t value = 0;
        if (!literal(word, negative, value))
            in_.fail("unsupported operand '" + word + "'");
        return constant({Constant::Literal, value});
    }
    switch (symbol->kind) {
    case Symbol::Register: o.index = static_cast<uint32_t>(symbol->value); return o;
    case Symbol::Param: return constant({Constant::ParamAddress, symbol->value});
    case Symbol::Module: return constant({Constant::ModuleAddress, symbol->value});
    case Symbol::DynamicShared: entry_->dynamic_shared = true; return constant({Constant::DynamicShared, 0});
    default: return constant({Constant::Literal, symbol->value}); // offset inside .shared or .local
    }
}

void Parser::operands(int results, int sources)
{
    for (int i = 0; i < results; i++) {
        if (i)
            in_.expect(",");
        insn_.d[insn_.results++] = operand();
    }
    for (int i = 0; i < sources; i++) {
        if (i || results)
            in_.expect(",");
        insn_.s[insn_.sources++] = operand();
    }
}

void Parser::vector(std::array<Operand, 8> &into, uint8_t &count)
{
    const bool braces = in_.accept("{");
    do {
        if (count == into.size())
            in_.fail("too many elements in a vector operand");
        into[count++] = operand();
    } while (braces && in_.accept(","));
    if (braces)
        in_.expect("}");
}

void Parser::address()
{
    in_.expect("[");
    insn_.s[insn_.sources++] = operand();
    if (in_.accept("+") || in_.at("-"))
        insn_.offset = static_cast<int64_t>(in_.integer());
    in_.expect("]");
}

// ---------------------------------------------------------------------------------------------- instructions

void Parser::instruction(std::string mnemonic, int line)
{
    insn_ = Insn();
    insn_.line = line;
    if (mnemonic == "@") {
        insn_.guard_not = in_.accept("!");
        const Symbol *symbol = find(in_.word());
        if (symbol == nullptr || symbol->kind != Symbol::Register)
            in_.fail("unknown guard predicate");
        insn_.guard = static_cast<uint32_t>(symbol->value);
        mnemonic = in_.word();
    }
    insn_.name = mnemonic;
    std::string opcode;
    mods_ = split(mnemonic, opcode);
    insn_.type = mods_.type(0);
    insn_.ftz = mods_.take("ftz");
    insn_.sat = mods_.take("sat");
    form(opcode);
    if (!mods_.words.empty())
        in_.fail("unsupported modifier '." + mods_.words.front() + "' in '" + mnemonic + "'");
    insn_.run = find_handler(insn_);
    if (insn_.run == nullptr)
        in_.fail("unsupported instruction '" + mnemonic + "'");
    in_.expect(";");
    note_granule();
    entry_->code.push_back(insn_);
}

void Parser::form(const std::string &opcode)
{
    if (!form_memory(opcode) && !form_arithmetic(opcode) && !form_bits(opcode) && !form_control(opcode))
        in_.fail("unsupported instruction '" + insn_.name + "'");
}

void Parser::note_granule()
{
    const bool access = insn_.op == Op::Ld || insn_.op == Op::St || insn_.op == Op::Atom;
    if (access && insn_.space != Space::Param && insn_.space != Space::Local)
        entry_->granule = std::min(entry_->granule, size_of(insn_.type));
}

bool Parser::form_arithmetic(const std::string &opcode)
{
    static const std::map<std::string, std::pair<Op, int>> plain = {
        {"add", {Op::Add, 2}}, {"sub", {Op::Sub, 2}}, {"div", {Op::Div, 2}},   {"rem", {Op::Rem, 2}},
        {"min", {Op::Min, 2}}, {"max", {Op::Max, 2}}, {"abs", {Op::Abs, 1}},   {"neg", {Op::Neg, 1}},
        {"rcp", {Op::Rcp, 1}}, {"fma", {Op::Fma, 3}}, {"sqrt", {Op::Sqrt, 1}}, {"copysign", {Op::Copysign, 2}},
    };
    if (opcode == "mul" || opcode == "mad") {
        form_multiply(opcode == "mul" ? Op::Mul : Op::Mad, opcode == "mul" ? 2 : 3);
        return true;
    }
    if (opcode == "setp") {
        form_setp();
        return true;
    }
    if (opcode == "cvt") {
        form_convert();
        return true;
    }
    const auto found = plain.find(opcode);
    if (found == plain.end())
        return false;
    insn_.op = found->second.first;
    insn_.nan = (insn_.op == Op::Min || insn_.op == Op::Max) && mods_.take("NaN");
    if (is_float(insn_.type))
        mods_.take("rn"); // the only rounding there is; div.approx and the like stay and are refused
    operands(1, found->second.second);
    return true;
}

void Parser::form_multiply(Op op, int sources)
{
    insn_.op = op;
    if (is_float(insn_.type)) {
        mods_.take("rn");
        if (op == Op::Mad)
            insn_.op = Op::Fma;
    } else if (!take_one<Half>(mods_, {{"lo", Half::Lo}, {"hi", Half::Hi}, {"wide", Half::Wide}}, insn_.half)) {
        in_.fail("unsupported instruction '" + insn_.name + "'");
    }
    operands(1, sources);
}

void Parser::form_setp()
{
    insn_.op = Op::Setp;
    const bool known = take_one<Compare>(mods_,
                                         {{"eq", Compare::Eq},
                                          {"ne", Compare::Ne},
                                          {"lt", Compare::Lt},
                                          {"le", Compare::Le},
                                          {"gt", Compare::Gt},
                                          {"ge", Compare::Ge},
                                          {"lo", Compare::Lo},
                                          {"ls", Compare::Ls},
                                          {"hi", Compare::Hi},
                                          {"hs", Compare::Hs},
                                          {"equ", Compare::Equ},
                                          {"neu", Compare::Neu},
                                          {"ltu", Compare::Ltu},
                                          {"leu", Compare::Leu},
                                          {"gtu", Compare::Gtu},
                                          {"geu", Compare::Geu},
                                          {"num", Compare::Num},
                                          {"nan", Compare::Nan}},
                                         insn_.compare);
    if (!known)
        in_.fail("unsupported instruction '" + insn_.name + "'");
    take_one<Bool>(mods_, {{"and", Bool::And}, {"or", Bool::Or}, {"xor", Bool::Xor}}, insn_.combine);
    insn_.d[insn_.results++] = operand();
    if (in_.accept("|"))
        insn_.d[insn_.results++] = operand();
    for (int i = 0; i < (insn_.combine == Bool::None ? 2 : 3); i++) {
        in_.expect(",");
        insn_.s[insn_.sources++] = operand();
    }
}

void Parser::form_convert()
{
    insn_.source = mods_.type(1);
    const bool pair = insn_.type == Type::F16x2 || insn_.type == Type::BF16x2;
    insn_.op = pair ? Op::CvtPair : Op::Cvt;
    take_one<Round>(mods_,
                    {{"rn", Round::Nearest},
                     {"rz", Round::Zero},
                     {"rni", Round::IntNearest},
                     {"rzi", Round::IntZero},
                     {"rmi", Round::IntDown},
                     {"rpi", Round::IntUp}},
                    insn_.round);
    operands(1, pair ? 2 : 1);
}

bool Parser::form_bits(const std::string &opcode)
{
    static const std::map<std::string, std::pair<Op, int>> plain = {
        {"and", {Op::And, 2}},   {"or", {Op::Or, 2}},     {"xor", {Op::Xor, 2}},   {"not", {Op::Not, 1}},
        {"shl", {Op::Shl, 2}},   {"shr", {Op::Shr, 2}},   {"lop3", {Op::Lop3, 4}}, {"prmt", {Op::Prmt, 3}},
        {"selp", {Op::Selp, 3}}, {"popc", {Op::Popc, 1}}, {"clz", {Op::Clz, 1}},   {"brev", {Op::Brev, 1}},
        {"bfe", {Op::Bfe, 3}},   {"bfi", {Op::Bfi, 4}},
    };
    if (opcode == "mov") {
        form_move();
    } else if (opcode == "shf") {
        insn_.op = Op::Shf;
        insn_.right = mods_.take("r") || (mods_.take("l"), false);
        insn_.clamp = mods_.take("clamp") || (mods_.take("wrap"), false);
        operands(1, 3);
    } else if (opcode == "testp") {
        insn_.op = Op::Testp;
        if (!take_one<Test>(mods_,
                            {{"finite", Test::Finite},
                             {"infinite", Test::Infinite},
                             {"number", Test::Number},
                             {"notanumber", Test::NotANumber},
                             {"normal", Test::Normal},
                             {"subnormal", Test::Subnormal}},
                            insn_.test))
            in_.fail("unsupported instruction '" + insn_.name + "'");
        operands(1, 1);
    } else {
        const auto found = plain.find(opcode);
        if (found == plain.end())
            return false;
        insn_.op = found->second.first;
        operands(1, found->second.second);
    }
    return true;
}

void Parser::form_move()
{
    if (in_.at("{")) {
        insn_.op = Op::Unpack;
        vector(insn_.d, insn_.results);
        in_.expect(",");
        insn_.s[insn_.sources++] = operand();
        return;
    }
    insn_.d[insn_.results++] = operand();
    in_.expect(",");
    insn_.op = Op::Mov;
    if (in_.at("{")) {
        insn_.op = Op::Pack;
        std::array<Operand, 8> parts;
        vector(parts, insn_.sources);
        if (insn_.sources > insn_.s.size())
            in_.fail("too many elements in '" + insn_.name + "'");
        std::copy_n(parts.begin(), insn_.sources, insn_.s.begin());
    } else {
        insn_.s[insn_.sources++] = operand();
    }
}

// ---------------------------------------------------------------------------------------------- memory

static void take_space(Modifiers &mods, Space &space)
{
    for (std::string_view function : {"param::entry", "shared::cta"})
        if (mods.take(function))
            mods.words.emplace_back(function.substr(0, function.find(':')));
    take_one<Space>(mods,
                    {{"global", Space::Global},
                     {"param", Space::Param},
                     {"shared", Space::Shared},
                     {"local", Space::Local},
                     {"const", Space::Const}},
                    space);
}

void Parser::access_modifiers()
{
    take_space(mods_, insn_.space);
    insn_.non_coherent = mods_.take("nc");
    mods_.take_all({"ca",
                    "cg",
                    "cs",
                    "lu",
                    "cv",
                    "wb",
                    "wt",
                    "volatile",
                    "relaxed",
                    "weak",
                    "acquire",
                    "release",
                    "sys",
                    "gpu",
                    "cta",
                    "L1::no_allocate",
                    "L1::evict_last",
                    "L1::evict_first",
                    "L1::evict_normal",
                    "L1::evict_unchanged",
                    "L2::64B",
                    "L2::128B",
                    "L2::256B",
                    "L2::evict_first",
                    "L2::evict_last",
                    "L2::evict_normal"});
}

bool Parser::form_memory(const std::string &opcode)
{
    if (opcode == "ld" || opcode == "ldu") {
        form_load();
    } else if (opcode == "st") {
        form_store();
    } else if (opcode == "atom" || opcode == "red") {
        form_atomic(opcode == "atom");
    } else if (opcode == "cvta") {
        insn_.op = mods_.take("to") ? Op::CvtaTo : Op::Cvta;
        take_space(mods_, insn_.space);
        operands(1, 1);
    } else {
        return false;
    }
    return true;
}

static unsigned vector_length(Modifiers &mods)
{
    return mods.take("v2") ? 2 : mods.take("v4") ? 4 : mods.take("v8") ? 8 : 1;
}

void Parser::form_load()
{
    insn_.op = Op::Ld;
    const bool hint = mods_.take("L2::cache_hint");
    access_modifiers();
    const unsigned length = vector_length(mods_);
    vector(insn_.d, insn_.results);
    in_.expect(",");
    address();
    if (hint) {
        in_.expect(",");
        operand();
    }
    if (insn_.results != length)
        in_.fail("wrong number of registers in '" + insn_.name + "'");
}

void Parser::form_store()
{
    insn_.op = Op::St;
    const bool hint = mods_.take("L2::cache_hint");
    access_modifiers();
    const unsigned length = vector_length(mods_);
    address();
    in_.expect(",");
    vector(insn_.d, insn_.results);
    if (hint) {
        in_.expect(",");
        operand();
    }
    if (insn_.results != length)
        in_.fail("wrong number of registers in '" + insn_.name + "'");
}

void Parser::form_atomic(bool has_result)
{
    insn_.op = Op::Atom;
    access_modifiers();
    if (!take_one<Atomic>(mods_,
                          {{"add", Atomic::Add},
                           {"and", Atomic::And},
                           {"or", Atomic::Or},
                           {"xor", Atomic::Xor},
                           {"min", Atomic::Min},
                           {"max", Atomic::Max},
                           {"exch", Atomic::Exch},
                           {"cas", Atomic::Cas},
                           {"inc", Atomic::Inc},
                           {"dec", Atomic::Dec}},
                          insn_.atomic))
        in_.fail("unsupported instruction '" + insn_.name + "'");
    insn_.results = 1;
    if (has_result) {
        insn_.d[0] = operand();
        in_.expect(",");
    }
    address();
    for (int i = 0; i < (insn_.atomic == Atomic::Cas ? 2 : 1); i++) {
        in_.expect(",");
        insn_.s[insn_.sources++] = operand();
    }
}

// ---------------------------------------------------------------------------------------------- control

bool Parser::form_control(const std::string &opcode)
{
    if (opcode == "bra") {
        insn_.op = Op::Bra;
        mods_.take("uni");
        unresolved_.emplace_back(entry_->code.size(), std::vector<std::string>{in_.word()});
    } else if (opcode == "brx") {
        form_branch_index();
    } else if (opcode == "ret" || opcode == "exit") {
        insn_.op = Op::Ret;
        mods_.take("uni");
    } else if (opcode == "trap") {
        insn_.op = Op::Trap;
    } else if (opcode == "bar" || opcode == "barrier") {
        form_barrier();
    } else if (opcode == "membar" || opcode == "fence" || opcode == "prefetch" || opcode == "nanosleep") {
        insn_.op = Op::Nop; // order, caches and time: nothing to do where every access is seen at once
        mods_.words.clear();
        while (!in_.at(";"))
            in_.word();
    } else {
        return false;
    }
    return true;
}

void Parser::form_branch_index()
{
    insn_.op = Op::BrxIdx;
    if (!mods_.take("idx"))
        in_.fail("unsupported instruction '" + insn_.name + "'");
    mods_.take("uni");
    insn_.s[insn_.sources++] = operand();
    in_.expect(",");
    unresolved_tables_.emplace_back(entry_->code.size(), in_.word());
}

void Parser::form_barrier()
{
    insn_.op = Op::Barrier;
    entry_->has_barrier = true;
    mods_.take_all({"cta", "aligned"});
    uint64_t which = 1;
    if (!mods_.take("sync") || !literal(in_.word(), false, which) || which != 0 || !in_.at(";"))
        in_.fail("unsupported barrier '" + insn_.name + "': only barrier 0 of all threads is simulated");
}

} // namespace ptx
