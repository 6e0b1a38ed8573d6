"""The library of native kernels, compiled at the first start by this machine's C compiler and kept in the user's cache.

Its name is a hash of sources, compiler and instruction set, so that a changed source never meets an old library, and
machines that share a home folder do not load each other's. It ends with a hash of its content, since a library that a
power failure has cut short would end the process that loads it.
"""
from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from config.console import say
from config.failure import CUT_FILE
from config.files import cache_folder, make_private_folder

SOURCE_FOLDER = Path(__file__).resolve().parent
STRICT_FLAGS = (  # floating point as written: see lanes.h
    "-std=c11", "-O3", "-fno-fast-math", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi",
    "-fvisibility=hidden", "-shared", "-fPIC", "-pthread")
COMPILE_SECONDS = 300  # at most; it takes two on an idle machine
HASH_BYTES = hashlib.sha256().digest_size
POINTER_BYTES = 8  # on smaller machines, floating point may be wider than its type
BUS_SENTENCE = f"flowspec: {CUT_FILE}\n".encode()
INSTALL = "on Debian and Ubuntu: sudo apt install gcc libc6-dev"


class Level(NamedTuple):
    """An instruction set: the features of a processor that it needs, and the compiler's flags for it."""

    name: str
    features: frozenset[str]
    flags: tuple[str, ...]
    is_faster: bool = False  # than torch on the same machine, as measured for every number type


LEVELS = (  # the best one first
    Level("avx512", frozenset({"avx512f", "avx512bw", "avx512vl", "avx512_vnni"}),
          ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni"), True),
    Level("avx2", frozenset({"avx2"}), ("-mavx2",), True),
    Level("dotprod", frozenset({"asimddp"}), ("-march=armv8.2-a+dotprod",)),
    Level("plain", frozenset(), ()),
)


def cpu_features() -> frozenset[str]:
    """Return the features of this machine's processor; none where the system does not list them."""
    with suppress(OSError):
        cpu_info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        for line in cpu_info.splitlines():
            name, _, listed = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return frozenset(listed.split())
    return frozenset()


def levels() -> list[Level]:
    """Return the levels that this machine has, the best one first."""
    here = cpu_features()
    return [level for level in LEVELS if level.features <= here]


@lru_cache(maxsize=None)
def library(level: Level | None = None) -> ctypes.CDLL:
    """Return the library for a level, by default the best one. Raises ValueError, with the reason, if there is none."""
    used_level = level or levels()[0]
    compiler = shutil.which(_compiler_words()[0])
    if compiler is None:
        raise ValueError(f"there is no C compiler ({INSTALL})")
    if ctypes.sizeof(ctypes.c_void_p) != POINTER_BYTES:
        raise ValueError("native kernels need a machine of 64 bits")

    try:
        folder = private_folder(cache_folder() / "native")
        library_file = folder / f"{used_level.name}-{_digest(compiler, used_level)}.so"
        if not is_whole(library_file):
            say("compiling the kernels for this processor, once")
            _compile(compiler, used_level, library_file)
        loaded_library = ctypes.CDLL(str(library_file))
        loaded_library.slice_explain_bus_errors(BUS_SENTENCE)
        return loaded_library
    except OSError as error:
        raise ValueError(f"the native kernels cannot be stored or loaded: {error}") from error


def reason_against_library() -> str:
    """Return why this machine has no library, with the remedy; empty if it has one."""
    try:
        library()
    except ValueError as error:
        return str(error)
    return ""


def has_library() -> bool:
    """Whether this machine has a library that is faster than torch."""
    return levels()[0].is_faster and not reason_against_library()


def private_folder(folder: Path) -> Path:
    """Create a folder that only this user may enter, and from which programs may run; raises OSError otherwise."""
    make_private_folder(folder)
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise OSError(f"{folder} is on a disk from which no program may run (noexec): set XDG_CACHE_HOME to a folder "
                      "of another disk")
    return folder


def is_whole(library_file: Path) -> bool:
    """Return whether a library exists and ends with the hash of what precedes it."""
    if not library_file.exists():
        return False
    content = library_file.read_bytes()
    return _content_hash(content[:-HASH_BYTES]) == content[-HASH_BYTES:]


def _content_hash(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _digest(compiler: str, level: Level) -> str:
    """Return a hash of everything on which the library depends."""
    compiler_state = os.stat(compiler)
    version = compiler, compiler_state.st_size, compiler_state.st_mtime_ns, platform.machine(), _flags(level)
    digest = hashlib.sha256(repr(version).encode())
    for path in sorted(SOURCE_FOLDER.glob("*.[ch]")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _compiler_words() -> list[str]:
    """Return the compiler's name, and the options that CC adds to it, as in `gcc -m64` or `ccache gcc`."""
    return os.environ.get("CC", "").split() or ["cc"]


def _flags(level: Level) -> list[str]:
    """Return the compiler's flags; those of CC and CFLAGS come first, so that they cannot loosen floating point."""
    own_flags = [*_compiler_words()[1:], *os.environ.get("CFLAGS", "").split()]
    return [*own_flags, *STRICT_FLAGS, *level.flags]


def _compile(compiler: str, level: Level, library_file: Path) -> None:
    """Compile the sources to a file, which appears whole or not at all. Raises ValueError with the reason."""
    c_files = sorted(map(str, SOURCE_FOLDER.glob("*.c")))
    with tempfile.TemporaryDirectory(dir=library_file.parent) as draft_folder:
        draft_file = Path(draft_folder, library_file.name)
        command = [compiler, *_flags(level), *c_files, "-o", str(draft_file), "-lm"]
        try:
            process = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                     stderr=subprocess.STDOUT, timeout=COMPILE_SECONDS)
        except subprocess.TimeoutExpired:
            raise ValueError(f"{compiler} did not end within {COMPILE_SECONDS} seconds") from None

        if process.returncode:
            output = process.stdout.decode(errors="replace").splitlines()
            ended = f"it ended with code {process.returncode}"
            raise ValueError(f"{compiler} failed: {next((line for line in output if 'error' in line), ended)}")
        with draft_file.open("ab") as draft:
            draft.write(_content_hash(draft_file.read_bytes()))
        os.replace(draft_file, library_file)
