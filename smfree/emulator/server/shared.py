"""Host memory that the server and a client both map: page-locked memory, and shared memory of the program.

Page-locked memory is a memfd: no name, gone with the last descriptor and mapping. It lies at one address,
unique on the node, in the server and in the client that allocated it, so the host address is the device
address, as with unified addressing.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from dataclasses import dataclass

from smfree.emulator.host_memory import HostMemory, HostRange

ARENA = 0x2000_0000_0000
ARENA_END = 0x4000_0000_0000
"""Host addresses of the whole node: above the devices' windows, below mappings, where systems put nothing."""
_STEP = 1 << 16
_FIXED_NOREPLACE = 0x10_0000
_NORESERVE = 0x4000
_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def map_at(address: int, nbytes: int, fd: int, offset: int = 0) -> None:
    """Map [offset, offset + nbytes) of ``fd`` shared at exactly ``address``, which must be free. OSError."""
    _mmap(address, nbytes, mmap.MAP_SHARED | _FIXED_NOREPLACE, fd, offset)


def unmap(address: int, nbytes: int) -> None:
    """Undo :func:`map_at`."""
    _libc.munmap(address, nbytes)


def _mmap(address: int, nbytes: int, flags: int, fd: int, offset: int) -> None:
    found = _libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset)
    if found is None or found == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    if found != address:  # a kernel older than 4.17 takes the address as a hint
        unmap(found, nbytes)
        raise OSError(errno.EEXIST, f"{address:#x} is not free")


@dataclass(slots=True)
class _Mapped:
    """What the server mapped for one range; ``fd`` is kept only for memory that it allocated."""

    start: int
    nbytes: int
    fd: int | None


class SharedHostMemory(HostMemory):
    """The host memory of a served node."""

    def __init__(self) -> None:
        super().__init__()
        self._next = ARENA
        self._mapped: dict[int, _Mapped] = {}

    def allocate(self, nbytes: int, flags: int, process: object = None) -> HostRange:
        """New page-locked memory, zeroed, as a memfd. Raises OSError."""
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = os.memfd_create("smfree", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)  # a client cannot pull the memory away
            start = self._map(size, fd, 0)
        except BaseException:
            os.close(fd)
            raise
        self._mapped[start] = held = _Mapped(start, size, fd)
        found = self.ranges[start] = HostRange(start, nbytes, flags, held, process)
        return found

    def descriptor(self, address: int) -> tuple[int, int]:
        """The descriptor and the mapped bytes of memory that :meth:`allocate` gave."""
        found = self._mapped[address]
        assert found.fd is not None
        return found.fd, found.nbytes

    def adopt(self, fd: int, offset: int, nbytes: int) -> int:
        """Map [offset, offset + nbytes) of a client's descriptor; the address of its first byte. OSError.

        The range is the node's once it is registered, and goes with it.
        """
        if os.fstat(fd).st_size < offset + nbytes:
            raise OSError(errno.EINVAL, "the mapping is longer than what it maps")
        before = offset % mmap.PAGESIZE
        size = -(-(before + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        start = self._map(size, fd, offset - before)
        self._mapped[start + before] = _Mapped(start, size, None)
        return start + before

    def drop(self, address: int) -> None:
        """Forget the range that starts there, and give its memory back."""
        super().drop(address)
        self.give_up(address)

    def give_up(self, address: int) -> None:
        """Undo :meth:`adopt` or the mapping of :meth:`allocate`.

        Untouched zero pages take the place, and no address is given twice: a copy that is late hits nothing.
        They reach to the next range, so that the system joins them to one mapping.
        """
        found = self._mapped.pop(address)
        nothing = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE | _FIXED
        _mmap(found.start, _step(found.nbytes), nothing, -1, 0)
        if found.fd is not None:
            os.close(found.fd)

    def _map(self, nbytes: int, fd: int, offset: int) -> int:
        while True:
            start = self._next
            self._next += _step(nbytes)
            if self._next > ARENA_END:
                raise OSError(errno.ENOMEM, "the node's host addresses are used up")
            try:
                map_at(start, nbytes, fd, offset)
            except FileExistsError:
                continue
            return start


def _step(nbytes: int) -> int:
    """From the start of a range to that of the next one: a gap lies between them."""
    return -(-nbytes // _STEP) * _STEP + _STEP


# ------------------------------------------------------------------------------------ the client's side


@dataclass(frozen=True, slots=True)
class SharedRange:
    """A file's descriptor in this process, and the offset at which an address lies in it."""

    fd: int
    offset: int


def find_shared(address: int, nbytes: int) -> SharedRange | str:
    """What [address, address + nbytes) of this process maps, or why another process cannot map it too."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, access, offset, device, inode, *_ = line.split(maxsplit=5)
            low, high = (int(bound, 16) for bound in span.split("-"))
            if low <= address < high:
                break
        else:
            return "nothing is mapped there"
    if address + nbytes > high:
        return f"it leaves its mapping [{low:#x}, {high:#x})"
    if not access.endswith("s") or "w" not in access:
        return "it is private memory of this process"
    major, minor = (int(part, 16) for part in device.split(":"))
    wanted = os.makedev(major, minor), int(inode)
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
            writable = fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
        except OSError:
            continue
        if (status.st_dev, status.st_ino) == wanted and writable:
            return SharedRange(int(name), int(offset, 16) + address - low)
    return "no descriptor of what it maps is open for reading and writing any more"
