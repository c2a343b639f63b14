"""Host side of smfree: one code path to a real GPU or an emulated one.

The public names, in the order in which a program uses them::

    with Device.open("auto") as device:                    # "cuda:0", "emu:h100", or SMFREE_DEVICE
        device.capabilities.has_tma                        # Capabilities: arch "sm_90a", limits, peaks
        source = CudaSource("kernels/lsu/copy.cu", defines={"THREADS": 256})
        module = device.compile(source)                    # Module; .image: PTX, cubin, facts
        kernel = module.kernel("lsu_copy")                 # Kernel: .registers, .spill_bytes, .occupancy(...)
        src = device.asarray(np.arange(1 << 20, dtype=np.uint32))       # DeviceArray
        dst = device.empty(src.shape, src.dtype)
        stream = device.stream()
        kernel.launch((132,), (256,), [dst, src, np.uint64(src.nbytes)], stream=stream, shared_bytes=65536)
        stream.synchronize()
        dst.numpy()

Launch arguments are typed: DeviceArray or HostBuffer (a pointer), int (8-byte parameters only), numpy scalar,
ctypes value or structure, TensorMap (128 bytes by value), TritonDescriptor (Triton kernels only).

Importing this package initialises nothing: no driver call happens before ``Device.open``, and NVRTC is
loaded by the first compilation.
"""
