"""Weights in files: read a Hugging Face checkpoint and write a safetensors file, tensor by tensor.

It knows nothing about models or ranks: a tensor is a name, a type and a shape. About one tensor is held in memory; only
a `.bin` that torch cannot map (written before torch 1.6, or read by torch before 2.1) is held whole.
"""
from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import warnings
import zipfile
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Iterator, Mapping, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from config.files import fits
from config.schema.fields import integer, list_of, read_config
from config.schema.untrusted import is_name, read_json, reason, short_repr, stays_inside
from model.weights import blocks

# safetensors' names of types; types that this torch does not have are omitted
_DTYPE_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"}
DTYPES_BY_CODE = {code: getattr(torch, name) for code, name in _DTYPE_NAMES.items() if hasattr(torch, name)}
CODES_BY_DTYPE = {dtype: code for code, dtype in DTYPES_BY_CODE.items()}

SOURCES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")

# For a folder without those: patterns of file names, and a description of the folder with the next step.
SAVE_AGAIN = "has weights under other names: save the model with save_pretrained of transformers"
OTHER_FORMS = {
    "stage_0": "is a split model: name it with model_dir=",
    "*.gguf": "holds a GGUF file: name the file itself, which is then unpacked",
    "consolidated.*": "is in Meta's own form: convert it with convert_llama_weights_to_hf.py of transformers",
    "adapter_model.*": "is only an adapter: merge it into its model with merge_and_unload of peft, and save that",
    "checkpoint-*": "holds the checkpoints of a training: name the folder of one of them",
    "*.onnx": "holds a model in ONNX: take the same one in safetensors",
    "*.pt": SAVE_AGAIN,
    "*.safetensors": SAVE_AGAIN,
}
NO_WEIGHTS = f"holds no weights; one of {', '.join(SOURCES)} is needed"

GGUF_LIST = "gguf.json"  # of a folder made from GGUF files: the tensors that stay in them
GGUF_ENTRY = {  # of a tensor
    "file": is_name, "dtype": lambda code: code in ("U8", "F16", "BF16", "F32"),
    "start": integer(0, 1 << 48).fits, "shape": list_of(integer(1, 1 << 32), 3).fits,
    "turned": integer(0, 1 << 16).fits}

ELEMENTS_AT_ONCE = 1 << 22  # that are checked
WORD_BYTES, WORDS_PER_PAGE = 8, 512  # of the numbers and pages in a checksum
LFS_POINTER = b"version https://git-lfs"
COPY_AGAIN = "copy or download it again"


@dataclass(frozen=True)
class TensorForm:
    """The type and shape of a tensor, known before its data is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def width(self) -> int:
        """Bytes of one element."""
        return torch.empty((), dtype=self.dtype).element_size()

    @property
    def bytes(self) -> int:
        """Bytes of all elements."""
        return self.width * math.prod(self.shape)


def form_of(tensor: Tensor) -> TensorForm:
    """Return the form of a tensor."""
    return TensorForm(tensor.dtype, tuple(tensor.shape))


class Location(NamedTuple):
    """Where a tensor is stored, and as what: with its data's form, which may be blocks."""

    stored_form: TensorForm
    path: Path
    first_byte: int | None  # None for a `.bin`
    interleaved_rows: int = 0  # of a head, if two that are adjacent rotate together, instead of half a head apart

    @property
    def form(self) -> TensorForm:
        """The form of the tensor as it is read: blocks are unfolded."""
        if not self.has_blocks:
            return self.stored_form
        return TensorForm(torch.float32, blocks.plain_shape(self.stored_form.shape))

    @property
    def has_blocks(self) -> bool:
        """Whether the data are blocks, as in a GGUF file."""
        return self.stored_form.dtype == torch.uint8 and blocks.block_type(self.stored_form.shape) is not None


# --- the tensors of a file --------------------------------------------------------------------------------------------

