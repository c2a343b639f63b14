"""Triton kernels to a module image. Needs no GPU and no driver: the architecture is named, not asked for.

Triton's launcher is not used, so its global settings (the allocator, the active driver) are never touched;
the kernel is launched like any other, see :mod:`smfree.cuda.triton_launch`.
"""

from __future__ import annotations

import importlib.metadata
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from smfree.cuda.cache import CompileCache
from smfree.cuda.capabilities import arch_for
from smfree.cuda.errors import ArrayError, CompileError, TritonError
from smfree.cuda.image import ModuleImage, make_image
from smfree.cuda.memory import DeviceArray
from smfree.cuda.store import key_of

MINIMUM_VERSION = (3, 6)
_METADATA = (
    "shared",
    "num_warps",
    "num_ctas",
    "tensordesc_meta",
    "global_scratch_size",
    "global_scratch_align",
    "profile_scratch_size",
    "launch_cooperative_grid",
    "launch_pdl",
)
_NUMPY_NAMES = {
    "i1": "i1",
    "i2": "i16",
    "i4": "i32",
    "i8": "i64",
    "u1": "u8",
    "u2": "u16",
    "u4": "u32",
    "u8": "u64",
    "f2": "fp16",
    "f4": "fp32",
    "f8": "fp64",
}


def triton_version() -> tuple[int, ...]:
    """The installed Triton's version without importing it, ``()`` when there is none."""
    try:
        text = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def triton_unavailable(found: tuple[int, ...] | None = None) -> str | None:
    """Why Triton kernels cannot be compiled here (needed and found version), None when they can."""
    found = triton_version() if found is None else found
    needed = ".".join(map(str, MINIMUM_VERSION))
    if not found:
        return f"needs triton {needed} or newer, found none; install triton"
    if found[:2] < MINIMUM_VERSION:
        return f"needs triton {needed} or newer (host tensor descriptors), found {'.'.join(map(str, found))}"
    return None


@dataclass(frozen=True)
class TritonDescriptor:
    """A host tensor descriptor: a device array seen through boxes of ``block`` elements.

    Refused before anything is compiled (ArrayError): base not 16-byte aligned, outer strides no multiple of
    16 bytes, block rows below 16 bytes, block edges that are no powers of two, ranks above 5, empty
    dimensions. ``strides`` (in elements) default to dense; ``padding`` fills what lies outside: ``zero`` or
    ``nan``.
    """

    array: DeviceArray
    block: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    padding: str = "zero"

    def __post_init__(self) -> None:
        shape, item = self.array.shape, self.array.dtype.itemsize
        rank = len(shape)
        if not 1 <= rank <= 5 or len(self.block) != rank or len(self.element_strides) != rank:
            raise ArrayError(
                "a tensor descriptor has 1 to 5 dimensions, and as many block edges and strides "
                f"(got shape {shape}, "
                f"block {self.block}, strides {self.element_strides}); reshape the array"
            )
        if self.array.ptr % 16:
            raise ArrayError(
                "a tensor descriptor's base must be 16-byte aligned (got address ending in "
                f"{self.array.ptr % 16:#x}); "
                f"offset the view by a multiple of {max(16 // item, 1)} elements"
            )
        if min(shape) < 1:
            raise ArrayError(
                f"a tensor descriptor has no empty dimension (got {shape}); do not launch without work"
            )
        if self.element_strides[-1] != 1:
            raise ArrayError(
                f"the innermost stride is 1 element (got {self.element_strides[-1]}); copy the array"
            )
        for axis, stride in enumerate(self.element_strides[:-1]):
            if stride * item % 16 or stride <= 0:
                raise ArrayError(
                    f"the stride of dimension {axis} is a multiple of 16 bytes (got {stride * item} bytes); "
                    f"pad the rows to a multiple of {max(16 // item, 1)} elements"
                )
        if any(edge < 1 or edge & (edge - 1) for edge in self.block):
            raise ArrayError(f"block edges are powers of two (got {self.block})")
        if self.block[-1] * item < 16:
            raise ArrayError(
                f"a block row has at least 16 bytes (got {self.block[-1] * item}); widen the block"
            )
        if self.padding not in ("zero", "nan") or (self.padding == "nan" and self.array.dtype.kind != "f"):
            raise ArrayError(
                f"padding is 'zero', or 'nan' for floats (got {self.padding!r} for {self.array.dtype})"
            )

    @property
    def element_strides(self) -> tuple[int, ...]:
        """Strides in elements, dense unless given."""
        if self.strides is not None:
            return self.strides
        shape = self.array.shape
        return tuple(int(np.prod(shape[i + 1 :], dtype=np.int64)) for i in range(len(shape)))

    @property
    def type_name(self) -> str:
        """The type in a signature, for example ``tensordesc<fp16[64, 64]>``."""
        return f"tensordesc<{type_name(self.array.dtype)}[{', '.join(map(str, self.block))}]>"


