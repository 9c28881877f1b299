"""Runs a training script with lean networks, without editing the script."""

from __future__ import annotations

import builtins
import os
import re
import runpy
import shutil
import signal
import statistics
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from zoo.errors import ConfigError
from zoo.remat._budget import Budget
from zoo.remat._lean import context_of_call, is_lean, why_plain
from zoo.remat._limit import watch_optimizers
from zoo.tables import Cell, bytes_text, counted, markdown_table
from zoo.torch_internals.data import tensors_of

WRAPPERS = (DataParallel, DistributedDataParallel)  # the network inside counts as the outermost module
PERIOD = 11  # one of 11 steps runs plainly for the comparison; prime, because optimizers may alternate
MAX_TIMES = 10_000  # time at most so many steps


@dataclass
class Network:
    """Record of a network that a script trains.

    Args:
    - `title`: class and number of parameters.
    - `budget`: budget of this network; a limit in bytes applies to the process.
    - `num_calls`: number of calls with gradients.
    - `why_plain`: why the last call ran plainly; "" if it ran lean.
    - `is_trained`: whether backward has reached one of its calls. Constructors may call parts to learn their sizes.
    """

    title: str
    budget: Budget
    num_calls: int = 0
    why_plain: str = ""
    is_trained: bool = False

    def watch(self, output: Any) -> None:
        """Note whether backward reaches the output of a call."""
        nodes = [] if self.is_trained else [each.grad_fn for each in tensors_of(output) if each.grad_fn is not None]
        for node in nodes:
            node.register_prehook(self._note_backward)

    def _note_backward(self, _: Any) -> None:
        self.is_trained = True


class Steps:
    """Times the steps from one call of any optimizer to the next."""

    def __init__(self) -> None:
        self.lean_s: list[float] = []
        self.plain_s: list[float] = []
        self.number = 0
        self._begin: float | None = None

    def note(self, is_plain: bool) -> None:
        """Note the end of a step, which ran plainly or lean."""
        now = time.perf_counter()
        if self._begin is not None and self.number < MAX_TIMES:
            (self.plain_s if is_plain else self.lean_s).append(now - self._begin)
        self._begin, self.number = now, self.number + 1

    def __str__(self) -> str:
        """Return the median times; "" without steps."""
        if not self.lean_s:
            return ""
        lean_ms = 1000 * statistics.median(self.lean_s)
        text = f"step: {lean_ms:.4g} ms lean"
        if self.plain_s:
            plain_ms = 1000 * statistics.median(self.plain_s)
            text += f", {plain_ms:.4g} ms plain: {lean_ms / plain_ms:.2f} of the time"
        return f"{text} ({counted(self.number, 'step')} of an optimizer)"


