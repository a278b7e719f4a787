// A PTX module in memory, ready to be interpreted.
//
// Every operand is an index into one register file: special registers come first, then the declared ones, then
// constants that are set before a thread starts.  So executing an instruction never asks what kind of operand it has.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace ptx {

// The module cannot be run: syntax, or something that is not simulated.  Names it and the line.
struct LoadError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A kernel failed while it ran; `code` is the CUresult that a device would report.
struct Fault : std::runtime_error {
    Fault(int code_, const std::string &what) : std::runtime_error(what), code(code_) {}
    int code;
};

enum : int { kIllegalAddress = 700, kLaunchTimeout = 702, kMisaligned = 716, kLaunchFailed = 719 };

enum class Type : uint8_t {
    None,
    Pred,
    B8,
    S8,
    U8,
    B16,
    S16,
    U16,
    F16,
    BF16,
    B32,
    S32,
    U32,
    F32,
    F16x2,
    BF16x2,
    B64,
    S64,
    U64,
    F64,
};

constexpr unsigned size_of(Type t)
{
    switch (t) {
    case Type::None: return 0;
    case Type::Pred:
    case Type::B8:
    case Type::S8:
    case Type::U8: return 1;
    case Type::B16:
    case Type::S16:
    case Type::U16:
    case Type::F16:
    case Type::BF16: return 2;
    case Type::B64:
    case Type::S64:
    case Type::U64:
    case Type::F64: return 8;
    default: return 4;
    }
}

constexpr bool is_signed(Type t) { return t == Type::S8 || t == Type::S16 || t == Type::S32 || t == Type::S64; }
constexpr bool is_float(Type t) { return t == Type::F16 || t == Type::BF16 || t == Type::F32 || t == Type::F64; }

enum class Space : uint8_t { Generic, Global, Param, Shared, Local, Const };

enum class Op : uint8_t {
    Abs,
    Add,
    And,
    Atom,
    Barrier,
    Bfe,
    Bfi,
    Bra,
    BrxIdx,
    Brev,
    Clz,
    Copysign,
    Cvt,
    CvtPair,
    Cvta,
    CvtaTo,
    Div,
    Fma,
    Ld,
    Lop3,
    Mad,
    Max,
    Min,
    Mov,
    Mul,
    Neg,
    Nop,
    Not,
    Or,
    Pack,
    Popc,
    Prmt,
    Rcp,
    Rem,
    Ret,
    Selp,
    Setp,
    Shf,
    Shl,
    Shr,
    Sqrt,
    St,
    Sub,
    Testp,
    Trap,
    Unpack,
    Xor,
};

enum class Compare : uint8_t {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    Lo,
    Ls,
    Hi,
    Hs,
    Equ,
    Neu,
    Ltu,
    Leu,
    Gtu,
    Geu,
    Num,
    Nan,
};
enum class Bool : uint8_t { None, And, Or, Xor };
enum class Half : uint8_t { Lo, Hi, Wide }; // which part of a product
enum class Round : uint8_t { None, Nearest, Zero, IntNearest, IntZero, IntDown, IntUp };
enum class Test : uint8_t { Finite, Infinite, Number, NotANumber, Normal, Subnormal };
enum class Atomic : uint8_t { Add, And, Or, Xor, Min, Max, Exch, Cas, Inc, Dec };

constexpr uint32_t kDiscard = 0; // register 0 is written by results that nobody wants ("_")

struct Operand {
    uint32_t index = kDiscard;
    bool invert = false; // "!p": predicates only
};

struct Frame;
struct Insn;
using Handler = void (*)(Frame &, const Insn &);

struct Insn {
    Handler run = nullptr;
    uint32_t guard = 0; // predicate register; 0: unconditional
    bool guard_not = false;
    Op op = Op::Nop;
    Type type = Type::None;   // of the result, or of the access
    Type source = Type::None; // cvt: the type converted from
    Space space = Space::Generic;
    Compare compare = Compare::Eq;
    Bool combine = Bool::None;
    Half half = Half::Lo;
    Round round = Round::None;
    Test test = Test::Finite;
    Atomic atomic = Atomic::Add;
    bool ftz = false, sat = false, non_coherent = false, right = false, clamp = false, nan = false;
    uint8_t results = 0, sources = 0; // used entries of d and s; for ld and st d holds the values, s[0] the address
    std::array<Operand, 8> d;
    std::array<Operand, 4> s;
    int64_t offset = 0;            // ld, st, atom: added to the address
    std::vector<uint32_t> targets; // bra: one; brx.idx: all
    int line = 0;
    std::string name; // the whole mnemonic, for messages and counts
};

// Special registers that differ between threads or blocks; their register numbers are 1 + the enumerator.
enum class Special : uint8_t {
    TidX,
    TidY,
    TidZ,
    NtidX,
    NtidY,
    NtidZ,
    CtaidX,
    CtaidY,
    CtaidZ,
    NctaidX,
    NctaidY,
    NctaidZ,
    LaneId,
    WarpId,
    Count,
};
constexpr uint32_t special_register(Special s) { return 1 + static_cast<uint32_t>(s); }
constexpr uint32_t kFirstDeclared = 1 + static_cast<uint32_t>(Special::Count);

struct Constant {
    enum Kind : uint8_t { Literal, ParamAddress, ModuleAddress, DynamicShared } kind = Literal;
    uint64_t value = 0; // the literal, or the offset
};

struct Param {
    size_t offset, size;
};

struct Entry {
    std::string name;
    std::vector<Insn> code;
    std::vector<Param> params;
    size_t param_bytes = 0;
    size_t shared_bytes = 0, local_bytes = 0;
    uint32_t declared = 0;           // registers of the text
    std::vector<Constant> constants; // registers kFirstDeclared + declared + i
    unsigned max_threads = 1024, required_threads = 0;
    unsigned granule = 16; // bytes of the smallest access to memory that threads share: nothing smaller is tracked
    bool has_barrier = false, dynamic_shared = false;
    std::map<std::string, uint64_t> executed; // by mnemonic, over all launches

    size_t registers() const { return kFirstDeclared + declared + constants.size(); }
};

struct Module {
    std::string version, target;
    std::map<std::string, Entry> entries;
    std::vector<uint8_t> storage; // .global and .const variables
};

// Throws LoadError, naming the line, for anything that is not simulated faithfully.
std::unique_ptr<Module> parse(const std::string &text);

} // namespace ptx
