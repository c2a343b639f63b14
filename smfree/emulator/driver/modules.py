"""Modules and functions: PTX in, handles out."""

from __future__ import annotations

import ctypes
import functools
import re
from dataclasses import dataclass, field
from typing import Any

from cuda.bindings import driver as cuda

from smfree.emulator.driver.base import DriverBase, entry
from smfree.emulator.driver.errors import CUresult, Refusal, invalid, unsupported
from smfree.emulator.errors import PtxError, Unsupported
from smfree.emulator.node import DeviceState
from smfree.emulator.process import AllocationKind, Context
from smfree.emulator.ptx.ast import GlobalVar, Kernel, Module
from smfree.emulator.ptx.check import load

PORTABLE_SHARED_BYTES = 48 * 1024
_ELF, _FATBIN = b"\x7fELF", b"\x50\xed\x55\xba"
_TARGET = re.compile(r"sm_(\d+)(\d)([af]?)$")


@dataclass(slots=True, eq=False)
class LoadedModule:
    """One module in one context. ``symbols``: address and size in bytes of each variable."""

    handle: int
    context: Context
    tree: Module
    symbols: dict[str, tuple[int, int]]
    functions: dict[str, LoadedFunction] = field(default_factory=dict)

    @property
    def device(self) -> DeviceState:
        return self.context.device

    @property
    def addresses(self) -> dict[str, int]:
        """Variable name -> device address."""
        return {name: address for name, (address, _) in self.symbols.items()}


@dataclass(slots=True, eq=False)
class LoadedFunction:
    """One kernel of a module and what the host set or said about it.

    ``registers`` and ``local_bytes`` are None until :meth:`Driver.describe_function`: PTX tells neither.
    """

    handle: int
    module: LoadedModule
    kernel: Kernel
    max_dynamic_shared_bytes: int
    registers: int | None = None
    local_bytes: int | None = None
    carveout: int = -1
    non_portable_cluster: bool = False

    @property
    def context(self) -> Context:
        return self.module.context

    @property
    def name(self) -> str:
        return self.kernel.name

    @property
    def max_threads(self) -> int:
        """Threads per CTA that a launch may ask for: the kernel's own bound or the device's."""
        limit = self.module.device.profile.device.max_threads_per_block
        for bound in (self.kernel.reqntid, self.kernel.maxntid):
            if bound is not None:
                limit = min(limit, bound[0] * bound[1] * bound[2])
        return limit

    def needs_registers(self, purpose: str) -> int:
        """Registers per thread; a refusal when nobody said."""
        if self.registers is None:
            raise unsupported(
                f"{purpose} needs the registers of kernel {self.name}, which PTX does not tell; "
                "call Driver.describe_function(function, registers=..., local_bytes=...) with ptxas's numbers"
            )
        return self.registers


@functools.lru_cache(maxsize=256)
def _parse(text: str) -> Module:
    """Parse and check. Trees are immutable, so equal texts share one."""
    return load(text)