class LeanCalls:
    """Context manager that runs the outermost module calls with gradients as `zoo.lean` would run them.

    Modules without parameters, such as criteria, and calls of networks that need no gradients run plainly.

    Args:
    - `budget`: as for `zoo.lean`, for each network.
    - `compare`: run one of `PERIOD` steps plainly, to measure its time.

    ``has_spawned`` tells whether other processes have their own calls.
    """

    def __init__(self, budget: float | int | str | None = None, compare: bool = False) -> None:
        Budget.parse(budget)  # raises for an invalid one
        self.options = self._budget, self._compare = budget, compare
        self._networks: WeakKeyDictionary[nn.Module, Network] = WeakKeyDictionary()
        self.networks: list[Network] = []
        self._steps = Steps()
        self.has_spawned = False
        self._of_thread = threading.local()

    def __enter__(self) -> LeanCalls:
        watch_optimizers()
        self._hook = register_optimizer_step_post_hook(lambda *_: self._steps.note(self._is_plain_step))
        self._call = call = nn.Module.__call__
        of_thread, run = self._of_thread, self._run

        def lean_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or getattr(of_thread, "is_inside", False):
                return call(module, *args, **kwargs)
            return run(module, args, kwargs)

        nn.Module.__call__ = lean_call  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        nn.Module.__call__ = self._call  # type: ignore[method-assign]
        self._hook.remove()

    @property
    def _is_plain_step(self) -> bool:
        return self._compare and self._steps.number % PERIOD == PERIOD - 1

    def _run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an outermost call."""
        if isinstance(module, WRAPPERS) or next(module.parameters(), None) is None:
            return self._call(module, *args, **kwargs)
        network = self._network(module, args, kwargs)
        self._of_thread.is_inside = True
        try:
            with self._context(network, module, args, kwargs):
                output = self._call(module, *args, **kwargs)
        finally:
            self._of_thread.is_inside = False
        if network is not None:
            network.watch(output)
        return output

    def _network(self, module: nn.Module, args: Any, kwargs: Any) -> Network | None:
        """Count a call of a module and return its record; None if the call needs no gradients."""
        trains = torch.is_grad_enabled() and (
            any(each.requires_grad for each in module.parameters())
            or any(each.requires_grad for each in tensors_of((args, kwargs)))
        )
        if not trains or is_lean(module):
            return None
        known = self._networks.get(module)
        if known is None:
            count = sum(each.numel() for each in module.parameters())
            known = Network(f"{type(module).__name__}, {count / 1e6:.3g} M parameters", Budget.parse(self._budget))
            self._networks[module] = known
            self.networks.append(known)
        known.num_calls += 1
        known.why_plain = why_plain(module)
        return known

    def _context(self, known: Network | None, module: nn.Module, args: Any, kwargs: Any) -> AbstractContextManager[Any]:
        if known is None or self._is_plain_step or known.why_plain:
            return nullcontext()
        return context_of_call(module, known.budget, args, kwargs)

    def report(self) -> str:
        """Return a table with one row per network, and one line per network that ran plainly."""
        lines = []
        networks = [each for each in self.networks if each.is_trained]
        lean = [each for each in networks if not each.why_plain]
        if lean:
            headers = ["network", "calls", "saved, plain", "saved, lean", "lean / plain"]
            lines += [markdown_table(headers, [self._row(each) for each in lean])]
        for each in networks:
            if each.why_plain:
                lines.append(f"{each.title}: ran plainly, because {each.why_plain}")
        if not networks:
            lines.append("no module with parameters was called with gradients that a backward computed")
        elif lean:
            lines += [
                *filter(None, [str(self._steps)]),
                f"peak of the process: {_peak()}",
                "zoo.lean(model) does the same in the script; zoo.check(model, *inputs) compares all bits",
            ]
        return "\n".join(lines)

    def _row(self, network: Network) -> list[Cell]:
        limiter = network.budget.limiter
        plain, lean = (0, 0) if limiter is None else limiter.saved_bytes()
        share = lean / plain if plain else None
        return [network.title, network.num_calls, bytes_text(plain), bytes_text(lean), share]


def _peak() -> str:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return f"{bytes_text(torch.cuda.max_memory_allocated())} allocated on the GPU"
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return f"{bytes_text(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)} of main memory"


def run_script(target: str, is_module: bool, arguments: Sequence[str], calls: LeanCalls) -> int:
    """Run a script or a module as ``python`` would, with lean networks, and return its exit code.

    Prints the report of the calls on stderr at the end, also after an exception or an interrupt. These end the process
    as without zoo. A script may be a command of a package, such as yolo, if it is written in Python. Raises ConfigError
    for an unknown script or module.
    """
    if not is_module:
        target = _find_script(target)
    sys.argv = [target, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if is_module else str(Path(target).resolve().parent)
    if is_module and not _is_module(target):
        raise ConfigError("no module of this name can be run", target, "see python -m with the same name")
    run = partial(_run_module if is_module else _run_file, target)
    with calls, _spawned_processes_too(calls):
        try:
            run()
        except SystemExit:
            _print_report(calls)
            raise
        except BaseException as error:
            _print_report(calls)
            return _end_by(error)
    _print_report(calls)
    return 0


def _find_script(target: str) -> str:
    """Return the path of a script: a file, or a command in PATH that is written in Python."""
    if os.path.exists(target):
        return target
    found = shutil.which(target)
    if found is not None:
        with open(found, "rb") as file:
            if re.match(rb"#!.*python", file.readline()):
                return found
    raise ConfigError(
        "there is no such file, nor a command that is written in Python",
        target,
        "give the path of a script, or -m and the name of a module",
    )


def _is_module(target: str) -> bool:
    """Return whether ``python -m`` can run a module, or a package with a ``__main__``."""
    try:
        spec = find_spec(target)
        is_package = spec is not None and spec.submodule_search_locations is not None
        return spec is not None and (not is_package or find_spec(f"{target}.__main__") is not None)
    except ModuleNotFoundError:  # a parent package is missing
        return False


def _run_file(target: str) -> None:
    if os.path.isdir(target):
        runpy.run_path(target, run_name="__main__")
        return
    path = os.path.abspath(target)
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    main = types.ModuleType("__main__")
    vars(main).update(__file__=path, __builtins__=builtins)
    sys.modules["__main__"] = main  # pickle and spawned processes look up the script's definitions here
    exec(code, vars(main))


def _run_module(target: str) -> None:
    runpy.run_module(target, run_name="__main__", alter_sys=True)


def _end_by(error: BaseException) -> int:
    """Print the traceback of the script's own frames, and return its exit code; an interrupt ends the process."""
    place = error.__traceback__
    while place is not None and place.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        place = place.tb_next
    sys.excepthook(type(error), error.with_traceback(place), place)
    if isinstance(error, KeyboardInterrupt):
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return 1


def _print_report(calls: LeanCalls) -> None:
    is_elsewhere = calls.has_spawned and not any(each.is_trained for each in calls.networks)
    if os.environ.get("RANK", "0") == "0" and not is_elsewhere:
        print(f"\nzoo lean:\n{calls.report()}", file=sys.stderr, flush=True)


class _InProcess:
    """Wraps the function of a spawned process so that its networks are lean, too."""

    def __init__(self, function: Callable[..., Any], calls: LeanCalls) -> None:
        self._function, self._options = function, calls.options

    def __call__(self, index: int, *args: Any) -> Any:
        with LeanCalls(*self._options) as calls:
            try:
                return self._function(index, *args)
            finally:
                if index == 0:
                    _print_report(calls)


@contextmanager
def _spawned_processes_too(calls: LeanCalls) -> Iterator[None]:
    """Makes networks lean in processes that `torch.multiprocessing` spawns."""
    module: Any = torch.multiprocessing
    start = module.start_processes

    def start_lean(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls.has_spawned = True
        return start(_InProcess(function, calls), *args, **kwargs)

    module.start_processes = module.spawn.__globals__["start_processes"] = start_lean
    try:
        yield
    finally:
        module.start_processes = module.spawn.__globals__["start_processes"] = start
