"""A program as it is, with its models patched: ``python -m ddp_mp run [options] script.py arguments...``.

``ddp_mp.install`` is called first, with the options as ``MixedPrecision`` and ``Options``, and then the script or the module
(``-m module``) is run as Python runs it.  Processes that the program starts with this environment, by ``multiprocessing`` or
as a command, patch their models too: ``children/sitecustomize.py`` says how.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import inspect
import json
import os
import pkgutil
import re
import runpy
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..installing import install
from ..options import FLOATING, MixedPrecision, Options
from .command import Parser

#: Precisions that hold where neither an option nor a variable says otherwise.
PRECISION = {"param_dtype": "bfloat16", "reduce_dtype": "float32", "buffer_dtype": "none"}
#: Short names of options, beside those of their fields.
SHORT = {"full_precision_modules": "--full-precision"}
#: What children need to know is in this variable, and the folder that reads it there is on PYTHONPATH.
VARIABLE = "DDP_MP_RUN"
CHILDREN = str(Path(__file__).parent / "children")

EPILOG = """\
A type is one of float64, float32, bfloat16, float16, or none. Options that name modules may be given several times: patterns
for their names, or a class as package.module:Class. The variable DDP_MP_<FIELD>, for example DDP_MP_PARAM_DTYPE, holds where
its option is not given; a list in it is separated by commas. A model that is built with mixed_precision= keeps its precisions.
Processes that the program starts patch their models too, unless they are started without its environment.
"""


# --- values as they are written on a command line ------------------------------------------------------------------------


def dtype_of(text: str) -> torch.dtype | None:
    """A floating-point type of PyTorch by its name, or None for "none"."""
    names = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATING}
    if text.lower() == "none":
        return None
    if text.removeprefix("torch.") not in names:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(names)}, none; found {text!r}")
    return names[text.removeprefix("torch.")]


def module_of(text: str) -> type[nn.Module] | str:
    """A class of modules, written as ``package.module:Class``, or else a pattern for names as it is."""
    if ":" not in text:
        return text
    try:
        found = pkgutil.resolve_name(text)
    except Exception as error:
        raise argparse.ArgumentTypeError(f"there is no class {text!r}: {type(error).__name__}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise argparse.ArgumentTypeError(f"expected a class of torch modules, found {text!r}")
    return found


def flag_of(text: str) -> bool:
    """A truth value."""
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise argparse.ArgumentTypeError(f"expected one of 1, 0, true, false, yes, no, on, off; found {text!r}")


def number_of(text: str) -> float:
    """A number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, found {text!r}") from None


def written(value: Any) -> Any:
    """A value of an option as JSON can hold it: the text that the functions above read."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, type):
        return f"{value.__module__}:{value.__qualname__}"
    return "none" if value is None else str(value)


METAVARS: dict[Callable[[str], Any], str] = {dtype_of: "TYPE", module_of: "NAME", number_of: "NUMBER"}


# --- options of the command, one for each field --------------------------------------------------------------------------


@dataclass(frozen=True)
class Flag:
    """One field of ``MixedPrecision`` or ``Options`` as an option of the command and as an environment variable.

    Attributes:
        field: its name.
        convert: makes a value of a text; raises ``argparse.ArgumentTypeError``.
        help: what the field means, in a line.
        several: whether it may be given several times; its value is a tuple then.
        choices: the texts that are allowed; empty where ``convert`` decides.
    """

    field: str
    convert: Callable[[str], Any]
    help: str
    several: bool = False
    choices: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """As it is written on the command line."""
        full = "--" + self.field.replace("_", "-")
        return [SHORT[self.field], full] if self.field in SHORT else [full]

    @property
    def variable(self) -> str:
        """The environment variable."""
        return "DDP_MP_" + self.field.upper()

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Adds the option.  Its default is None, which means that it was not given."""
        text = self.help.replace("%", "%%")
        if self.convert is flag_of:
            parser.add_argument(*self.names, dest=self.field, action=argparse.BooleanOptionalAction, default=None, help=text)
            return
        how: dict[str, Any] = {"choices": self.choices} if self.choices else {"metavar": METAVARS.get(self.convert, "VALUE")}
        how |= {"action": "append"} if self.several else {}
        parser.add_argument(*self.names, dest=self.field, type=self.convert, help=text, **how)

    def read(self, text: str) -> Any:
        """The value that a text from the environment gives."""
        if self.several:
            return tuple(self.convert(part.strip()) for part in text.split(",") if part.strip())
        value = self.convert(text)
        if self.choices and value not in self.choices:
            raise argparse.ArgumentTypeError(f"expected one of {', '.join(self.choices)}; found {text!r}")
        return value


def flags() -> list[Flag]:
    """One for each precision and for each field of ``Options`` whose type can be written on a command line."""
    texts = described(MixedPrecision) | described(Options)
    hints = typing.get_type_hints(Options)
    found = [Flag(field, dtype_of, f"{texts.get(field, field)} (default: {PRECISION[field]})") for field in PRECISION]
    for field in dataclasses.fields(Options):
        kinds = [kind for kind in _parts(hints[field.name]) if kind is not types.NoneType]
        text = texts.get(field.name, field.name)
        if kinds == [bool]:
            found.append(Flag(field.name, flag_of, text))
        elif kinds == [float]:
            found.append(Flag(field.name, number_of, f"{text} (default: {field.default})"))
        elif kinds == [torch.dtype]:
            found.append(Flag(field.name, dtype_of, text))
        elif len(kinds) == 1 and typing.get_origin(kinds[0]) is typing.Literal:
            found.append(Flag(field.name, str, f"{text} (default: {field.default})", choices=typing.get_args(kinds[0])))
        elif len(kinds) == 1 and typing.get_origin(kinds[0]) is tuple:
            found.append(Flag(field.name, module_of, text, several=True))
    return found