class ModuleCalls(DriverBase):
    """cuModule*, cuFunc*Attribute and the side channel for registers."""

    @entry(1)
    def cuModuleLoadData(self, image: Any) -> Any:
        return cuda.CUmodule(self._load(text_of(image)).handle)

    @entry(1)
    def cuModuleLoadDataEx(self, image: Any, numOptions: int, options: Any, optionValues: Any) -> Any:
        for option, count in ((options, "options"), (optionValues, "optionValues")):
            if int(numOptions) > len(option or ()):
                raise invalid(f"numOptions is {numOptions}, {count} has {len(option or ())} entries")
        return cuda.CUmodule(self._load(text_of(image)).handle)

    def _load(self, text: str) -> LoadedModule:
        context = self._context()
        tree = parse_image(text)
        _check_target(context.device, tree.target)
        missing = [var.name for var in tree.globals.values() if var.is_extern]
        if missing:
            raise Refusal(
                CUresult.CUDA_ERROR_NOT_FOUND, f"no module defines the extern variables {', '.join(missing)}"
            )
        symbols = {
            name: (self._place_variable(context, var), var.size_bytes) for name, var in tree.globals.items()
        }
        for var in tree.globals.values():
            for offset, target in var.relocations:
                if target.name not in symbols:
                    raise unsupported(f"variable {var.name} holds the address of {target.name}, no variable")
                value = symbols[target.name][0] + target.offset
                context.device.memory.write(symbols[var.name][0] + offset, value.to_bytes(8, "little"))
        module = LoadedModule(0, context, tree, symbols)
        module.handle = self.process.name(module)
        context.modules[module.handle] = module
        for kernel in tree.kernels.values():
            self._add_function(module, kernel)
        return module

    def _place_variable(self, context: Context, var: GlobalVar) -> int:
        size, label = max(1, var.size_bytes), f".{var.space} {var.name}"
        try:
            address = context.allocate(size, max(16, var.align), label, AllocationKind.VARIABLE)
        except MemoryError as error:
            raise Refusal(CUresult.CUDA_ERROR_OUT_OF_MEMORY, str(error)) from None
        context.device.memory.write(address, var.init.ljust(size, b"\0"))
        return address

    def _add_function(self, module: LoadedModule, kernel: Kernel) -> None:
        limit = max(0, PORTABLE_SHARED_BYTES - kernel.static_shared_bytes)
        function = LoadedFunction(0, module, kernel, limit)
        function.registers, function.local_bytes = self.process.described.get(kernel.name, (None, None))
        function.handle = self.process.name(function)
        module.functions[kernel.name] = function

    @entry(0)
    def cuModuleUnload(self, hmod: Any) -> None:
        self._unload(self._find(hmod, LoadedModule, "module"))

    def _unload(self, module: LoadedModule) -> None:
        self._synchronize(module.context)
        for address, _ in module.symbols.values():
            module.context.free(address)
        for function in module.functions.values():
            del self.process.objects[function.handle]
        del self.process.objects[module.handle], module.context.modules[module.handle]

    @entry(1)
    def cuModuleGetFunction(self, hmod: Any, name: Any) -> Any:
        module, wanted = self._find(hmod, LoadedModule, "module"), name_of(name)
        if wanted not in module.functions:
            raise Refusal(
                CUresult.CUDA_ERROR_NOT_FOUND,
                f"no kernel {wanted!r} in the module; it has {', '.join(module.functions) or 'none'}. "
                'Declare kernels extern "C" or look up the mangled name',
            )
        return cuda.CUfunction(module.functions[wanted].handle)

    @entry(2)
    def cuModuleGetGlobal(self, hmod: Any, name: Any) -> tuple[Any, int]:
        module, wanted = self._find(hmod, LoadedModule, "module"), name_of(name)
        if wanted not in module.symbols:
            raise Refusal(
                CUresult.CUDA_ERROR_NOT_FOUND,
                f"no variable {wanted!r} in the module; it has {', '.join(module.symbols) or 'none'}",
            )
        address, size = module.symbols[wanted]
        return cuda.CUdeviceptr(address), size

    @entry(1)
    def cuFuncGetModule(self, hfunc: Any) -> Any:
        return cuda.CUmodule(self._function(hfunc).module.handle)

    @entry(1)
    def cuFuncGetName(self, hfunc: Any) -> bytes:
        return self._function(hfunc).name.encode()

    @entry(1)
    def cuFuncGetAttribute(self, attrib: Any, hfunc: Any) -> int:
        function, name = self._function(hfunc), attrib.name.removeprefix("CU_FUNC_ATTRIBUTE_")
        kernel, spec = function.kernel, function.module.device.profile.device
        match name:
            case "MAX_THREADS_PER_BLOCK":
                return function.max_threads
            case "SHARED_SIZE_BYTES":
                return kernel.static_shared_bytes
            case "CONST_SIZE_BYTES":
                return sum(v.size_bytes for v in function.module.tree.globals.values() if v.space == "const")
            case "LOCAL_SIZE_BYTES":
                function.needs_registers("CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES")
                return function.local_bytes or 0
            case "NUM_REGS":
                return function.needs_registers("CU_FUNC_ATTRIBUTE_NUM_REGS")
            case "PTX_VERSION":
                major, minor = function.module.tree.version.split(".")[:2]
                return int(major) * 10 + int(minor)
            case "BINARY_VERSION":
                return spec.compute_major * 10 + spec.compute_minor
            case "CACHE_MODE_CA":
                return 0
            case "MAX_DYNAMIC_SHARED_SIZE_BYTES":
                return function.max_dynamic_shared_bytes
            case "PREFERRED_SHARED_MEMORY_CARVEOUT":
                return function.carveout
            case "CLUSTER_SIZE_MUST_BE_SET":
                return int(kernel.explicit_cluster and kernel.cluster_dims is None)
            case "REQUIRED_CLUSTER_WIDTH" | "REQUIRED_CLUSTER_HEIGHT" | "REQUIRED_CLUSTER_DEPTH":
                axis = ("WIDTH", "HEIGHT", "DEPTH").index(name.removeprefix("REQUIRED_CLUSTER_"))
                return 0 if kernel.cluster_dims is None else kernel.cluster_dims[axis]
            case "NON_PORTABLE_CLUSTER_SIZE_ALLOWED":
                return int(function.non_portable_cluster)
        raise invalid(f"the emulator has no answer for {attrib.name}")

    @entry(0)
    def cuFuncSetAttribute(self, hfunc: Any, attrib: Any, value: int) -> None:
        function, name = self._function(hfunc), attrib.name.removeprefix("CU_FUNC_ATTRIBUTE_")
        if name == "MAX_DYNAMIC_SHARED_SIZE_BYTES":
            optin = function.module.device.profile.device.shared_bytes_per_block_optin
            static = function.kernel.static_shared_bytes
            if value < 0 or value + static > optin:
                raise invalid(
                    f"kernel {function.name}: {value} bytes of dynamic and {static} of static shared memory "
                    f"exceed the device's {optin} bytes per block (MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)"
                )
            function.max_dynamic_shared_bytes = value
        elif name == "PREFERRED_SHARED_MEMORY_CARVEOUT":
            if not -1 <= value <= 100:
                raise invalid(f"the carveout is a percentage or -1, got {value}")
            function.carveout = value
        elif name == "NON_PORTABLE_CLUSTER_SIZE_ALLOWED":
            function.non_portable_cluster = bool(value)
        else:
            raise invalid(f"{attrib.name} cannot be set (or the emulator does not know it)")

    def _function(self, handle: Any) -> LoadedFunction:
        return self._find(handle, LoadedFunction, "kernel function")

    def describe_function(self, function: Any, *, registers: int, local_bytes: int = 0) -> None:
        """Tell what ptxas found: registers per thread and bytes of local memory (stack and spills).

        ``function``: a CUfunction, or a kernel's name, which describes the loaded kernels of that name and
        those loaded later. Occupancy, cooperative launches and two function attributes need it: PTX says
        neither.
        """
        if not 1 <= registers <= 255 or local_bytes < 0:
            raise ValueError(
                f"registers must be 1..255 and local_bytes not negative, got {registers}, {local_bytes}"
            )
        with self.node.lock:
            if isinstance(function, str):
                self.process.described[function] = registers, local_bytes
                loaded = [
                    item
                    for item in self.process.objects.values()
                    if isinstance(item, LoadedFunction) and item.name == function
                ]
            else:
                loaded = [self._function(function)]
            for item in loaded:
                item.registers, item.local_bytes = registers, local_bytes


