"""Opening any model on disk: a Checkpoint names its parts as Hugging Face does and reads one module at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.kernels.spec import LinearSpec
from appliance.quant.declared import declared_quantization
from appliance.quant.detect import detect_source
from appliance.quant.formats.canonical import CanonicalSource, read_manifest
from appliance.quant.formats.gguf import open_gguf
from appliance.quant.formats.source import WeightSource
from appliance.quant.header_files import HeaderFiles
from appliance.quant.linear import spec_of
from appliance.quant.model_config import check_model_config
from appliance.quant.model_folder import read_json, weight_files
from appliance.quant.report import FormatReport
from appliance.quant.tensor_files import TensorFiles
from appliance.quant.weight import QuantizedWeight


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """An open model. Nothing read is kept: hold at most one module's tensors at a time to stay within memory.

    config: config.json's object, or for GGUF one made from the file's metadata in the same terms.
    """

    path: Path
    config: dict[str, Any]
    report: FormatReport
    _source: WeightSource = field(repr=False)
    _plain: frozenset[str] = field(repr=False)
    _quantized: frozenset[str] = field(repr=False)

    def names(self) -> list[str]:
        """Names of all parameters, sorted; a quantised module appears as its `<module>.weight`."""
        return sorted(self._plain | {f"{module}.weight" for module in self._quantized})

    def has(self, name: str) -> bool:
        """Whether `tensor(name)` would succeed."""
        return name in self._plain or (name.endswith(".weight") and name.removesuffix(".weight") in self._quantized)

    def has_module(self, module: str) -> bool:
        """Whether `linear(module)` would succeed."""
        return self.has(f"{module}.weight")

    def linear(self, module: str) -> QuantizedWeight | Tensor:
        """The weight of a linear layer (or an embedding) as stored: quantised, or a plain [N, K] tensor.

        Raises CheckpointError naming the module when the model has none of that name, or it is damaged.
        """
        if module not in self._quantized:
            return self.tensor(f"{module}.weight")
        with _naming(self.path):
            return self._source.quantized(module)

    def spec(self, module: str) -> LinearSpec:
        """Shape and storage of what `linear(module)` would give, without reading it. Raises what that raises."""
        if module in self._quantized:
            return self._source.spec(module)
        return spec_of(check_matrix(self.tensor(f"{module}.weight"), module))

    def tensor(self, name: str) -> Tensor:
        """A parameter in its stored dtype; a quantised weight comes dequantised, float32 [N, K].

        Raises CheckpointError naming the tensor when there is none of that name or it is a weight of integers. Whether
        its values make sense, NaN among them, is the self-test's to say.
        """
        with _naming(self.path):
            if name in self._plain:
                return _check_plain(self._source.tensor(name), name)
            module = name.removesuffix(".weight")
            if name == module or module not in self._quantized:
                raise CheckpointError(
                    f"{self.path} holds no tensor {name}, the model may be incomplete: download it again"
                )
            return self._source.quantized(module).dequantize()

    def close(self) -> None:
        """Lets the files go; tensors already handed out stay valid."""
        self._source.close()


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a model folder or a .gguf file and finds out what it holds; reads headers, zero points and group orders.

    Raises CheckpointError when files are missing, damaged or contradict each other, and UnsupportedModelError naming
    the format found and those supported. No code in the folder is ever run.
    """
    path = Path(path)
    with _naming(path):
        return _open(path)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Lets every error name the model: a reader may only know the tensor."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): check path and permissions") from error
    except CheckpointError as error:
        if str(path) in error.message or (path.suffix == ".gguf" and path.name in error.message):
            raise
        raise type(error)(f"{path}: {error.message}") from error


def open_headers(folder: Path, files: HeaderFiles) -> Checkpoint:
    """A checkpoint of which only shapes can be asked: `names`, `has`, `spec`, and `tensor` of plain ones, which come
    without data. folder: where its config.json and its quantiser's own file lie.

    What only words can tell (zero points, act-order) is taken from the configuration, and the report says so. Raises as
    `open_checkpoint` does, UnsupportedModelError too where the headers of the format do not tell enough.
    """
    config = read_json(folder / "config.json")
    check_model_config(config)
    try:
        source = detect_source(files, declared_quantization(folder, config))
    except RuntimeError as error:  # a value was asked of a tensor without data
        raise UnsupportedModelError(
            "the headers of this format do not tell how it is packed: download the model to inspect it"
        ) from error
    return _checkpoint(folder, config, source)


def _open(path: Path) -> Checkpoint:
    if path.is_file() and path.suffix == ".gguf":
        source, config = open_gguf(path)
        return _checkpoint(path, config, source)
    if not path.is_dir():
        found = "is a file" if path.is_file() else "does not exist"
        raise CheckpointError(f"{path} {found}, a model folder or a .gguf file was expected: check the path")
    shards, weight_map = weight_files(path)
    config = read_json(path / "config.json")
    check_model_config(config)
    files = TensorFiles(shards, weight_map)
    manifest = read_manifest(path)
    if manifest is not None:
        return _checkpoint(path, config, CanonicalSource(files, manifest))
    return _checkpoint(path, config, detect_source(files, declared_quantization(path, config)))


def _check_plain(tensor: Tensor, name: str) -> Tensor:
    """`tensor` as it is, which must not be words whose scales are missing."""
    if name.endswith((".weight", ".bias")) and not tensor.is_floating_point():
        raise CheckpointError(
            f"tensor {name} is {tensor.dtype} without scales, 16- or 32-bit floats were expected: download it again"
        )
    return tensor


def check_matrix(tensor: Tensor, module: str) -> Tensor:
    """A layer's plain weight as it is. Raises CheckpointError for one that is no matrix."""
    if tensor.ndim != 2:
        raise CheckpointError(
            f"tensor {module}.weight has shape {tuple(tensor.shape)}, a matrix was expected: download the model again"
        )
    return tensor


def _checkpoint(path: Path, config: dict[str, Any], source: WeightSource) -> Checkpoint:
    return Checkpoint(
        path=path,
        config=config,
        report=source.report,
        _source=source,
        _plain=frozenset(source.plain_names()),
        _quantized=frozenset(source.quantized_modules()),
    )
