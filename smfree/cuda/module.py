"""Loaded modules and their kernels."""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from smfree.cuda.arguments import pack
from smfree.cuda.errors import (
    ArgumentError,
    CudaHostError,
    DriverError,
    KernelNotFoundError,
    LaunchError,
    VariableNotFoundError,
)
from smfree.cuda.image import FunctionFacts, ModuleImage
from smfree.cuda.launch import DEFAULT_SHARED_BYTES, PORTABLE_CLUSTER, LaunchShape, as_dims
from smfree.cuda.memory import Allocation, DeviceArray
from smfree.cuda.streams import Stream
from smfree.cuda.triton_launch import expand

if TYPE_CHECKING:
    from smfree.cuda.device import Device

_LOAD_FAILURES = (
    "UNSUPPORTED_PTX_VERSION",
    "NO_BINARY_FOR_GPU",
    "INVALID_IMAGE",
    "INVALID_SOURCE",
    "INVALID_PTX",
)


class ModuleLoadError(CudaHostError):
    """The driver does not take a compiled module; names the compiler's and the driver's version."""


class Module:
    """A :class:`ModuleImage` on a device: the cubin on a real one, the PTX on an emulated one."""

    def __init__(self, device: Device, image: ModuleImage) -> None:
        self.device = device
        self.image = image
        data = image.ptx.encode() + b"\0" if device.is_emulated else image.cubin
        try:
            self.handle = device.calls("cuModuleLoadData", data, module=image.name, bytes=len(data))
        except DriverError as error:
            if any(word in error.code_name for word in _LOAD_FAILURES):
                raise ModuleLoadError(self._load_text(error)) from error
            raise
        self._kernels: dict[str, Kernel] = {}
        self._unload = weakref.finalize(self, device.calls.quiet, "cuModuleUnload", self.handle)

    def kernel(self, name: str | None = None) -> Kernel:
        """An entry point by name (the only one when None). Raises KernelNotFoundError listing those there
        are."""
        names = sorted(self.image.functions)
        if name is None and len(names) == 1:
            name = names[0]
        if name is None or name not in self.image.functions:
            pattern = rf"_Z\d*N?\d*.*{re.escape(name)}" if name and isinstance(name, str) else "$^"
            mangled = [known for known in names if re.match(pattern, known)]
            hint = f'; {mangled[0]} looks like its mangled name: declare it extern "C"' if mangled else ""
            raise KernelNotFoundError(
                f"{self.image.name} has no entry point {name!r}; it has {', '.join(names) or 'none'}{hint}"
            )
        if name not in self._kernels:
            self._kernels[name] = Kernel(self, self.image.functions[name])
        return self._kernels[name]

    def variable(self, name: str, dtype: DTypeLike = np.uint8) -> DeviceArray:
        """A variable of the module (``__device__``, ``__constant__``): its bytes as ``dtype``, one dimension.

        Raises VariableNotFoundError, ArrayError.
        """
        calls = self.device.calls
        try:
            ptr, nbytes = calls("cuModuleGetGlobal", self.handle, name.encode(), name=name)
        except DriverError as error:
            if "NOT_FOUND" not in error.code_name:
                raise
            raise VariableNotFoundError(
                f"{self.image.name} has no variable {name!r}; declare it __device__ at file scope "
                "and use it in a kernel"
            ) from error
        allocation = Allocation(calls, int(ptr), int(nbytes), owner=self)
        return DeviceArray(self.device, allocation, 0, (int(nbytes),), np.uint8).view(dtype)

    def unload(self) -> None:
        """Unload now."""
        self._unload()

    def _load_text(self, error: DriverError) -> str:
        driver_major, driver_minor = self.device.driver_version
        return (
            f"{self.device.spec} (driver for CUDA {driver_major}.{driver_minor}) does not load "
            f"{self.image.name}, which "
            f"{self.image.compiler} compiled for {self.image.arch} (PTX "
            f"{self.image.ptx_version}): {error.code_name}. "
            "A driver loads cubins of its own CUDA major version and older: update the driver, "
            "or install the CUDA 12 "
            "compiler (extra cu12)"
        )


