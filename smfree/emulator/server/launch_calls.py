"""Calls of a client that carry code: module images, launches, tensor maps."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from smfree.emulator.driver.params import pack
from smfree.emulator.ptx.ast import Param
from smfree.emulator.server.client_calls import SUCCESS, ClientCalls, Returned, special
from smfree.emulator.server.link import Link, NodeLost
from smfree.emulator.server.wire import Bulk


@dataclass(frozen=True, slots=True)
class _Signature:
    """A kernel's parameters, as the server told them."""

    name: str
    params: tuple[Param, ...]
    params_bytes: int


class ClientLaunchCalls(ClientCalls):
    """Images travel as bytes. Kernel parameters are packed here, by the layout that the server tells once."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._signatures: dict[int, _Signature] = {}

    @special
    def cuModuleLoadData(self, image: Any) -> Returned:
        return self._call("cuModuleLoadData", _image(image))

    @special
    def cuModuleLoadDataEx(self, image: Any, numOptions: int, options: Any, optionValues: Any) -> Returned:
        return self._call("cuModuleLoadDataEx", _image(image), numOptions, options, optionValues)

    @special
    def cuLibraryLoadData(self, code: Any, *options: Any) -> Returned:
        return self._call("cuLibraryLoadData", _image(code), *options)

    @special
    def cuLaunchKernel(self, f: Any, *arguments: Any) -> Returned:
        *shape, kernel_params, extra = arguments
        return self._call("cuLaunchKernel", f, *shape, self._pack(f, kernel_params, extra), 0)

    @special
    def cuLaunchKernelEx(self, config: Any, f: Any, kernelParams: Any, extra: Any) -> Returned:
        return self._call("cuLaunchKernelEx", config, f, self._pack(f, kernelParams, extra), 0)

    @special
    def cuLaunchCooperativeKernel(self, f: Any, *arguments: Any) -> Returned:
        *shape, kernel_params = arguments
        return self._call("cuLaunchCooperativeKernel", f, *shape, self._pack(f, kernel_params, 0))

    def _pack(self, function: Any, kernel_params: Any, extra: Any) -> bytes:
        """The argument block of a launch; of a function that is none, nothing: the server refuses it."""
        handle = 0 if function is None else int(function)
        signature = self._signatures.get(handle)
        if signature is None:
            try:
                told = self._link.request("signature", (handle,))[0]
            except NodeLost:
                told = None
            if told is None:
                return b""
            name, params, params_bytes = told
            signature = _Signature(name, tuple(Param(*each) for each in params), params_bytes)
            self._signatures[handle] = signature
        return pack(signature, kernel_params, extra)

    @special
    def cuTensorMapReplaceAddress(self, tensorMap: Any, globalAddress: Any) -> Returned:
        result = self._call("cuTensorMapReplaceAddress", tensorMap, globalAddress)
        if result[0] == SUCCESS:
            ctypes.memmove(int(tensorMap.getPtr()), int(result[1].getPtr()), 128)
        return result[:1]


def _image(image: Any) -> Any:
    """A module image as what travels: None, or its bytes."""
    if image is None or (isinstance(image, int) and image == 0):
        return None
    return Bulk(ctypes.string_at(image) if isinstance(image, int) else bytes(memoryview(image)))
