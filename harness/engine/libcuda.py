"""A stand-in for `libcuda.so.1`, written without a compiler.

vLLM's compiled extensions link against the CUDA driver library, which a machine
without a GPU does not have, and the virtual device must not ask the one of a
machine that has. `write` makes a shared object whose functions all exist and
all answer `CUDA_ERROR_NO_DEVICE`, so that the extensions load and register
their operators, and a symbol that is called does not end the process.
"""

from __future__ import annotations

import os
import platform
import struct
import tempfile
from pathlib import Path

SONAME = "libcuda.so.1"

CUDA_ERROR_NO_DEVICE = 100
"""`CUresult` of a driver that sees no GPU (CUDA driver API, `cuda.h`)."""

FUNCTIONS = (
    # Undefined in the extension modules of the vLLM 0.27.1 - 0.33.0 wheels (`nm -D`).
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuDriverGetVersion",
    "cuGetErrorString",
    "cuGetProcAddress",
    "cuGetProcAddress_v2",
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemGetAllocationGranularity",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuPointerGetAttribute",
    "cuTensorMapEncodeTiled",
    # Looked up at run time by the CUDA runtime and by Python drivers (ctypes).
    "cuDeviceGet",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceTotalMem_v2",
    "cuGetErrorName",
    "cuInit",
)

# `return CUDA_ERROR_NO_DEVICE` in machine code, with the ELF machine number.
_TARGETS = {
    "x86_64": (62, b"\xb8" + struct.pack("<I", CUDA_ERROR_NO_DEVICE) + b"\xc3"),
    "aarch64": (183, struct.pack("<II", 0x52800000 | CUDA_ERROR_NO_DEVICE << 5, 0xD65F03C0)),
}

_PAGE = 0x10000  # the largest page size in use on either machine


def image(machine: str, functions: tuple[str, ...] = FUNCTIONS) -> bytes:
    """The bytes of the shared object for `machine` (`x86_64` or `aarch64`); KeyError for others."""
    elf_machine, code = _TARGETS[machine]
    names = bytearray(b"\0")

    def name(text: str) -> int:
        at = len(names)
        names.extend(text.encode() + b"\0")
        return at

    soname = name(SONAME)
    name_at = [name(f) for f in functions]
    count = len(functions) + 1

    header, program = 64, 56
    segments = 4
    hash_at = header + segments * program
    # One hash bucket: every look-up walks the whole chain, which is short.
    chain = [*range(2, count), 0]
    table = struct.pack(f"<II I I{len(chain)}I", 1, count, 1, 0, *chain)
    sym_at = -(-(hash_at + len(table)) // 8) * 8
    str_at = sym_at + 24 * count
    code_at = -(-(str_at + len(names)) // 16) * 16
    text_end = code_at + len(code)
    dyn_at = -(-text_end // 8) * 8
    # The loader writes into the dynamic section: it gets a writable page of its own.
    dyn_addr = dyn_at + _PAGE

    symbols = bytearray(24)
    for at in name_at:
        symbols += struct.pack("<IBBHQQ", at, 0x12, 0, 1, code_at, len(code))
    dynamic = b"".join(
        struct.pack("<QQ", tag, value)
        for tag, value in (
            (14, soname),  # DT_SONAME
            (4, hash_at),  # DT_HASH
            (5, str_at),  # DT_STRTAB
            (6, sym_at),  # DT_SYMTAB
            (10, len(names)),  # DT_STRSZ
            (11, 24),  # DT_SYMENT
            (0, 0),
        )
    )

    def segment(kind: int, flags: int, offset: int, addr: int, size: int, align: int) -> bytes:
        return struct.pack("<IIQQQQQQ", kind, flags, offset, addr, addr, size, size, align)

    out = bytearray(
        b"\x7fELF\x02\x01\x01"
        + bytes(9)
        + struct.pack(
            "<HHIQQQIHHHHHH", 3, elf_machine, 1, 0, header, 0, 0, header, program, segments, 0, 0, 0
        )
    )
    out += segment(1, 5, 0, 0, text_end, _PAGE)  # PT_LOAD, read and execute
    out += segment(1, 6, dyn_at, dyn_addr, len(dynamic), _PAGE)  # PT_LOAD, read and write
    out += segment(2, 6, dyn_at, dyn_addr, len(dynamic), 8)  # PT_DYNAMIC
    out += segment(0x6474E551, 6, 0, 0, 0, 16)  # PT_GNU_STACK: no executable stack
    for at, part in (
        (hash_at, table),
        (sym_at, symbols),
        (str_at, names),
        (code_at, code),
        (dyn_at, dynamic),
    ):
        out += bytes(at - len(out)) + part
    return bytes(out)


def write(folder: Path) -> Path:
    """Put the stand-in for this machine into `folder` (made if missing) and return its path.

    OSError where the folder cannot be written or the machine is not one of `_TARGETS`.
    """
    machine = platform.machine()
    if machine not in _TARGETS:
        raise OSError(f"no virtual CUDA device on {machine!r}: only on {', '.join(_TARGETS)}")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SONAME
    content = image(machine)
    if not path.is_file() or path.read_bytes() != content:
        # Whole or not at all: another run may be loading it.
        handle, temporary = tempfile.mkstemp(dir=folder)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    return path
