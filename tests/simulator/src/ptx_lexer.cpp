#include "ptx_lexer.hpp"

#include <cctype>

namespace ptx {
namespace {

class Lexer {
public:
    explicit Lexer(const std::string &text) : text_(text) {}

    std::vector<Token> run()
    {
        while (at_ < text_.size())
            next();
        return std::move(tokens_);
    }

private:
    char peek(size_t ahead = 0) const { return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\0'; }
    bool starts(const char *two) const { return peek() == two[0] && peek(1) == two[1]; }

    static bool in_word(char c)
    {
        return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '.' || c == '$' || c == '%';
    }

    void emit(size_t length)
    {
        tokens_.push_back({text_.substr(at_, length), line_});
        at_ += length;
    }

    void skip_comment(const char *end, bool keep_end)
    {
        size_t stop = text_.find(end, at_ + 2);
        stop = stop == std::string::npos ? text_.size() : stop + (keep_end ? 0 : 2);
        for (; at_ < stop; at_++)
            line_ += text_[at_] == '\n';
    }

    size_t word_length() const
    {
        size_t n = 0;
        while (in_word(peek(n)) || (peek(n) == ':' && peek(n + 1) == ':' && in_word(peek(n + 2))))
            n += peek(n) == ':' ? 2 : 1;
        return n;
    }

    void next()
    {
        if (peek() == '\n') {
            line_++;
            at_++;
        } else if (std::isspace(static_cast<unsigned char>(peek())) || peek() == '\0') {
            at_++;
        } else if (starts("//")) {
            skip_comment("\n", true);
        } else if (starts("/*")) {
            skip_comment("*/", false);
        } else if (peek() == '"') {
            const size_t close = text_.find('"', at_ + 1);
            emit(close == std::string::npos ? text_.size() - at_ : close + 1 - at_);
        } else {
            const size_t n = word_length();
            emit(n ? n : 1);
        }
    }

    const std::string &text_;
    std::vector<Token> tokens_;
    size_t at_ = 0;
    int line_ = 1;
};

} // namespace

std::vector<Token> tokenize(const std::string &text) { return Lexer(text).run(); }

} // namespace ptx
