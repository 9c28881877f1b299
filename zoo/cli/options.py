"""Options of a command line, declared once: a field is an option, and the docstring below it is its help text.

    @dataclass(frozen=True, kw_only=True)
    class Resize(Command):
        '''Resize images.'''

        images: tuple[Path, ...] = argument("IMAGE")
        '''Image files.'''
        workers: WholeNumber = option("-j", default=4)
        '''Processes that read images.'''

`add_options` adds ``IMAGE [IMAGE ...]`` and ``-j/--workers N`` to a parser, and `parsed` returns the ``Resize``. The
type of a field determines how its text is parsed:

- ``bool`` is a flag, ``Literal[...]`` a choice, ``tuple[X, ...]`` one or more ``X``, ``X | None`` has no default;
- ``Annotated[X, convert]`` calls ``convert(text)``, which raises argparse.ArgumentTypeError for wrong text;
- any other type is called with the text.

Options of the same name have the same meaning in all commands. A mixin such as `DataOptions` declares them once.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import inspect
import os
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from zoo.data.sources.location import DataName, DataPath, parse_data_path
from zoo.errors import ConfigError, escape

METAVARS = {int: "N", float: "X", str: "NAME", Path: "FILE"}


def option(*names: str, default: Any = None, **settings: Any) -> Any:
    """Return the field of an option. It is called --FIELD-NAME unless ``names`` contains a long name.

    Args:
    - `names`: other names, such as "-j".
    - `default`: value if the option is not given; the help text shows it.
    - `settings`: more arguments of ``ArgumentParser.add_argument``, such as ``metavar``.
    """
    return field(default=default, metadata={"names": names, "settings": settings})


def argument(metavar: str, default: Any = MISSING, **settings: Any) -> Any:
    """Return the field of a positional argument. An argument with a default is optional."""
    return field(default=default, metadata={"settings": {"metavar": metavar, **settings}, "positional": True})


def whole_number(text: str) -> int:
    """Parse an integer >= 0."""
    return _at_least(0, text)


def positive(text: str) -> int:
    """Parse an integer >= 1."""
    return _at_least(1, text)


def _at_least(minimum: int, text: str) -> int:
    if not text.isdecimal() or int(text) < minimum:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {minimum}")
    return int(text)


WholeNumber = Annotated[int, whole_number]
Positive = Annotated[int, positive]
DataFolder = Annotated[DataPath | DataName, parse_data_path]


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command: its fields are its options, its docstring is the description in its help text.

    Args:
    - `command_line`: the command line of this run, recorded in the files that it writes.

    Attributes:
    - `owns_console`: whether zoo prints its log records and errors; False if the console belongs to a script.
    - `example`: a command line for the end of the help text.
    """

    owns_console: ClassVar[bool] = True
    example: ClassVar[str]

    command_line: str = field(default="", metadata={"hidden": True})

    @classmethod
    def hint(cls, name: str, options: Iterable[str]) -> str:
        """Suggest a replacement for the unknown option ``--name``; "" if none of the ``options`` is similar."""
        near = difflib.get_close_matches(name, options, 1)
        return f"the nearest is --{near[0]}" if near else ""

    def run(self) -> int:
        """Run the command and return its exit code."""
        raise NotImplementedError


class Group(NamedTuple):
    """A command with subcommands: its summary in the help text, and the subcommands by name."""

    summary: str
    kinds: Mapping[str, type[Command]]


CommandT = TypeVar("CommandT", bound=Command)


def add_options(parser: argparse.ArgumentParser, command: type[Command]) -> None:
    """Add an argument to ``parser`` for each field of a command, and --debug."""
    hints, docs = get_type_hints(command, include_extras=True), _docs(command)
    for each in _options(command):
        settings = {**_settings_of_type(hints[each.name]), **each.metadata.get("settings", {})}
        settings.setdefault("help", _help(docs.get(each.name, ""), each.default))
        if "positional" not in each.metadata:
            names = each.metadata.get("names", ())
            if not any(name.startswith("--") for name in names):
                names = (*names, f"--{each.name.replace('_', '-')}")
            parser.add_argument(*names, dest=each.name, default=each.default, **settings)
        elif each.default is MISSING:
            parser.add_argument(each.name, **settings)
        else:
            optional = "*" if "nargs" in settings else "?"
            parser.add_argument(each.name, default=each.default, **{**settings, "nargs": optional})
    parser.add_argument("--debug", action="store_true", help="Show the traceback of an error")
    parser.set_defaults(command=command, parser=parser)


