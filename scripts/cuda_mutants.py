"""The mutants that scripts/mutate_cuda.py tries: each is a text of the CUDA side with one change.

Of C code: a wait, a record or a check less.  Of the kernel: one instruction of its PTX made another.  Nothing is run here.
"""

from __future__ import annotations

import random
import re
import struct
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

CSRC = Path(__file__).resolve().parents[1] / "csrc"
#: The backend itself: its calls of the driver, and what it refuses.
BACKEND = ("cuda/backend", "cuda/device", "cuda/launch", "cuda/image")
#: Who asks the backend for order.
CALLERS = ("python/engine_pass", "python/engine", "python/event")


@dataclass
class Mutant:
    """One change, and what became of it."""

    place: str  # file:line
    what: str
    text: str  # the mutated file
    stem: str  # of a C file, below csrc and without its suffix; of PTX, its architecture
    verdict: str = ""
    seconds: float = 0.0


# --- C code --------------------------------------------------------------------------------------------------------------


def closing(text: str, start: int) -> int:
    """The position behind the parenthesis that closes the one at ``start``."""
    depth = 0
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i + 1
    raise ValueError("unbalanced parentheses")


def arguments(text: str) -> list[str]:
    """Splits "(a, f(b, c), d)" at its own commas."""
    parts, depth, last = [], 0, 1
    for i, char in enumerate(text):
        depth += {"(": 1, ")": -1}.get(char, 0)
        if (char == "," and depth == 1) or depth == 0:
            parts.append(text[last:i].strip())
            last = i + 1
            if depth == 0:
                break
    return parts


Change = tuple[int, int, str, str]  # start, end, replacement, what


def calls_and_results(code: str) -> Iterator[Change]:
    """Driver calls: waits and records taken out; the result of every call unchecked."""
    for found in re.finditer(r"\bMP_CUDA\(", code):
        end = closing(code, found.end() - 1)
        device, _, call, *given = arguments(code[found.end() - 1 : end])
        if call in ("cuStreamWaitEvent", "cuEventRecord"):
            yield found.start(), end, "MP_OK", f"{call} taken out"
        yield found.start(), end, f"((void)({device})->api->{call}({', '.join(given)}), MP_OK)", f"{call} unchecked"
    for found in re.finditer(r"(?<!^)\bmp_cuda_check\(", code, re.MULTILINE):
        end = closing(code, found.end() - 1)
        call = arguments(code[found.end() - 1 : end])[1]
        yield found.start(), end, "MP_OK", f"{call.strip(chr(34))} unchecked"


def ordering(code: str) -> Iterator[Change]:
    """What is asked of a backend for the sake of order."""
    asked = r"(?:self->)?\bbackend->(order_after|event_record|event_wait|event_synchronize|synchronize)\("
    for found in re.finditer(asked, code):
        yield found.start(), closing(code, found.end() - 1), "MP_OK", f"{found[1]} taken out"


def checks(code: str) -> Iterator[Change]:
    """Tests of a status: as if nothing had failed."""
    for found in re.finditer(r"\*?\b(status|code|found|named) (!=|==) (MP_OK|CU_OK|CU_NOT_READY)\b", code):
        yield found.start(), found.end(), "0" if found[2] == "!=" else "1", f"'{found[0]}' never fails"
    for found in re.finditer(r"\((status = )", code):
        end = closing(code, found.start())
        if tail := re.match(r" != MP_OK", code[end:]):
            call = re.search(r"(\w+),|(\w+)\(", code[found.end() :])
            name = arguments(code[code.index("(", found.end()) :])[2:3] if call else []
            replaced = f"((void){code[found.start() : end]}, 0)"
            yield found.start(), end + tail.end(), replaced, f"status of {(name or ['a call'])[0]} never fails"


