"""Compiles the C++ kernels beside this file once per machine, and loads them.

A wheel for every processor would have to leave out what makes these kernels fast, so they are compiled where they run,
in a few seconds, with the compiler that torch.compile uses as well. The library lies in the cache folder under a name
made of sources, compiler and processor; without a compiler `load` gives None and callers take torch's operations.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

SOURCES = (
    "tiles.h", "amx.h", "activation.h", "scratch.h", "kv.h",
    "experts.cpp", "attention.cpp", "prefill.cpp", "linear.cpp", "rows.cpp",
    "brownout.cpp",
)  # fmt: skip
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # the kernels' numbers for them
# The first set of flags that the compiler takes: OpenMP and -march=native are not everywhere.
_FLAGS = (("-march=native", "-fopenmp"), ("-mcpu=native", "-fopenmp"), ("-march=native",), ("-mcpu=native",), ())
_ALWAYS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-w")
_TIMEOUT_SECONDS = 180.0


class Experts(ctypes.Structure):
    """`MoeOptExperts` of experts.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("gate_up", "down", "gate_up_bias", "down_bias")),
        *((name, ctypes.c_int64) for name in ("slots", "width", "inner")),
        *((name, ctypes.c_int32) for name in ("transposed", "interleaved", "activation", "dtype")),
        *((name, ctypes.c_float) for name in ("alpha", "limit")),
    ]


class KV(ctypes.Structure):
    """`MoeOptKV` of kv.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("slot_stride", "head_stride", "kv_heads", "dim", "value_dim")),
        ("dtype", ctypes.c_int32),
    ]


class Rows(ctypes.Structure):
    """`MoeOptRows` of kv.h."""

    _fields_ = [("data", ctypes.c_void_p), ("row_stride", ctypes.c_int64), ("head_stride", ctypes.c_int64)]


class Heads(ctypes.Structure):
    """`MoeOptHeads` of rows.cpp."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("row_stride", "head_stride", "heads")),
    ]


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library, compiled if this machine has not done so yet; None (said once in the log) where it cannot be, or
    where the environment says `MOE_OPT_NATIVE=0`."""
    if os.environ.get("MOE_OPT_NATIVE") == "0":
        return None
    compiler = _compiler()
    if compiler is None:
        logger.warning("no C++ compiler (CXX, c++, g++ or clang++): CPU kernels of moe_opt are not built, torch's run")
        return None
    try:
        library = ctypes.CDLL(str(_build(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("CPU kernels of moe_opt could not be built with %s (%s): torch's run", compiler, error)
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.moe_opt_experts.argtypes = [
        ctypes.POINTER(Experts), pointer, number, pointer, number, pointer, pointer, ctypes.c_int,
    ]  # fmt: skip
    library.moe_opt_attend.argtypes = [
        ctypes.POINTER(KV), ctypes.POINTER(Rows), ctypes.POINTER(Rows), ctypes.POINTER(Rows),
        pointer, number, number, number, pointer, pointer, pointer, ctypes.c_float, pointer, pointer, ctypes.c_int,
    ]  # fmt: skip
    library.moe_opt_linear.argtypes = [pointer, number, number, pointer, pointer, number, pointer, ctypes.c_int]
    integer = ctypes.c_int
    library.moe_opt_mlp.argtypes = [
        pointer, number, number, pointer, pointer, number, pointer, number, integer, pointer, integer,
    ]  # fmt: skip
    library.moe_opt_prefill.argtypes = [
        ctypes.POINTER(KV), ctypes.POINTER(Rows), number, number, number, number, pointer, pointer, number, number,
        ctypes.c_float, pointer, pointer, integer,
    ]  # fmt: skip
    library.moe_opt_norm.argtypes = [pointer, number, number, pointer, ctypes.c_float, pointer, integer, integer]
    library.moe_opt_norm.restype = None
    library.moe_opt_rotate.argtypes = [
        ctypes.POINTER(Heads), ctypes.POINTER(Heads), number, number, number, pointer, pointer, integer, integer,
    ]  # fmt: skip
    library.moe_opt_rotate.restype = None
    library.moe_opt_delegate.argtypes = [
        pointer, number, number, pointer, number, pointer, ctypes.c_double, integer, pointer, pointer, pointer, pointer,
        pointer,
    ]  # fmt: skip
    library.moe_opt_choose.argtypes = [
        pointer, number, number, number, integer, pointer, pointer, integer, integer,
    ]  # fmt: skip
    library.moe_opt_logsumexp.argtypes = [pointer, number, number, pointer, ctypes.c_int]
    library.moe_opt_logsumexp.restype = None
    return library


def if_loaded() -> ctypes.CDLL | None:
    """The library if somebody has asked for it by `load` already: nothing is compiled."""
    return load() if load.cache_info().currsize else None


def _compiler() -> str | None:
    named = os.environ.get("CXX", "").split()
    for name in (*named[:1], "c++", "g++", "clang++"):
        found = shutil.which(name)
        if found:
            return found
    return None


def _build(compiler: str) -> Path:
    folder = Path(__file__).parent
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=_TIMEOUT_SECONDS, check=True).stdout
    parts = [
        *((folder / name).read_bytes() for name in SOURCES),
        version,
        _processor(),
        repr((_FLAGS, _ALWAYS)).encode(),
    ]
    name = f"moe_opt_{hashlib.sha256(b'|'.join(parts)).hexdigest()[:20]}.so"
    folder_of_user = _cache_folder()
    if (folder_of_user / name).is_file():  # also in a folder that is read-only here
        return folder_of_user / name
    cache = _writable(folder_of_user)
    target = cache / name
    logger.info("compiling the CPU kernels of moe_opt with %s", compiler)
    sources = [str(folder / source) for source in SOURCES if source.endswith(".cpp")]
    with tempfile.TemporaryDirectory(dir=cache) as work:  # processes may build at once: each moves a whole file in
        made = Path(work) / name
        for flags in _FLAGS:
            command = [compiler, *_ALWAYS, *flags, *sources, "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS)
            if done.returncode != 0:
                logger.info("%s does not take %s: %s", compiler, " ".join(flags), _first_error(done))
            else:
                os.replace(made, target)
                return target
    raise OSError(_first_error(done))


def _first_error(done: subprocess.CompletedProcess[str]) -> str:
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return next((line for line in lines if "error" in line.lower()), lines[0])


def _processor() -> bytes:
    """What -march=native depends on: a home folder may be shared by machines."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_bytes().splitlines():
            if line.startswith((b"flags", b"Features")):
                return line
    return f"{platform.machine()} {platform.processor()}".encode()


def _cache_folder() -> Path:
    """`native` in `MOE_OPT_CACHE`, else in `moe_opt` of the user's cache folder."""
    base = os.environ.get("MOE_OPT_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "moe_opt"
    )
    return Path(base) / "native"


def _writable(folder: Path) -> Path:
    """The folder, made if need be; one of this process where that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        logger.info("%s cannot be made: %s", folder, error)
    if os.access(folder, os.W_OK):
        return folder
    logger.warning("%s cannot be written: CPU kernels are built for this process alone (see MOE_OPT_CACHE)", folder)
    return Path(tempfile.mkdtemp(prefix="moe_opt_native_"))