def _parts(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the type alone."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def described(cls: type) -> dict[str, str]:
    """Of each field in the docstring of a class, the first sentence."""
    text = inspect.cleandoc(cls.__doc__ or "")
    found = re.findall(r"(?m)^    (\w+): ((?:.+\n?)(?:^     .+\n?)*)", text)
    return {name: _plain(body) for name, body in found}


def _plain(body: str) -> str:
    sentence = re.split(r"[.;](?:\s|$)", " ".join(body.split()))[0]
    return re.sub(r":\w+:`([^`]+)`", r"\1", sentence).replace("`", "")


# --- running -------------------------------------------------------------------------------------------------------------


def parser_of(known: Sequence[Flag]) -> Parser:
    """The parser of the command."""
    usage = "python -m ddp_mp run [options] script.py [arguments]\n       python -m ddp_mp run [options] -m module [arguments]"
    parser = Parser(
        "run", "Runs a program as Python does, and patches every DistributedDataParallel that it builds.", usage=usage
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    for flag in known:
        flag.add_to(parser)
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="run a module, as python -m does")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="script.py", help="the script, and its arguments")
    return parser


def chosen(args: argparse.Namespace, known: Sequence[Flag], environment: Mapping[str, str]) -> dict[str, Any]:
    """The value of every field that was given, by an option or else by a variable; ArgumentTypeError by name."""
    values: dict[str, Any] = {}
    for flag in known:
        given = getattr(args, flag.field)
        if given is not None:
            values[flag.field] = tuple(given) if flag.several else given
        elif environment.get(flag.variable):
            try:
                values[flag.field] = flag.read(environment[flag.variable])
            except argparse.ArgumentTypeError as error:
                raise argparse.ArgumentTypeError(f"{flag.variable}: {error}") from error
    return values


def install_with(values: Mapping[str, Any]) -> None:
    """``ddp_mp.install`` with fields by name; without any precision it patches only models that are built with their own."""
    precision = {field: values.get(field, dtype_of(text)) for field, text in PRECISION.items()}
    options = Options(**{field: value for field, value in values.items() if field not in PRECISION})
    asked = options.output_dtype is not None or any(dtype is not None for dtype in precision.values())
    install(options, mixed_precision=MixedPrecision(**precision) if asked else None)


def tell_children(values: Mapping[str, Any], environment: Any) -> None:
    """Changes the environment so that processes which are started with it call :func:`install_in_child`."""
    texts = {
        field: [written(v) for v in value] if isinstance(value, tuple) else written(value) for field, value in values.items()
    }
    environment[VARIABLE] = json.dumps(texts)
    before = environment.get("PYTHONPATH")
    paths = [path for path in before.split(os.pathsep) if path != CHILDREN] if before else []
    environment["PYTHONPATH"] = os.pathsep.join([CHILDREN, *paths])


def install_in_child(text: str) -> None:
    """What :func:`tell_children` has written, installed."""
    texts: dict[str, Any] = json.loads(text)
    by_name = {flag.field: flag for flag in flags()}
    values = {}
    for field, value in texts.items():
        flag = by_name[field]
        values[field] = tuple(map(flag.convert, value)) if flag.several else flag.convert(value)
    install_with(values)


def require_module(name: str) -> str:
    """Why a module cannot be run, or nothing.  An error inside a package that it is in is raised as it is."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise
        spec = None
    except ValueError:  # a module that has no specification, or an empty name
        spec = None
    if spec is None:
        return f"there is no module {name!r}"
    if spec.submodule_search_locations is not None and importlib.util.find_spec(f"{name}.__main__") is None:
        return f"{name!r} is a package without a module __main__, which cannot be run"
    return ""


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Runs a file, or a folder or archive with a ``__main__.py``, with ``sys.argv`` and ``sys.path`` as Python sets them."""
    sys.argv[:] = [path, *arguments]
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # the current folder, which python -m has put there
        if pkgutil.get_importer(path) is None:  # neither a folder nor an archive, which runpy puts there by itself
            sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    runpy.run_path(path, run_name="__main__")


def run_module(name: str, arguments: Sequence[str]) -> None:
    """Runs a module; ``python -m`` has put the current folder on ``sys.path`` already."""
    sys.argv[:] = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def main(arguments: Sequence[str] = ()) -> int:
    """``python -m ddp_mp run``; returns the exit status, if the program does not end the process itself."""
    known = flags()
    parser = parser_of(known)
    args = parser.parse_args(list(arguments))
    program: list[str] = args.program if args.module is None else args.module
    if not program:
        parser.error("a script is missing" if args.module is None else "-m needs the name of a module")
    if args.module is None and program[0].startswith("-"):
        parser.error(f"unrecognized arguments: {program[0]}")
    if args.module is None and not os.path.exists(program[0]):
        parser.error(f"there is no file {program[0]!r}")
    try:
        values = chosen(args, known, os.environ)
        install_with(values)
    except (argparse.ArgumentTypeError, TypeError, ValueError) as error:
        parser.error(str(error))
    if args.module is not None and (why := require_module(program[0])):
        parser.error(why)
    tell_children(values, os.environ)
    (run_script if args.module is None else run_module)(program[0], program[1:])
    return 0
