"""Check what this machine lacks to run FlowSpec, and print a line for each item: "ok: ..." or "missing: ...; do ...".

Usage: python3 -m scripts.doctor [PRESET] [key=value ...]. The exit code is 0 if everything that is required is present.
       python3 -m scripts.doctor gpu [--help]: what only a GPU's owner can measure, as a page to paste.

It looks at Python, torch with gloo, one small kernel on each device, an all-reduce in this process and between two,
the network interface that ranks would use, disk, memory, and the packages; without torch also at what a first start
needs to install it. It leaves nothing running, and imports torch only after checking whether that works.

With the words of a run, as for bash run_pipe.sh, it also loads that model on this machine and generates a short text,
to count how many of the first tokens the model's draft head guesses correctly.
"""
from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import logging
import multiprocessing
import os
import re
import shutil
import socket
import sys
import tempfile
import warnings
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Iterator, NamedTuple, Sequence

from cluster.board import COMMAND_VARIABLE
from cluster.board import addresses as _addresses
from config.console import NEEDED_PACKAGES, enter, enter_if_possible, run
from config.presets import HOME, ROOT, STORY_PROMPT
from config.schema.untrusted import reason
from launch.available import available

GIB = 1 << 30
# For five ranks with the bundled model; another model needs its size in addition.
MIN_DISK, MIN_MEMORY = 1 * GIB, 2 * GIB
# For .venv without CUDA's libraries, and for what pip unpacks it from.
ENVIRONMENT_SIZE, DOWNLOADS_SIZE = 2 * GIB, 1 * GIB
OLDEST_PIP = (20, 3)  # older ones do not know the tags that wheels have
REDUCE_SECONDS = 60  # seconds for two processes to start and connect
GPU_NODES = ("/dev/nvidia0", "/dev/nvhost-gpu", "/dev/nvgpu")  # on a PC, on JetPack 5, on JetPack 6
INSTALL = ("start bash run_pipe.sh, which installs requirements.txt, or install requirements_jetson.txt on a Jetson "
           "board (docs/jetson.md)")
RUN_KEYS = {"link": "threads", "pipeline_type": "serial", "temperature": "0", "max_new_tokens": "128",
            "ignore_eos": "true"}  # for the text by which a head is judged
CUDA_SIZE = "several more with CUDA's libraries"
TMPDIR_REMEDY = "name a folder with room: export TMPDIR=FOLDER"
PACKAGES = (("numpy", "numpy"), ("transformers", "transformers"), ("sentencepiece", "sentencepiece"),
            ("fastchat.conversation", "fschat"), ("jinja2", "jinja2"), ("tqdm", "tqdm"))


class Finding(NamedTuple):
    """One line of the report: what was found, and the remedy, which is empty if all is well."""

    about: str
    remedy: str = ""
    needed: bool = True

    def __str__(self) -> str:
        return f"missing: {self.about}; do {self.remedy}" if self.remedy else f"ok: {self.about}"


def tried(about: str, failure: str, remedy: str) -> Finding:
    """Return the finding of a trial; `failure` is the reason why it failed, or empty."""
    return Finding(f"{about} fails ({failure})", remedy) if failure else Finding(f"{about} works")


def python() -> Iterator[Finding]:
    """Check the version of Python."""
    is_supported = sys.version_info >= (3, 8)
    yield Finding(_python(), "" if is_supported else "use Python 3.10 or newer, or 3.8 on boards with JetPack 5")


def _python() -> str:
    return f"Python {'.'.join(map(str, sys.version_info[:3]))}"


def torch_itself() -> Iterator[Finding]:
    """Check torch, and the parts of it that all ranks need."""
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding(f"torch cannot be imported ({reason(error)})",
                      f"{INSTALL}; on a board NVIDIA's own torch wheel comes first")
        return

    version = tuple(map(int, torch.__version__.split(".")[:2]))
    yield Finding(f"torch {torch.__version__}", "" if version >= (1, 11) else "install torch 1.11 or newer")
    try:
        from torch.distributed.distributed_c10d import ProcessGroupGloo  # noqa: F401
        yield Finding("torch.distributed with gloo")
    except (ImportError, AttributeError):
        yield Finding(f"torch {torch.__version__} was built without torch.distributed or gloo",
                      "install a wheel that has it, see docs/jetson.md")


def first_start() -> Iterator[Finding]:
    """Check what `bash run_pipe.sh` needs to create .venv, or a user to create an environment on a board."""
    if not all(map(importlib.util.find_spec, ("venv", "ensurepip"))):
        yield Finding(f"{_python()} cannot make an environment", "install its venv module (on Debian and Ubuntu: "
                      "sudo apt install python3-venv), or name another Python as in PYTHON=FILE bash run_pipe.sh")
    else:
        pip_version = _pip()
        is_old = tuple(map(int, re.findall(r"\d+", pip_version)[:2])) < OLDEST_PIP
        yield Finding(f"pip {pip_version}", "upgrade it there: python3 -m pip install --upgrade pip" if is_old else "")

    if not os.access(ROOT, os.W_OK):
        yield Finding(f"{ROOT} may not be written by you, so .venv cannot be made there",
                      "let its owner start once, or clone the project into a folder of your own")

    yield _disk(ROOT, " for the environment", ENVIRONMENT_SIZE, CUDA_SIZE)
    try:
        yield _disk(Path(tempfile.gettempdir()), " for downloads", DOWNLOADS_SIZE, CUDA_SIZE)
    except OSError as error:
        yield Finding(f"no folder for downloads ({reason(error)})", TMPDIR_REMEDY)