def parsed(command: type[CommandT], args: argparse.Namespace, command_line: str) -> CommandT:
    """Build the command from arguments that argparse parsed with `add_options`."""
    values = {each.name: getattr(args, each.name) for each in _options(command)}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return command(**values, command_line=command_line)


def parse_all(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Parse the words. The parser of the command reports unknown words, with hints."""
    args, unknown = parser.parse_known_args(words)
    if not unknown:
        return args
    problems = [f"unrecognized arguments: {' '.join(unknown)}"]
    if "command" in args:
        command: type[Command] = args.command
        parser, options = args.parser, _long_names(command)
        names = dict.fromkeys(word[2:].partition("=")[0] for word in unknown if word.startswith("--"))
        problems += [f"--{name}: {hint}" for name in names if (hint := command.hint(name, options))]
    parser.error("; ".join(problems))


def _long_names(command: type[Command]) -> list[str]:
    """Return the names of a command's options, without dashes."""
    return [
        next(
            (name[2:] for name in each.metadata.get("names", ()) if name.startswith("--")),
            each.name.replace("_", "-"),
        )
        for each in _options(command)
        if "positional" not in each.metadata
    ]


def _options(command: type[Command]) -> list[Field[Any]]:
    """Return the fields that are options: fields of the class itself before fields of its bases."""
    options = {each.name: each for each in fields(command) if "hidden" not in each.metadata}
    names = dict.fromkeys(name for base in command.__mro__ for name in inspect.get_annotations(base))
    return [options[name] for name in names if name in options]


def _settings_of_type(hint: Any) -> dict[str, Any]:
    """Return the arguments of ``ArgumentParser.add_argument`` for values of a type."""
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (each for each in get_args(hint) if each is not types.NoneType)
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return {"type": inner[1], "metavar": METAVARS.get(inner[0])}
    if origin is tuple:
        return {**_settings_of_type(inner[0]), "nargs": "+"}
    if origin is Literal:
        return {"choices": inner}
    if hint is bool:
        return {"action": "store_true"}
    return {"type": hint, "metavar": METAVARS[hint]}


def _help(doc: str, default: Any) -> str:
    """Return the help text of an option: its docstring, and its default unless the docstring contains it."""
    text = doc.removesuffix(".").replace("%", "%%")
    if default in (MISSING, None, False, ()) or "(default: " in doc:
        return text
    shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
    return f"{text} (default: {shown})"


def _docs(command: type) -> dict[str, str]:
    """Return the docstrings below the fields of a dataclass and its bases, each as one line."""
    docs: dict[str, str] = {}
    for base in reversed(command.__mro__):
        if is_dataclass(base):
            docs |= _docs_of_module(base.__module__)[base.__name__]
    return docs


@functools.cache
def _docs_of_module(name: str) -> Mapping[str, Mapping[str, str]]:
    """Return the docstrings below the fields of each class in a module, by class and field."""
    docs: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(sys.modules[name])).body:
        if isinstance(node, ast.ClassDef):
            docs[node.name] = {}
            for above, below in pairwise(node.body):
                match above, below:
                    case ast.AnnAssign(target=ast.Name(id=key)), ast.Expr(value=ast.Constant(value=str(text))):
                        docs[node.name][key] = " ".join(text.split())
    return docs


def default_workers(most: int) -> int:
    """Return the number of cores of this process, at most ``most``."""
    # torch warns if there are more workers than cores. Only Linux has sched_getaffinity.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(most, cores)


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Options of commands that read a data set."""

    workers: WholeNumber = option("-j", default=default_workers(4))
    """Worker processes that read images, per process of the run (default: number of cores, at most 4)."""
    log_every: Positive = option("-p", default=10)
    """Batches between two log lines."""


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """Options of commands that run in several processes."""

    dist_backend: Literal["nccl", "gloo"] | None = None
    """Backend of torch.distributed (default: nccl on CUDA devices, gloo on the CPU)."""


def check_writable(*files: Path | None) -> None:
    """Raise ConfigError if an output file cannot be written, or if two options name the same file.

    A missing folder is not an error: it is created later.
    """
    paths = [os.path.realpath(file) for file in files if file is not None]
    if twice := next((path for path in paths if paths.count(path) > 1), None):
        raise ConfigError("two options name this file", twice, "give each its own file")
    for file in files:
        if file is None:
            continue
        folder = next(parent for parent in file.absolute().parents if os.path.exists(parent))
        if os.path.isdir(file) or not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
            reason = "it is a folder" if os.path.isdir(file) else f"{escape(folder)} is not a writable folder"
            raise ConfigError(f"the file cannot be written: {reason}", file, "give another path")