def refusals(code: str) -> Iterator[Change]:
    """Conditions under which a function refuses: as if they never held."""
    for found in re.finditer(r"\bif (?=\()", code):
        end = closing(code, found.end())
        if re.match(r"\s*\{[^{}]*\b(mp_error_set|fail_forked)\(", code[end:]):
            condition = " ".join(code[found.end() : end].split())
            yield found.end(), end, "(0)", f"'if {condition}' never refuses"


def mutants_of(stem: str) -> list[Mutant]:
    """Every mutant of one file."""
    code = (CSRC / f"{stem}.c").read_text()
    kinds = [ordering] if stem in CALLERS[1:] else [ordering, checks]
    if stem in BACKEND:
        kinds = [calls_and_results, checks, refusals]
    made: list[Mutant] = []
    names: Counter[str] = Counter()
    for start, end, replacement, what in sorted(change for kind in kinds for change in kind(code)):
        lines = code[start:end].count("\n")  # later lines keep their numbers
        text = code[:start] + replacement + "\n" * lines + code[end:]
        function = re.findall(r"^(?:void \*\()?\*?(\w+)\(", code[:start], re.MULTILINE)[-1:]
        name = f"{what} in {function[0]}" if function else what
        names[name] += 1
        name += f" ({names[name]})" if names[name] > 1 else ""
        made.append(Mutant(f"{stem}.c:{code.count(chr(10), 0, start) + 1}", name, text, stem))
    return made


# --- PTX -----------------------------------------------------------------------------------------------------------------


def ptx_of(image: bytes) -> dict[int, str]:
    """The PTX of a fat binary by architecture.  The format is undocumented; see tests/simulator/src/fatbin.hpp."""
    texts = {}
    header, size = struct.unpack_from("<H", image, 6)[0], struct.unpack_from("<Q", image, 8)[0]
    at = header
    while at < header + size:
        kind, _, head, payload = struct.unpack_from("<HHIQ", image, at)
        if kind == 1:
            architecture = struct.unpack_from("<I", image, at + 28)[0]
            texts[architecture] = image[at + head : at + head + payload].rstrip(b"\0").decode()
        at += head + payload
    return texts


#: What becomes of an instruction, by its name; the first that changes it is taken.  Copies between registers, conversions
#: that are exact and loads of parameters have none.
SWAPS = [
    (r"^@%p", "@!%p"),
    (r"^@!%p", "@%p"),
    (r"^(setp|set)\.lt", r"\1.le"), (r"^(setp|set)\.le", r"\1.lt"), (r"^(setp|set)\.gt", r"\1.ge"),
    (r"^(setp|set)\.ge", r"\1.gt"), (r"^(setp|set)\.eq", r"\1.ne"), (r"^(setp|set)\.ne", r"\1.eq"),
    (r"^(setp|set)\.(lo|ls|hi|hs)", r"\1.ne"), (r"^(setp|set)\.(\w+)u\b", r"\1.\2"),
    (r"^add\.(s|u)(\d+)", r"sub.\1\2"), (r"^sub\.(s|u)(\d+)", r"add.\1\2"), (r"^add\.(rn\.)?f", r"sub.\1f"),
    (r"^sub\.(rn\.)?f", r"add.\1f"), (r"^mul\.(rn\.)?f(\d+)", r"add.f\2"), (r"^mul\.lo\.(\w+)", r"add.\1"),
    (r"^div\.rn\.f(\d+)", r"mul.f\1"), (r"^min", "max"), (r"^max", "min"), (r"^shl\.b(\d+)", r"shr.u\1"),
    (r"^shr\.(u|s|b)(\d+)", r"shl.b\2"), (r"^and\.b", "or.b"), (r"^or\.b", "and.b"), (r"^xor\.b", "or.b"),
    (r"^and\.pred", "or.pred"), (r"^or\.pred", "and.pred"), (r"^bra\.uni.*", "// taken out"),
    (r"^(selp\.\w+\s+%\w+), ([^,]+), ([^,]+),", r"\1, \3, \2,"),
    (r"^cvt\.rn\.(bf16|f16|f32)", r"cvt.rz.\1"),
    (r"^(ld\.global\S*|st\.global\S*)(.*)\[(%\w+)\+(\d+)\]", lambda m: f"{m[1]}{m[2]}[{m[3]}+{int(m[4]) // 2}]"),
    (r"^(ld\.global\.v4\S*\s+)\{(%\w+), ?(%\w+)", r"\1{\3, \2"),
    (r"^(ld\.global\.\w(\d+)\s+%\w+), \[(%\w+)\]", lambda m: f"{m[1]}, [{m[3]}+{int(m[2]) // 8}]"),
    (r"^(mov\.u32\s+%\w+), %(tid|ctaid|ntid|nctaid)\.x", r"\1, 0"),
    (r"^(mov\.b(?:32|64)\s+)\{(%\w+), ?(%\w+)\}", r"\1{\3, \2}"),
    (r"^(mov\.b(?:32|64)\s+%\w+), \{(%\w+), ?(%\w+)\}", r"\1, {\3, \2}"),
    (r"^st\.global.*", "// taken out"),
    (r"^(mov\.\w+\s+%\w+), (-?\d+)$", lambda m: f"{m[1]}, {int(m[2]) + 1}"),
    (r"^((?:mad|mul)\.\S+\s+.*), (\d+)(?=,|$)", lambda m: f"{m[1]}, {int(m[2]) + 1}"),
    (r"^mad\.lo\.(\w+)\s+(%\w+), ([^,]+), ([^,]+), ([^,;]+)", r"mad.lo.\1 \2, \3, \4, 0"),
]  # fmt: skip