def _pip() -> str:
    """Return the version of this environment's pip, or of the pip that a new environment gets."""
    if sys.prefix != sys.base_prefix:
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version("pip")
    import ensurepip
    return ensurepip.version()


def _disk(folder: Path, purpose: str, needed_bytes: int, further_needs: str) -> Finding:
    free_bytes = shutil.disk_usage(folder).free
    remedy = f"make room: at least {needed_bytes / GIB:.0f} GiB, and {further_needs}"
    return Finding(f"{free_bytes / GIB:.1f} GiB of disk free in {folder}{purpose}",
                   "" if free_bytes >= needed_bytes else remedy)


def kernels() -> Iterator[Finding]:
    """Check a small product on the CPU and on every CUDA device."""
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0

    for device_name in ["cpu", *(f"cuda:{gpu_number}" for gpu_number in range(num_gpus))]:
        try:
            ones = torch.ones(8, 8, device=device_name)
            failure = "" if bool((ones @ ones == 8).all()) else "a product of ones is wrong there"
        except RuntimeError as error:
            failure = reason(error)

        yield tried(f"a kernel on {device_name}", failure,
                    "install the torch wheel that was built for this device, or use device=cpu")

    if not num_gpus and any(Path(node).exists() for node in GPU_NODES):
        yield Finding(f"this machine has an NVIDIA GPU that torch {torch.__version__} cannot use",
                      "install a torch build with CUDA, on a board NVIDIA's own, or use device=cpu", needed=False)


def reduce_ones(store: str, rank: int, world: int) -> int:
    """Join a gloo group over a file, and return the sum of a one from every rank."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world,
                            timeout=timedelta(seconds=REDUCE_SECONDS / 2))
    ones = torch.ones(1)
    dist.all_reduce(ones)
    dist.destroy_process_group()
    return int(ones)


def all_reduces() -> Iterator[Finding]:
    """Check an all-reduce in this process, then between two new ones."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            for world in (1, 2):
                yield _all_reduce(str(Path(folder) / f"{world}"), world)
    except OSError as error:
        yield Finding(f"no folder for temporary files ({reason(error)})", TMPDIR_REMEDY)


def _all_reduce(store: str, world: int) -> Finding:
    """Check an all-reduce over `world` processes, one or two."""
    about = f"an all-reduce over {world} process{'es' * (world - 1)}"
    try:
        sums = [reduce_ones(store, 0, 1)] if world == 1 else _in_two(store)
        failure = "" if sums == [world] * world else f"it gave {sums}"
    except multiprocessing.TimeoutError:
        failure = f"no answer for {REDUCE_SECONDS} seconds"
    except (RuntimeError, ValueError) as error:
        failure = reason(error)

    return tried(about, failure, "name a working network interface in GLOO_SOCKET_IFNAME (below), as in "
                 "export GLOO_SOCKET_IFNAME=lo")


def _in_two(store: str) -> list[int]:
    """Return the results of two new processes."""
    ranks = [(store, 0, 2), (store, 1, 2)]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])  # once for both
    with context.Pool(2) as pool:
        return pool.starmap_async(reduce_ones, ranks, chunksize=1).get(REDUCE_SECONDS)


def interface() -> Iterator[Finding]:
    """Check where gloo would meet the other ranks: at GLOO_SOCKET_IFNAME, else at the address of the host's name."""
    addresses = _addresses()
    outside_names = [name for name in addresses if not addresses[name].startswith("127.")]
    remedy = f"export GLOO_SOCKET_IFNAME={outside_names[0] if outside_names else 'lo'}"
    chosen_name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    host_name = socket.gethostname()

    if chosen_name and chosen_name not in addresses:
        yield Finding(f"GLOO_SOCKET_IFNAME is {chosen_name}, which has no IPv4 address here", f"{remedy} (there are: "
                      f"{', '.join(addresses)})")
        return

    try:
        address = addresses[chosen_name] if chosen_name else socket.gethostbyname(host_name)
    except OSError:
        yield Finding(f"the host's name {host_name} leads to no address", remedy)
        return

    names = [name for name, other_address in addresses.items() if other_address == address]
    interface_name = chosen_name or next(iter(names), "")
    origin = "GLOO_SOCKET_IFNAME" if chosen_name else f"the host's name {host_name}"

    if address.startswith("127."):
        hint = f", for other machines {remedy}" if outside_names else ""
        yield Finding(f"ranks meet at {address} ({interface_name or 'lo'}, by {origin}): loopback, this machine "
                      f"only{hint}")
    elif interface_name:
        yield Finding(f"ranks meet at {address} ({interface_name}, by {origin}): other machines can reach it")
    else:
        yield Finding(f"{origin} leads to {address}, which is no address of this machine", remedy)