def _safetensors_locations(path: Path) -> dict[str, Location]:
    """Return the tensors of a safetensors file. Raises ValueError if it is damaged."""
    try:
        # safe_open checks the header, including sizes and offsets, but does not return where data begins
        with safe_open(str(path), "np"), path.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            table = json.loads(file.read(header_size))
    except SafetensorError as error:
        with path.open("rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                raise ValueError(f"{path} is only a Git LFS pointer to the file: type git lfs pull there, or "
                                 "download the file itself") from None
        cause = short_repr(str(error))
        raise ValueError(f"{path} is cut off, damaged or not in safetensors ({cause}); {COPY_AGAIN}") from None

    table.pop("__metadata__", None)
    entries = sorted(table.items(), key=lambda item: item[1]["data_offsets"])
    locations = {}
    for name, entry in entries:
        dtype_code = entry["dtype"]
        if not is_name(name):
            raise ValueError(f"{path} holds {short_repr(name)}, which is no name of a tensor; {COPY_AGAIN}")
        if dtype_code not in DTYPES_BY_CODE:
            raise ValueError(f"{path} holds {name} of type {short_repr(dtype_code)}, which is not supported (U32 is "
                             "that of a model quantized for MLX); take the model unquantized")

        form = TensorForm(DTYPES_BY_CODE[dtype_code], tuple(entry["shape"]))
        first_byte = 8 + header_size + entry["data_offsets"][0]
        locations[name] = Location(form, path, first_byte)
    return locations


def _gguf_locations(list_path: Path) -> dict[str, Location]:
    """Return the tensors that a folder takes from GGUF files. Raises ValueError if such a file is missing."""
    entries = read_json(list_path).get("tensors", {}) if list_path.is_file() else {}
    if not fits(entries, dict) or not fits([*entries.values()], [GGUF_ENTRY]):
        raise ValueError(f"{list_path} is damaged; delete its folder, and name the GGUF file again")

    paths = {file_name: Path(file_name) for file_name in {entry["file"] for entry in entries.values()}}
    file_sizes = {path: path.stat().st_size for path in paths.values()
                  if path.is_file() and path.suffix.lower() == ".gguf"}

    locations = {}
    for name, entry in entries.items():
        path, first_byte = paths[entry["file"]], entry["start"]
        form = TensorForm(DTYPES_BY_CODE[entry["dtype"]], tuple(entry["shape"]))
        if file_sizes.get(path, 0) < first_byte + form.bytes:
            raise ValueError(f"{list_path.parent} needs {path}, which is missing or cut off; copy it there again")
        locations[name] = Location(form, path, first_byte, entry["turned"])
    return locations