def parse_image(text: str) -> Module:
    """The tree of a PTX text; CUDA_ERROR_INVALID_PTX with the line otherwise, NOT_SUPPORTED for what is not
    modelled."""
    try:
        return _parse(text)
    except PtxError as error:
        raise Refusal(CUresult.CUDA_ERROR_INVALID_PTX, str(error)) from None
    except Unsupported as error:
        raise unsupported(str(error)) from None


def text_of(image: Any) -> str:
    """PTX text from an address or a buffer; cubins and fatbins are refused by name."""
    if image is None or (isinstance(image, int) and image == 0):
        raise invalid("image is NULL")
    data = ctypes.string_at(image) if isinstance(image, int) else bytes(memoryview(image))
    for magic, what in ((_ELF, "a cubin"), (_FATBIN, "a fatbin")):
        if data.startswith(magic):
            raise Refusal(
                CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU,
                f"the image is {what}; the emulated GPU runs PTX. Load the module image's PTX instead",
            )
    try:
        return data.split(b"\0", 1)[0].decode()
    except UnicodeDecodeError:
        raise Refusal(CUresult.CUDA_ERROR_INVALID_IMAGE, "the image is no PTX text") from None


def _check_target(device: DeviceState, target: str) -> None:
    """Refuse PTX that this device could not run: newer, or specific to another architecture."""
    found = _TARGET.match(target)
    if found is None:
        raise Refusal(CUresult.CUDA_ERROR_INVALID_PTX, f".target {target!r} is no sm_XY")
    wanted, suffix = (int(found[1]), int(found[2])), found[3]
    spec = device.profile.device
    have = spec.compute_capability
    fits = wanted <= have
    if suffix == "a":
        fits = wanted == have
    elif suffix == "f":
        fits = wanted[0] == have[0] and wanted[1] <= have[1]
    if not fits:
        rule = {
            "a": "only that very architecture",
            "f": "only its family",
            "": "that architecture or a newer one",
        }
        raise Refusal(
            CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU,
            f"the PTX targets {target}, which runs on {rule[suffix]}; {spec.name} is sm_{have[0]}{have[1]}",
        )


def name_of(name: Any) -> str:
    """A symbol's name; the real binding takes bytes."""
    if not isinstance(name, bytes):
        raise TypeError(f"expected bytes, {type(name).__name__} found")
    return name.decode()
