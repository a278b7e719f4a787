// What the simulator found wrong, one line each, every line once.
#pragma once

#include <set>
#include <string>
#include <vector>

namespace sim {

class Report {
public:
    // `kind` is an upper-case word that tests match, such as RACE or MISUSE.
    void add(const std::string &kind, const std::string &text)
    {
        if (seen_.insert(kind + ": " + text).second)
            lines_.push_back(kind + ": " + text);
    }
    int count(const std::string &kind) const
    {
        int n = 0;
        for (const std::string &line : lines_)
            n += kind == "*" || line.compare(0, kind.size() + 1, kind + ":") == 0;
        return n;
    }
    std::string text() const
    {
        std::string all;
        for (const std::string &line : lines_)
            all += line + "\n";
        return all;
    }
    void clear()
    {
        lines_.clear();
        seen_.clear();
    }

private:
    std::vector<std::string> lines_;
    std::set<std::string> seen_;
};

} // namespace sim
