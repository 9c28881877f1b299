"""Compiles the Triton kernels of a norm ahead of time for an NVIDIA GPU, without one, and reads their machine code.

Triton compiles for any architecture with its bundled assembler, whose tools also disassemble the result.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zoo.ops.abn import triton as norm
from zoo.ops.abn.kernels import NormSettings, accumulate_dtype

TYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
KERNELS = ("statistics", "apply", "backward_reduce", "backward_apply")


class Code(NamedTuple):
    """Static properties of a compiled kernel.

    - `registers`: per thread
    - `shared_bytes`: per block
    - `spilled_bytes`: per thread, spilled from registers to memory
    - `access_bits`: width of the narrowest load or store of full-size tensors in the loop
    - `instructions`: per element, in the loop
    - `atomics`: number of atomic instructions on global memory
    """

    registers: int
    shared_bytes: int
    spilled_bytes: int
    access_bits: int
    instructions: float
    atomics: int

    def blocks(self, limits: norm.MultiprocessorLimits) -> int:
        """Return the number of blocks that are resident on a multiprocessor."""
        return norm.resident_blocks(self.registers, self.shared_bytes, norm.WARPS, limits)


class Kernel(NamedTuple):
    """A kernel compiled for one kind of tensor: its tiling, and the full-size tensors that it loads and stores."""

    tiling: norm.Tiling
    loads: int
    stores: int
    planes: int
    code: Code


def unavailable_reason() -> str | None:
    """Return why kernels cannot be compiled ahead of time, or None if they can."""
    try:
        import triton.backends.nvidia  # type: ignore

        folder = Path(triton.backends.nvidia.__file__).parent / "bin"
    except ImportError as error:
        return f"triton is not installed: {error}"
    missing = [name for name in ("ptxas", "cuobjdump") if not (folder / name).exists()]
    return f"triton came without {' and '.join(missing)}" if missing else None


def compile_kernels(
    x: Tensor, activation: str = "leaky_relu", shortcut: bool = False, capability: int = 90
) -> Mapping[str, Kernel]:
    """Return the kernels of a norm with weight and bias for x, which may be on the meta device.

    Args:
    - `activation`: the norm's activation.
    - `shortcut`: whether the norm adds a shortcut.
    - `capability`: ten times the compute capability of the GPU.
    """
    return {name: _compile_kernel(name, x, activation, shortcut, capability) for name in KERNELS}


def _compile_kernel(name: str, x: Tensor, activation: str, shortcut: bool, capability: int) -> Kernel:
    vector = torch.empty(x.shape[1], dtype=accumulate_dtype(x.dtype), device="meta")
    settings = NormSettings(vector, vector, 1e-5, activation, 1.0 if activation == "elu" else 0.01)
    other = x if shortcut else None
    inverse = (*settings[2:], torch.finfo(x.dtype).eps / 2)
    loads, stores, planes, tensors, constants = {
        "statistics": (1, 0, 3, (x,), ()),
        "apply": (1, 1, 0, (x, x, other, *[vector] * 4), settings[2:]),
        "backward_reduce": (2, 0, 2, (x, x, other, vector, vector), inverse),
        "backward_apply": (2, 1, 0, (x, x, other, *[vector] * 5, x, other), inverse),
    }[name]
    loads += shortcut and name != "statistics"
    stores += shortcut and name == "backward_apply"
    tiling = norm.tiling_of(x, reducing=planes > 0)
    placeholders, numbers = norm.placeholder_arguments(tiling, accumulate_dtype(x.dtype), tensors, constants, planes)
    types = tuple(_type_of(argument) for argument in (*placeholders, *numbers))
    code, shared_bytes = _compile(name, types, numbers, x.dtype, capability)
    return Kernel(tiling, loads, stores, planes, _read(code, shared_bytes, x.element_size() * loads))


def _type_of(argument: Any) -> str:
    """Return Triton's type name of an argument that is not a constexpr."""
    dtype = argument.dtype if isinstance(argument, Tensor) else argument
    if isinstance(dtype, torch.dtype):
        return f"*{TYPES[dtype]}"
    return "None" if argument is None else "i64" if isinstance(argument, int) and argument >= 2**31 else "i32"


@functools.lru_cache(maxsize=256)
def _compile(
    name: str, types: tuple[str, ...], numbers: tuple[Any, ...], dtype: torch.dtype, capability: int
) -> tuple[bytes, int]:
    """Return the cubin of a kernel for arguments of those types, and the shared memory of a block in bytes.

    ``numbers`` are the values of the last arguments, some of which are constexpr; the accumulation dtype follows.
    Pointers are assumed to be 16-byte aligned.
    """
    import triton.language as tl  # type: ignore
    from triton.backends.compiler import GPUTarget  # type: ignore
    from triton.compiler import ASTSource, compile  # type: ignore

    from zoo.ops.abn import triton_kernels

    jitted = getattr(triton_kernels, name)
    values = [None] * (len(types) - len(numbers)) + [*numbers, tl.float64 if dtype == torch.float64 else tl.float32]
    signature, constants, attributes = {}, {}, {}
    for place, (parameter, value) in enumerate(zip(jitted.params, values, strict=True)):
        constant = parameter.is_constexpr or types[place] == "None"
        signature[parameter.name] = "constexpr" if constant else parameter.annotation_type or types[place]
        if constant:
            constants[(place,)] = value
        elif types[place].startswith("*"):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(jitted, signature, constants, attributes)
    options = {"num_warps": norm.WARPS, "enable_fp_fusion": True}
    compiled = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return compiled.asm["cubin"], compiled.metadata.shared


@functools.lru_cache(maxsize=256)
def _read(code: bytes, shared_bytes: int, bytes_per_element: int) -> Code:
    """Return the properties of a cubin whose loop loads ``bytes_per_element``."""
    listing, usage = _dump(code, "-sass"), _dump(code, "-res-usage")
    used = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    lines = [(int(at, 16), text.strip()) for at, text in re.findall(r"/\*([0-9a-f]{4,6})\*/\s+([^;]*);", listing)]
    operations = [(at, re.sub(r"^@\S+ ", "", text)) for at, text in lines]
    loops = []
    for at, text in operations:
        target = re.match(r"BRA\S* .*?0x([0-9a-f]+)", text)
        if target is not None and int(target[1], 16) < at:
            body = [operation for place, operation in operations if int(target[1], 16) <= place <= at]
            loops += [body] if any(operation.startswith("LDG") for operation in body) else []
    body = min(loops, key=len)
    loaded = [_bits(operation) for operation in body if operation.startswith("LDG")]
    stored = [_bits(operation) for operation in body if operation.startswith("STG")]
    elements = sum(loaded) / 8 / bytes_per_element
    return Code(
        registers=used["REG"],
        shared_bytes=shared_bytes,
        spilled_bytes=used["STACK"] + used["LOCAL"],
        access_bits=min(loaded + stored),
        instructions=len(body) / elements,
        atomics=sum(operation.startswith(("ATOMG", "RED", "ATOM.")) for _, operation in operations),
    )


def _bits(operation: str) -> int:
    """Return how many bits a load or store moves per thread."""
    width = re.search(r"\.(?:[US](8|16)|(64|128|256))\b", operation.split()[0])
    return 32 if width is None else int(width[1] or width[2])


def _dump(code: bytes, option: str) -> str:
    """Return what the tool that reads machine code prints with an option."""
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        done = subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
