"""cuLibrary* and cuKernelGetFunction: images that belong to no context and are loaded into one on demand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cuda.bindings import driver as cuda

from smfree.emulator.driver.base import Needs, entry
from smfree.emulator.driver.errors import CUresult, Refusal, invalid
from smfree.emulator.driver.modules import LoadedModule, ModuleCalls, name_of, parse_image, text_of
from smfree.emulator.process import Context


@dataclass(slots=True, eq=False)
class Library:
    """PTX text, and the module of each context that asked for it (by device ordinal)."""

    handle: int
    text: str
    modules: dict[int, LoadedModule] = field(default_factory=dict)
    kernels: dict[str, int] = field(default_factory=dict)
    """Kernel name -> CUkernel handle."""


@dataclass(slots=True, eq=False)
class LibraryKernel:
    """A kernel of a library, in no context yet."""

    library: Library
    name: str


class LibraryCalls(ModuleCalls):
    """Options are accepted and ignored: the emulator has neither a compiler nor lazy loading."""

    @entry(1, Needs.INIT)
    def cuLibraryLoadData(
        self,
        code: Any,
        jitOptions: Any,
        jitOptionsValues: Any,
        numJitOptions: int,
        libraryOptions: Any,
        libraryOptionValues: Any,
        numLibraryOptions: int,
    ) -> Any:
        library = Library(0, text_of(code))
        tree = parse_image(library.text)
        library.handle = self.process.name(library)
        library.kernels = {name: self.process.name(LibraryKernel(library, name)) for name in tree.kernels}
        return cuda.CUlibrary(library.handle)

    @entry(0, Needs.INIT)
    def cuLibraryUnload(self, library: Any) -> None:
        found = self._find(library, Library, "library")
        for module in found.modules.values():
            if module.handle in self.process.objects:
                self._unload(module)
        for handle in (*found.kernels.values(), found.handle):
            del self.process.objects[handle]

    @entry(1, Needs.INIT)
    def cuLibraryGetKernel(self, library: Any, name: Any) -> Any:
        found, wanted = self._find(library, Library, "library"), name_of(name)
        if wanted not in found.kernels:
            raise Refusal(
                CUresult.CUDA_ERROR_NOT_FOUND,
                f"no kernel {wanted!r} in the library; it has {', '.join(found.kernels) or 'none'}",
            )
        return cuda.CUkernel(found.kernels[wanted])

    @entry(1)
    def cuLibraryGetModule(self, library: Any) -> Any:
        found = self._find(library, Library, "library")
        return cuda.CUmodule(self._in_context(found, self._context()).handle)

    @entry(1)
    def cuKernelGetFunction(self, kernel: Any) -> Any:
        found = self._find(kernel, LibraryKernel, "kernel")
        module = self._in_context(found.library, self._context())
        return cuda.CUfunction(module.functions[found.name].handle)

    def _in_context(self, library: Library, context: Context) -> LoadedModule:
        module = library.modules.get(context.ordinal)
        if module is None or module.handle not in self.process.objects:
            module = library.modules[context.ordinal] = self._load(library.text)
        return module

    @entry(0)
    def cuFuncLoad(self, function: Any) -> None:
        """Functions are loaded with their module."""
        if function is None:
            raise invalid("function is None")
        self._function(function)