def mutate_instruction(line: str) -> str | None:
    """Another instruction, or None where no rule applies."""
    body = line.strip().rstrip(";")
    for pattern, replacement in SWAPS:
        changed = re.sub(pattern, replacement, body, count=1)  # type: ignore[arg-type]
        if changed != body:
            return changed + ("" if changed.startswith("//") else ";")
    return None


def architectures_of(image: bytes) -> dict[str, list[int]]:
    """The different texts of the kernel, and the architectures that each is for: some differ in nothing but a name."""
    found: dict[str, list[int]] = defaultdict(list)
    for architecture, text in sorted(ptx_of(image).items()):
        found[re.sub(r"(?m)^\.target .*$", "", text)].append(architecture)
    return {ptx_of(image)[mine[0]]: mine for mine in found.values()}


def ptx_mutants(text: str, architecture: int) -> list[Mutant]:
    """Every mutant of the kernel's text for an architecture."""
    lines, made = text.split("\n"), []
    for number, line in enumerate(lines):
        changed = mutate_instruction(line)
        if changed is None or not line.strip().endswith(";") or line.strip().startswith("."):
            continue
        mutated = "\n".join([*lines[:number], changed, *lines[number + 1 :]])
        what = f"`{line.strip()}` becomes `{changed}`"
        made.append(Mutant(f"sm_{architecture}.ptx:{number + 1}", what, mutated, str(architecture)))
    return made


def kind_of(mutant: Mutant) -> str:
    """What sort of instruction it changes: its name, or that it depends on a predicate."""
    return re.sub(r"\d+$", "", mutant.what.split()[0]) if mutant.what.startswith("`@") else mutant.what.split()[0]


def sample_of(mutants: Sequence[Mutant], size: int, seed: int = 1) -> list[Mutant]:
    """At most so many, by chance, each kind of instruction in proportion and at least once."""
    if not size or len(mutants) <= size:
        return list(mutants)
    kinds: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in random.Random(seed).sample(mutants, len(mutants)):
        kinds[kind_of(mutant)].append(mutant)
    chosen = [mine.pop() for mine in kinds.values()][:size]
    rest = [mutant for mine in kinds.values() for mutant in mine]
    chosen += random.Random(seed).sample(rest, size - len(chosen))
    return sorted(chosen, key=lambda m: int(m.place.rpartition(":")[2]))