class Kernel:
    """One entry point of a module."""

    def __init__(self, module: Module, facts: FunctionFacts) -> None:
        self.module = module
        self.facts = facts
        self.handle = module.device.calls(
            "cuModuleGetFunction", module.handle, facts.name.encode(), name=facts.name
        )
        self._dynamic_limit = 0
        self._wide_cluster = False
        driver = module.device.calls.driver
        if module.device.is_emulated:  # PTX tells neither
            driver.describe_function(
                self.handle, registers=max(facts.registers, 1), local_bytes=facts.local_bytes
            )
        elif hasattr(driver, "cuFuncLoad") and module.device.driver_version >= (12, 4):
            # Lazy loading would otherwise fall into the first launch, where it costs time and may wait for a
            # kernel that waits for this one. Older drivers load it with cuModuleGetFunction.
            module.device.calls("cuFuncLoad", self.handle, name=facts.name)

    @property
    def name(self) -> str:
        """The entry point's name."""
        return self.facts.name

    @property
    def registers(self) -> int:
        """Registers per thread."""
        return self.facts.registers

    @property
    def local_bytes(self) -> int:
        """Local memory per thread in bytes."""
        return self.facts.local_bytes

    @property
    def spill_bytes(self) -> int:
        """Spill stores plus spill loads in bytes per thread (see :class:`FunctionFacts`)."""
        return self.facts.spill_bytes

    @property
    def static_shared_bytes(self) -> int:
        """Static shared memory per CTA in bytes."""
        return self.facts.static_shared_bytes

    def launch(
        self,
        grid: int | Sequence[int],
        block: int | Sequence[int] | None,
        args: Sequence[object],
        *,
        stream: Stream | None = None,
        shared_bytes: int = 0,
        cluster: int | Sequence[int] | None = None,
        cooperative: bool = False,
        programmatic: bool = False,
    ) -> None:
        """Queue the kernel on ``stream`` (default: the default stream); never synchronises.

        ``grid`` in CTAs, ``block`` in threads (None: the block the kernel was compiled for),
        ``shared_bytes`` of dynamic shared memory, ``cluster`` in CTAs. ``cooperative``: all CTAs resident
        at once. ``programmatic``: may start before its predecessor in the stream has ended. Raises
        LaunchError or ArgumentError before anything is launched.
        """
        if block is None:
            if self.facts.required_block is None:
                raise LaunchError(f"{self.name} was not compiled for one block size; pass block")
            block = self.facts.required_block
        shape = LaunchShape(
            as_dims(grid, "grid"),
            as_dims(block, "block"),
            shared_bytes,
            None if cluster is None else as_dims(cluster, "cluster"),
            cooperative,
            programmatic,
        )
        if not isinstance(args, Iterable) or isinstance(args, (str, bytes, DeviceArray)):
            raise ArgumentError(f"{self.name} takes a list of arguments (got {args!r}); pass [] for none")
        args = list(args)
        if self.module.image.metadata.get("front_end") == "triton":
            shape, args = expand(self, shape, args)
        self._launch(shape, args, stream or self.module.device.default_stream)

    def occupancy(self, threads: int, shared_bytes: int = 0) -> int:
        """Most CTAs of this kernel that one SM holds; ``shared_bytes`` is the dynamic part."""
        self._allow_shared(shared_bytes)
        return int(
            self.module.device.calls(
                "cuOccupancyMaxActiveBlocksPerMultiprocessor",
                self.handle,
                threads,
                shared_bytes,
                kernel=self.name,
                threads=threads,
                shared_bytes=shared_bytes,
            )
        )

    def max_active_clusters(self, cluster: int | Sequence[int], threads: int, shared_bytes: int = 0) -> int:
        """Most clusters of this kernel that the device holds at once."""
        dims = as_dims(cluster, "cluster")
        shape = LaunchShape(dims, (threads, 1, 1), shared_bytes, dims)
        device = self.module.device
        shape.validate(self.facts, device.capabilities)
        self._prepare(shape)
        config = shape.config(device.calls.driver, 0)
        what = {"kernel": self.name, "cluster": dims, "threads": threads, "shared_bytes": shared_bytes}
        return int(device.calls("cuOccupancyMaxActiveClusters", self.handle, config, **what))

    def _launch(self, shape: LaunchShape, args: Sequence[object], stream: Stream) -> None:
        device = self.module.device
        if not isinstance(stream, Stream):
            raise LaunchError(
                f"stream is a Stream (got {stream!r}); use device.stream(), or None for the default"
            )
        if stream.device is not device:
            twice = ", opened another time" if stream.device.spec == device.spec else ""
            raise LaunchError(
                f"{self.name} is loaded on {device.spec}, the stream belongs to {stream.device.spec}{twice}"
            )
        shape.validate(self.facts, device.capabilities)
        packed = pack(self.name, self.facts.params, args, device)
        self._prepare(shape)
        if shape.cooperative:
            self._check_resident(shape)
        device.calls(
            "cuLaunchKernelEx",
            shape.config(device.calls.driver, stream.handle),
            self.handle,
            packed.pointers_address,
            0,
            kernel=self.name,
            grid=shape.grid,
            block=shape.block,
            shared_bytes=shape.shared_bytes,
            cluster=shape.cluster,
        )
        stream.keep(self.module, *packed.kept)

    def _prepare(self, shape: LaunchShape) -> None:
        self._allow_shared(shape.shared_bytes)
        cluster = shape.cluster or self.facts.cluster_dims
        if cluster is not None and math.prod(cluster) > PORTABLE_CLUSTER and not self._wide_cluster:
            self._set_attribute("NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1)
            self._wide_cluster = True

    def _allow_shared(self, shared_bytes: int) -> None:
        """More than 48 KiB per CTA must be asked for, once per function."""
        if (
            shared_bytes + self.static_shared_bytes > DEFAULT_SHARED_BYTES
            and shared_bytes > self._dynamic_limit
        ):
            self._set_attribute("MAX_DYNAMIC_SHARED_SIZE_BYTES", shared_bytes)
            self._dynamic_limit = shared_bytes

    def _set_attribute(self, name: str, value: int) -> None:
        attribute = getattr(self.module.device.calls.driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        what: dict[str, Any] = {"kernel": self.name, "attribute": name, "value": value}
        self.module.device.calls("cuFuncSetAttribute", self.handle, attribute, value, **what)

    def _check_resident(self, shape: LaunchShape) -> None:
        sms = self.module.device.capabilities.num_sms
        cluster = shape.cluster or self.facts.cluster_dims
        if cluster is None:
            resident = self.occupancy(shape.threads, shape.shared_bytes) * sms
        else:
            size = math.prod(cluster)
            resident = self.max_active_clusters(cluster, shape.threads, shape.shared_bytes) * size
        if shape.ctas > resident:
            raise LaunchError(
                f"{self.name}: all {shape.ctas} CTAs of a cooperative launch must be resident, "
                f"{resident} fit on "
                f"{sms} SMs ({shape.threads} threads, {shape.shared_bytes} dynamic shared bytes); "
                "use a smaller grid"
            )