def half_a_head_apart(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of queries or keys in which two that rotate together are adjacent."""
    pairs = rows.unflatten(0, (-1, head_dim // 2, 2))
    return pairs.transpose(1, 2).reshape(rows.shape)


def _is_mappable(path: Path) -> bool:
    """Return whether torch can map a `.bin` file instead of reading it whole."""
    return "mmap" in inspect.signature(torch.load).parameters and zipfile.is_zipfile(path)


def _check_archive(path: Path) -> None:
    """Raise ValueError for an archive with compressed entries, which torch never writes: they may be huge."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"its entry {short_repr(entry.filename)} is compressed")


def _load_bin(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a `.bin` file, mapped if torch can do that, so that no data is read yet."""
    if "weights_only" not in inspect.signature(torch.load).parameters:
        raise ValueError(f"{path} could run code, which torch {torch.__version__} is too old to prevent; split the "
                         "model where torch is 1.13 or newer, or take one in safetensors")
    load_options: dict[str, Any] = {"map_location": "cpu", "weights_only": True}
    if _is_mappable(path):
        load_options["mmap"] = True

    try:
        _check_archive(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of what is refused below, or is harmless
            content = torch.load(str(path), **load_options)
    except Exception as error:  # an unpickler may raise anything for arbitrary bytes
        raise ValueError(f"{path} cannot be read ({short_repr(reason(error))}); {COPY_AGAIN}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__} instead of tensors with names; {COPY_AGAIN}")

    tensors = {name: x for name, x in content.items() if isinstance(x, Tensor)}
    for name, x in tensors.items():
        is_plain = x.dtype in CODES_BY_DTYPE and x.layout == torch.strided and x.device.type == "cpu"
        if not is_plain or not is_name(name):
            raise ValueError(f"{path} holds {short_repr(name)} in an unsupported form "
                             f"({x.dtype}, {x.layout}, {x.device}); {COPY_AGAIN}")
    return {name: x.detach() for name, x in tensors.items()}


def _weight_map(index_path: Path) -> dict[str, str]:
    """Read the file of each tensor, by name, from an index. Raises ValueError for a file outside of the folder."""
    file_names = read_json(index_path).get("weight_map")
    if not isinstance(file_names, dict) or not file_names:
        raise ValueError(f"{index_path} has no weight_map from tensors to files; {COPY_AGAIN}")
    for name, file_name in file_names.items():
        if not is_name(name) or not stays_inside(file_name):
            raise ValueError(f"{index_path} says that {short_repr(name)} is in {short_repr(file_name)}, which is not a "
                             "file of its folder; take a model that you trust")
    return file_names


# --- hashes -----------------------------------------------------------------------------------------------------------

def sample(path: Path, block_size: int = 1 << 20, num_blocks: int = 64) -> str:
    """Return a hash of a file's size and content; of a large file, only over blocks spread over it."""
    file_size = path.stat().st_size
    digest = hashlib.sha256(str(file_size).encode())
    with path.open("rb") as file:
        stride = max(block_size, (file_size - block_size) // (num_blocks - 1))
        for block_index in range(num_blocks):
            file.seek(block_index * stride)
            digest.update(file.read(block_size))
    return digest.hexdigest()


def checksum(data: Any) -> int:
    """Return a checksum of bytes, which finds damage, but no intent: a CRC over the sum of each page's numbers.

    A sum is read at the speed of memory, about five times as fast as a CRC, so every start can afford it. A changed
    bit changes its page's sum, and a page in another place the CRC.
    """
    num_pages = len(data) // (WORD_BYTES * WORDS_PER_PAGE)
    num_words = num_pages * WORDS_PER_PAGE
    rest_crc = zlib.crc32(memoryview(data)[num_words * WORD_BYTES:])
    if not num_pages:
        return rest_crc

    words = torch.frombuffer(data, dtype=torch.int64, count=num_words)
    page_sums = words.view(num_pages, WORDS_PER_PAGE).sum(1)  # modulo 2^64
    return zlib.crc32(page_sums.numpy().data, rest_crc)


# --- reading ----------------------------------------------------------------------------------------------------------

class Checkpoint:
    """A Hugging Face folder (safetensors or .bin, sharded or not). Raises ValueError for missing or damaged files.

    Tensors of safetensors files that have a checksum in `checksums` are compared with it when they are read whole.
    """

    def __init__(self, folder: str | Path, checksums: Mapping[str, int] | None = None) -> None:
        self.folder = Path(folder)
        self._checksums = checksums or {}
        self._last_bin: tuple[Path, dict[str, Tensor]] | None = None
        main_file = self._main_file()
        self.config = read_config(self.folder)

        file_of_tensor = _weight_map(main_file) if main_file.suffix == ".json" else {}
        file_names = sorted(set(file_of_tensor.values())) or [main_file.name]
        self.files = [self.folder / file_name for file_name in file_names]
        self._locations = self._locate_tensors(main_file)

        for name, file_name in file_of_tensor.items():
            if name not in self._locations:
                raise ValueError(f"{self.folder / file_name} does not hold {name}, but {main_file.name} says so; "
                                 f"download the model again")
        if not self._locations:
            raise ValueError(f"{main_file} holds no tensors; {COPY_AGAIN}")

    def _main_file(self) -> Path:
        """Return the file that holds or lists the weights."""
        if self.folder.is_file():
            raise ValueError(f"{self.folder} is a file; name its folder, or a GGUF file")
        if not self.folder.is_dir():
            raise ValueError(f"there is no folder {self.folder}; give the path of a model in Hugging Face form, as hf "
                             "download NAME --local-dir DIR writes it")

        paths = [self.folder / name for name in SOURCES]
        for path in paths:
            if path.exists() and not path.is_file():
                raise ValueError(f"{path} is a folder, a device or a pipe: copy the file itself there")
        main_file = next(filter(Path.is_file, paths), None)
        if not main_file:
            hints = (hint for pattern, hint in OTHER_FORMS.items() if any(self.folder.glob(pattern)))
            raise ValueError(f"{self.folder} {next(hints, NO_WEIGHTS)}")
        return main_file

    def _locate_tensors(self, main_file: Path) -> dict[str, Location]:
        """Return the locations of all tensors, file by file."""
        locations: dict[str, Location] = {}
        for path in self.files:
            if not path.is_file():
                raise ValueError(f"{path} is missing, but {main_file.name} names it; {COPY_AGAIN}")
            if path.suffix == ".safetensors":
                locations.update(_safetensors_locations(path))
            else:
                for name, x in self._bin(path).items():
                    locations[name] = Location(form_of(x), path, None)
        locations.update(_gguf_locations(self.folder / GGUF_LIST))
        return locations

    def _bin(self, path: Path) -> dict[str, Tensor]:
        if _is_mappable(path):  # mapped again for every tensor, since pages of a permanent map would count as memory
            return _load_bin(path)
        if self._last_bin is None or self._last_bin[0] != path:
            self._last_bin = None  # frees the last one first
            self._last_bin = path, _load_bin(path)
        return self._last_bin[1]

    def names(self) -> list[str]:
        """Return the names of all tensors, file by file, so that reading in this order opens each file once."""
        return list(self._locations)

    def form(self, name: str) -> TensorForm:
        return self._locations[name].form

    def stored_form(self, name: str) -> TensorForm:
        """Return the form of a tensor's data: of its blocks, if it has any."""
        return self._locations[name].stored_form

    def tensor_path(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self._locations[name].path

    def is_in_blocks(self, name: str) -> bool:
        """Whether this tensor is stored in the blocks of a GGUF file."""
        return self.stored_form(name) != self.form(name)

    def read(self, name: str) -> Tensor:
        return self.rows(name)

    def read_stored(self, name: str) -> Tensor:
        """Read a tensor in its stored form."""
        return self.stored_rows(name)

    def map_stored(self, name: str) -> Tensor:
        """Return a tensor in its stored form, of which only rows that are used take memory, if its file allows it."""
        whole = self.read_stored(name)  # compares its checksum
        _, path, first_byte, interleaved_rows = self._locations[name]
        if first_byte is None or interleaved_rows or not whole.numel():
            return whole
        mapped_bytes = np.memmap(path, np.uint8, "c", first_byte, whole.numel() * whole.element_size())
        return torch.frombuffer(mapped_bytes, dtype=whole.dtype).reshape(whole.shape)

    def rows(self, name: str, span: tuple[int, int] | None = None) -> Tensor:
        """Return the rows [begin, end) of a tensor, or all of it; from safetensors only these are read."""
        stored_rows = self.stored_rows(name, span)
        return blocks.unfold(stored_rows) if self._locations[name].has_blocks else stored_rows

    def stored_rows(self, name: str, span: tuple[int, int] | None = None) -> Tensor:
        """Like `rows`, in the stored form."""
        form, path, first_byte, interleaved_rows = self._locations[name]
        if first_byte is None:
            whole = self._bin(path)[name]
            return (whole[slice(*span)] if span else whole).clone()

        if span:
            begin, end = span
            num_rows = end - begin
            form = TensorForm(form.dtype, (num_rows, *form.shape[1:]))
            first_byte += begin * form.bytes // max(1, num_rows)

        data = bytearray(form.bytes)
        with path.open("rb") as file:
            file.seek(first_byte)
            num_bytes = file.readinto(data)
        if num_bytes != len(data):
            raise ValueError(f"{path} is cut off in {name}; {COPY_AGAIN}")
        if not span and name in self._checksums and checksum(data) != self._checksums[name]:
            raise ValueError(f"{path} is damaged: {name} has changed since it was written; copy this folder again from "
                             "where the model was split, or delete the file and split again")

        if not data:  # which torch.frombuffer refuses
            return torch.empty(form.shape, dtype=form.dtype)
        tensor = torch.frombuffer(data, dtype=form.dtype).reshape(form.shape)
        return half_a_head_apart(tensor, interleaved_rows) if interleaved_rows else tensor

    def read_finite(self, name: str) -> Tensor:
        """Read a tensor as `read` does. Raises ValueError if it holds NaN or infinity, from training or a bad disk."""
        tensor = self.read(name)
        element_bytes = tensor.element_size()
        can_be_infinite = tensor.is_floating_point() and element_bytes > 1
        if not can_be_infinite or not tensor.numel():
            return tensor

        for block in tensor.reshape(-1).split(ELEMENTS_AT_ONCE):  # so that no wide copy of the whole is made
            wide_block = block.float() if element_bytes == 2 else block  # torch 1.11 has no aminmax of halves
            if not all(math.isfinite(bound) for bound in torch.aminmax(wide_block)):
                raise ValueError(f"{name} in {self.tensor_path(name)} is not finite (NaN or infinity); "
                                 f"download the model again, or take another")
        return tensor


# --- writing ----------------------------------------------------------------------------------------------------------

class Writer:
    """A writer of tensors of given forms, one after the other, into a safetensors file."""

    def __init__(self, file: BinaryIO, forms: dict[str, TensorForm]) -> None:
        self.unwritten_forms = list(forms.items())
        table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, form in self.unwritten_forms:
            begin, end = end, end + form.bytes
            table[name] = {"dtype": CODES_BY_DTYPE[form.dtype], "shape": form.shape, "data_offsets": [begin, end]}

        header = json.dumps(table, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)  # data begins at a multiple of 8
        self.bytes, self._hash, self._file = 0, hashlib.sha256(), file
        self._checksums: dict[str, int] = {}
        self._put(len(header).to_bytes(8, "little") + header)

    def _put(self, data: Any) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.bytes += len(data)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor; tensors must be written in the order of the forms."""
        named_form = name, form_of(tensor)
        expected_form = self.unwritten_forms.pop(0)
        assert named_form == expected_form, f"{named_form} was written where {expected_form} comes next"

        flat_tensor = tensor.detach().contiguous().reshape(-1)
        data = flat_tensor.view(torch.uint8).numpy().data
        self._checksums[name] = checksum(data)
        self._put(data)

    @property
    def entry(self) -> dict[str, Any]:
        """The file's entry in a manifest."""
        return {"bytes": self.bytes, "sha256": self._hash.hexdigest(), "checksums": self._checksums}


@contextmanager
def writing(path: Path, forms: dict[str, TensorForm]) -> Iterator[Writer]:
    """Write a safetensors file, tensor by tensor; it gets its name when the `with` block ends without an error."""
    incomplete_path = path.with_name(path.name + ".part")
    try:
        with incomplete_path.open("wb") as file:
            writer = Writer(file, forms)
            yield writer
            assert not writer.unwritten_forms, f"{writer.unwritten_forms[0][0]} was not written"
            file.flush()
            os.fsync(file.fileno())
        os.replace(incomplete_path, path)
    finally:
        incomplete_path.unlink(missing_ok=True)
