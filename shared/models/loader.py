"""Fill a model's parameters from safetensors files, or with random numbers of the right shape."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from shared.layers.linear import WeightTarget
from shared.models.config import Fields, check_file, is_given, read_json_object

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# Others (fp8, integers) are quantized: their values mean nothing without scales.
FLOATING_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})

# An error lists this many tensors and counts the rest.
MAX_LISTED = 5


class LoadableModel(Protocol):
    """What a model offers to be filled; `shared.models.qwen3` is one."""

    def weight_targets(self) -> Mapping[str, WeightTarget]:
        """Every tensor the model needs, by its name in the checkpoint."""
        ...

    def optional_weights(self) -> frozenset[str]:
        """Names a checkpoint may hold besides; they are skipped."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, known from the file's header alone."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def load_weights(model: LoadableModel, directory: Path) -> None:
    """Copy a checkpoint into the model: one safetensors file, or shards with their index.

    The headers are checked first, so nothing is copied from a checkpoint that does not fit.
    Files are memory-mapped and read tensor by tensor, each target only its own slice; the bytes go
    to the parameters' device as stored and are converted there.

    Raises FileNotFoundError (no weights, a missing shard) or ValueError (an unreadable file; a
    missing, unexpected, wrongly shaped or quantized tensor); both name the file and the tensor.
    """
    started = time.perf_counter()
    targets = model.weight_targets()
    stored = _stored_tensors(directory)
    _check_names(directory, stored, targets, model.optional_weights())
    _check_tensors(stored, targets)
    device = next(model.parameters()).device
    with torch.no_grad():
        for file in sorted({stored[name].file for name in targets}):
            with _opened(file, device) as handle:
                # In the file's order: reading ahead is then of use.
                for name in handle.offset_keys():
                    if name in targets:
                        targets[name].load(handle.get_slice(name))
    logger.info(
        "loaded %d tensors from %s in %.1f s",
        len(targets),
        directory,
        time.perf_counter() - started,
    )


def initialize_dummy(model: LoadableModel, seed: int, std: float) -> None:
    """Random weights: matrices normal with standard deviation `std`, vectors (norms) all ones.

    Each checkpoint tensor is drawn whole, on the parameters' device, from a stream of its own that
    depends on `seed` and its name. So a tensor-parallel rank holds exactly its slice of what a
    single process would hold; the price is one whole tensor of extra memory for a moment.
    """
    parameter = next(model.parameters())
    generator = torch.Generator(device=parameter.device)
    with torch.no_grad():
        for name, target in model.weight_targets().items():
            tensor = torch.empty(target.shape, dtype=parameter.dtype, device=parameter.device)
            if tensor.dim() == 1:
                tensor.fill_(1.0)
            else:
                generator.manual_seed(_stream(seed, name))
                tensor.normal_(0.0, std, generator=generator)
            target.load(tensor)


def _stream(seed: int, name: str) -> int:
    """A 63-bit seed; `hash()` would differ between processes."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint, by name."""
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if is_given(single):
        return _read_header(single)
    if not is_given(index):
        found = ", ".join(sorted(path.name for path in directory.glob("*"))) or "nothing"
        raise FileNotFoundError(
            f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE} is there; found: {found}"
        )
    file_of = _read_index(index)
    stored: dict[str, StoredTensor] = {}
    for file_name in sorted(set(file_of.values())):
        shard = directory / file_name
        if not is_given(shard):
            raise FileNotFoundError(f"{shard}: no such file, but {INDEX_FILE} names it")
        header = _read_header(shard)
        listed = {name for name, holder in file_of.items() if holder == file_name}
        if absent := listed - header.keys():
            raise ValueError(
                f"{shard}: {INDEX_FILE} says it holds {_listing(absent)}, but it does not"
            )
        if unlisted := header.keys() - listed:
            raise ValueError(
                f"{shard}: holds {_listing(unlisted)}, which {INDEX_FILE} does not list"
            )
        stored.update(header)
    return stored


def _read_index(index: Path) -> dict[str, str]:
    """Tensor name -> name of the shard."""
    file_of = Fields(index, read_json_object(index)).table("weight_map")
    if not file_of:
        raise ValueError(f"{index}: weight_map is missing or empty")
    for name, file_name in file_of.items():
        # A shard lies beside its index; a path could point at any file of this machine.
        plain = isinstance(file_name, str) and Path(file_name).name == file_name
        if not plain or not file_name.endswith(".safetensors"):
            raise ValueError(
                f"{index}: weight_map[{name!r}] = {file_name!r} is not a safetensors file's name"
            )
    return file_of


def _read_header(file: Path) -> dict[str, StoredTensor]:
    with _opened(file, torch.device("cpu")) as handle:
        slices = ((name, handle.get_slice(name)) for name in handle.offset_keys())
        return {
            name: StoredTensor(file, tuple(part.get_shape()), part.get_dtype())
            for name, part in slices
        }


@contextmanager
def _opened(file: Path, device: torch.device) -> Iterator[Any]:
    """A safetensors file, mapped into memory; slices of it arrive on `device`."""
    check_file(file)
    try:
        handle = safe_open(file, framework="pt", device=str(device))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: not a readable safetensors file: {error}") from error
    with handle:
        yield handle


def _check_names(
    directory: Path,
    stored: Mapping[str, StoredTensor],
    targets: Mapping[str, WeightTarget],
    optional: frozenset[str],
) -> None:
    problems = []
    if missing := targets.keys() - stored.keys():
        problems.append(f"missing {_listing(missing)}")
    if unexpected := stored.keys() - targets.keys() - optional:
        files = sorted({stored[name].file.name for name in unexpected})
        problems.append(f"unexpected {_listing(unexpected)} in {', '.join(files[:MAX_LISTED])}")
    if problems:
        raise ValueError(f"{directory}: the weights do not fit the model: {'; '.join(problems)}")


def _check_tensors(stored: Mapping[str, StoredTensor], targets: Mapping[str, WeightTarget]) -> None:
    problems = []
    for name, target in targets.items():
        tensor = stored[name]
        if tensor.shape != tuple(target.shape):
            problems.append(
                f"{tensor.file}: {name} has shape {list(tensor.shape)}, "
                f"the model needs {list(target.shape)}"
            )
        elif tensor.dtype not in FLOATING_DTYPES:
            problems.append(
                f"{tensor.file}: {name} has dtype {tensor.dtype}, which is not supported"
            )
    if problems:
        raise ValueError(_shortened(problems, "\n"))


def _listing(names: Iterable[str]) -> str:
    names = sorted(names)
    return f"{len(names)} tensor(s): {_shortened(names, ', ')}"


def _shortened(items: list[str], separator: str) -> str:
    more = len(items) - MAX_LISTED
    shown = items[:MAX_LISTED] + ([f"... and {more} more"] if more > 0 else [])
    return separator.join(shown)
