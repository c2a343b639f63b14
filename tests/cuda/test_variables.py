"""Variables of a module, seen from the host."""

from __future__ import annotations

import numpy as np
import pytest

from smfree.cuda import ArrayError, Device, VariableNotFoundError
from tests.cuda.sources import source

SCALED = """
__device__ unsigned factor[2];
__constant__ unsigned long long offset;
extern "C" __global__ void scaled(unsigned* p) {
  p[threadIdx.x] = p[threadIdx.x] * factor[threadIdx.x & 1] + (unsigned)offset;
}
"""


def test_the_host_sets_what_the_kernel_reads(emulated: Device) -> None:
    module = emulated.compile(source(SCALED))
    factor, offset = module.variable("factor", np.uint32), module.variable("offset", np.uint64)
    assert factor.shape == (2,) and offset.shape == (1,)
    assert factor.numpy().tolist() == [0, 0]
    factor.copy_from(np.array([3, 5], np.uint32))
    offset.copy_from(np.array([7], np.uint64))
    data = emulated.asarray(np.arange(32, dtype=np.uint32))
    module.kernel().launch(1, 32, [data])
    expected = [i * (3, 5)[i & 1] + 7 for i in range(32)]
    assert data.numpy().tolist() == expected
    assert module.variable("factor").nbytes == 8


def test_unknown_names_and_sizes_that_do_not_fit(emulated: Device) -> None:
    module = emulated.compile(source(SCALED))
    with pytest.raises(
        VariableNotFoundError, match="has no variable 'facto'; declare it __device__ at file scope"
    ):
        module.variable("facto")
    with pytest.raises(ArrayError):
        module.variable("factor", np.dtype("V3"))