def type_name(dtype: np.dtype) -> str:
    """Triton's name of a numpy dtype, for example ``fp32``."""
    found = _NUMPY_NAMES.get(dtype.str[1:])
    if found is None:
        raise TritonError(f"Triton has no type for numpy's {dtype}; view the array as another dtype")
    return "i8" if found == "i1" else found


@dataclass(frozen=True)
class TritonSource:
    """A ``@triton.jit`` function and one specialisation of it.

    ``signature``: (name, type) in the function's order, types as Triton writes them (``*fp32``, ``i32``,
    ``tensordesc<fp16[64, 64]>``, ``constexpr``). ``constexprs``: their values by name. ``divisible_by_16``:
    names of pointers and integers that are promised to be multiples of 16, without which Triton does not
    vectorise; checked at every launch. ``options`` go to ``triton.compile`` (``num_warps``, ``num_stages``,
    ``num_ctas``, ...).
    """

    fn: Any
    signature: tuple[tuple[str, str], ...]
    constexprs: tuple[tuple[str, Any], ...] = ()
    divisible_by_16: frozenset[str] = frozenset()
    options: tuple[tuple[str, Any], ...] = ()

    def __init__(
        self,
        fn: Any,
        signature: Mapping[str, str],
        constexprs: Mapping[str, Any] | None = None,
        divisible_by_16: Sequence[str] | frozenset[str] = (),
        *,
        num_warps: int = 4,
        num_stages: int = 3,
        num_ctas: int = 1,
        **options: Any,
    ) -> None:
        if num_stages < 1:
            raise TritonError(f"num_stages is at least 1 (got {num_stages})")
        if num_warps < 1 or num_warps & (num_warps - 1):
            raise TritonError(f"num_warps is a power of two (got {num_warps})")
        constants = dict(constexprs or {})
        types = dict(signature)
        for name in constants:
            types.setdefault(name, "constexpr")
        names = list(getattr(fn, "arg_names", ()))
        if not names:
            raise TritonError(
                f"{fn!r} is no compiled Triton function; decorate it with @triton.jit (and unset "
                "TRITON_INTERPRET)"
            )
        if set(types) != set(names):
            raise TritonError(
                f"the signature of {fn.__name__} names {sorted(types)}, the function takes {names}"
            )
        without = [n for n in names if types[n] == "constexpr" and n not in constants]
        if without:
            raise TritonError(
                f"{fn.__name__}: constexpr {', '.join(without)} has no value; pass it in constexprs"
            )
        chosen = {"num_warps": num_warps, "num_stages": num_stages, "num_ctas": num_ctas, **options}
        chosen.setdefault("enable_fp_fusion", True)  # Triton 3.9 warns when it is left open
        for attribute, value in (
            ("fn", fn),
            ("signature", tuple((name, types[name]) for name in names)),
            ("constexprs", tuple((name, constants[name]) for name in names if name in constants)),
            ("divisible_by_16", frozenset(divisible_by_16)),
            ("options", tuple(sorted(chosen.items()))),
        ):
            object.__setattr__(self, attribute, value)

    @classmethod
    def for_arguments(
        cls,
        fn: Any,
        arguments: Mapping[str, Any],
        constexprs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> TritonSource:
        """The specialisation that Triton's JIT would choose for these arguments.

        Pointers and integers that are multiples of 16 are promised to be; an integer that is 1 becomes a
        constant (leave it out of the launch's arguments then); other integers are i32 where they fit, else
        i64.
        """
        signature: dict[str, str] = {}
        constants = dict(constexprs or {})
        divisible = []
        for name, value in arguments.items():
            if isinstance(value, TritonDescriptor):
                signature[name] = value.type_name
            elif isinstance(value, DeviceArray):
                signature[name] = "*" + type_name(value.dtype)
                if value.ptr % 16 == 0:
                    divisible.append(name)
            elif isinstance(value, (bool, np.bool_)):
                signature[name] = "i1"
            elif isinstance(value, (int, np.integer)):
                if int(value) == 1:
                    constants[name] = 1
                    continue
                signature[name] = _integer_type(value)
                if int(value) % 16 == 0:
                    divisible.append(name)
            elif isinstance(value, (float, np.floating)):
                signature[name] = "fp32" if isinstance(value, float) else type_name(value.dtype)
            else:
                raise TritonError(
                    f"argument {name} of {fn.__name__} has no Triton type ({type(value).__name__})"
                )
        return cls(fn, signature, constants, divisible, **options)

    @property
    def name(self) -> str:
        """The function's name, which is the kernel's."""
        return str(self.fn.__name__)

    @property
    def runtime_names(self) -> tuple[str, ...]:
        """The arguments of a launch, in order: everything that is no constant."""
        return tuple(name for name, kind in self.signature if kind != "constexpr")

    def stamp(self) -> str:
        """Changes when the function or anything it calls does."""
        return str(self.fn.cache_key)


def _integer_type(value: int | np.integer) -> str:
    if isinstance(value, np.integer):
        return type_name(value.dtype)
    if -(2**31) <= value < 2**31:
        return "i32"
    return "i64" if value < 2**63 else "u64"


def compile_triton(
    source: TritonSource, compute_capability: tuple[int, int], *, cache: CompileCache | None = None
) -> ModuleImage:
    """Compile for a compute capability, for example ``(9, 0)``, through the cache.

    Raises TritonError (Triton absent or too old), CompileError (with Triton's message).
    """
    reason = triton_unavailable()
    if reason:
        raise TritonError(f"the Triton kernel {source.name} {reason}")
    version = "Triton " + ".".join(map(str, triton_version()))
    described = [
        source.stamp(),
        repr(source.signature),
        repr(source.constexprs),
        repr(sorted(source.divisible_by_16)),
        repr(source.options),
    ]
    key = key_of(["triton", version, arch_for(compute_capability), source.name, *described])
    return (cache or CompileCache()).fetch(key, lambda: _compile(source, compute_capability, version))


def _compile(source: TritonSource, compute_capability: tuple[int, int], version: str) -> ModuleImage:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = [name for name, _ in source.signature]
    major, minor = compute_capability
    options = dict(source.options)
    started = time.perf_counter()
    try:
        compiled = triton.compile(
            ASTSource(
                fn=source.fn,
                signature=dict(source.signature),
                constexprs={(names.index(name),): value for name, value in source.constexprs},
                attrs={
                    (names.index(name),): [["tt.divisibility", 16]] for name in sorted(source.divisible_by_16)
                },
            ),
            target=GPUTarget("cuda", major * 10 + minor, 32),
            options=options,
        )
    except Exception as error:  # Triton raises whatever its passes, LLVM and ptxas raise
        raise CompileError(
            f"{version} cannot compile {source.name} for compute capability {major}.{minor} "
            f"({type(error).__name__})",
            log=str(error),
            options=[f"{name}={value}" for name, value in source.options],
        ) from error
    seconds = time.perf_counter() - started
    metadata = {name: getattr(compiled.metadata, name, None) for name in _METADATA}
    metadata |= {
        "front_end": "triton",
        "signature": [[n, t] for n, t in source.signature if t != "constexpr"],
        "divisible_by_16": sorted(source.divisible_by_16),
    }
    return make_image(
        name=source.name,
        arch=arch_for(compute_capability),
        ptx=compiled.asm["ptx"],
        cubin=compiled.asm["cubin"],
        log="",
        compiler=version,
        options=tuple(f"{name}={value}" for name, value in source.options),
        compile_seconds=seconds,
        metadata=metadata,
    )