def room() -> Iterator[Finding]:
    """Check the disk of the repository's folder, and memory."""
    yield _disk(HOME, "", MIN_DISK, "the size of your model for its split")
    free_memory = available()
    remedy = (f"end other programs or add swap: at least {MIN_MEMORY / GIB:.0f} GiB, and the weights of the ranks "
              "here")
    yield Finding(f"{free_memory / GIB:.1f} GiB of memory free", "" if free_memory >= MIN_MEMORY else remedy)


def packages() -> Iterator[Finding]:
    """Check the packages that the commands import."""
    for module_name, package_name in PACKAGES:
        try:
            version = getattr(importlib.import_module(module_name), "__version__", "")
            yield Finding(f"{package_name} {version}".strip())
        except (ImportError, OSError, RuntimeError) as error:
            yield Finding(f"{package_name} cannot be imported ({reason(error)})", INSTALL)


def bitsandbytes() -> Iterator[Finding]:
    """Check a kernel of bitsandbytes, which is optional: a wheel for other devices fails only in its first kernel."""
    purpose = "which only quantized weights need"
    try:
        import torch
        from bitsandbytes.functional import quantize_4bit
        device = "cuda" if torch.cuda.is_available() else "cpu"
        quantize_4bit(torch.ones(64, 64, dtype=torch.float16, device=device))
        yield Finding("bitsandbytes, with a kernel that works")
    except (ImportError, OSError, RuntimeError, AttributeError, NotImplementedError) as error:
        yield Finding(f"bitsandbytes, {purpose} ({reason(error)})", "pip install bitsandbytes (boards: docs/jetson.md)",
                      needed=False)


def head(words: Sequence[str]) -> Iterator[Finding]:
    """Check whether the draft head fits the model that these words name; ValueError for a model that cannot run."""
    from launch.pipeline import Pipeline

    presets = [word for word in words if "=" not in word]
    run_keys = dict(word.split("=", 1) for word in words if "=" in word)

    with Pipeline.open(*presets, **{"draft": "eagle", **run_keys, **RUN_KEYS}) as pipeline:
        networks = [network for draft in pipeline.drafts.values() for network in draft.networks]
        head_fits = [network.fit for network in networks if getattr(network, "fit", None)]
        for head_fit in head_fits:
            head_fit.report = lambda sentence: None  # it is printed below
        pipeline.generate(pipeline.config.prompt or STORY_PROMPT)
    for head_fit in head_fits:
        yield Finding(head_fit.misfit or head_fit.counted, head_fit.remedy if head_fit.misfit else "")

    if not head_fits:
        yield Finding("this model drafts without an EAGLE head, so there is none to check")


def examine(words: Sequence[str] = ()) -> Iterator[Finding]:
    """Yield all findings, each as soon as it is known; those about torch's parts only if torch can be imported."""
    yield from python()
    about_torch = [*torch_itself()]
    yield from about_torch
    lacks_torch = any(finding.remedy for finding in about_torch)

    torch_checks = (first_start,) if lacks_torch else (kernels, all_reduces)
    for check in (*torch_checks, interface, room, packages):
        yield from check()

    if not lacks_torch:
        yield from bitsandbytes()
        yield from head(words) if words else ()


def main(argv: list[str] | None = None) -> int:
    typed_words = sys.argv[1:] if argv is None else argv
    if typed_words[:1] == ["gpu"]:
        enter(*NEEDED_PACKAGES)
        from eval.bench.gpu import gpu
        return run(gpu, typed_words[1:])

    command = os.environ.get(COMMAND_VARIABLE, "python3 -m scripts.doctor")
    parser = argparse.ArgumentParser(prog=command, description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="word", help="words of a run with a draft head, as model_dir=DIR")
    words = parser.parse_args(typed_words).words
    if argv is None:
        enter_if_possible(*NEEDED_PACKAGES)  # else it reports what this Python lacks
    warnings.simplefilter("ignore")  # packages warn and log about themselves; the findings are printed here
    logging.disable(logging.CRITICAL)

    return run(report, words)


def report(words: Sequence[str]) -> int:
    """Print all findings; return the exit code, 1 if something required is missing."""
    num_missing = 0
    for finding in examine(words):
        num_missing += bool(finding.remedy) and finding.needed
        print(finding, flush=True)

    missing_text = f"{num_missing} of the required things {'is' if num_missing == 1 else 'are'} missing."
    print(f"\n{missing_text if num_missing else 'Everything that is required is present.'}")
    return int(num_missing > 0)


if __name__ == "__main__":
    sys.exit(main())
