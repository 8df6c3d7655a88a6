"""What the Hugging Face hub says of a model without its weights: the names of its files, its configuration, the headers
of its safetensors.

Goes through huggingface_hub, whose HF_ENDPOINT, HF_TOKEN and proxies count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from appliance.errors import CheckpointError, UsageError

_CONFIGURATIONS = ("config.json", "quantize_config.json", "quant_config.json", "quantization_config.json")
_TEMPLATE = "chat_template.jinja"

Headers = dict[str, dict[str, tuple[str, tuple[int, ...]]]]
"""File -> tensor -> dtype (safetensors' word) and shape."""


class HubModel:
    """The current state of one model on the hub. All methods raise UsageError where hub, model or leave is missing."""

    def __init__(self, repo_id: str) -> None:
        from huggingface_hub import HfApi
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
        self.repo_id = repo_id
        self._api = HfApi()
        with _in_a_sentence(repo_id):
            info = self._api.model_info(repo_id, files_metadata=True)
        self._revision = info.sha
        self._sizes = {file.rfilename: file.size or 0 for file in info.siblings or () if "/" not in file.rfilename}

    @property
    def has_chat_template(self) -> bool | None:
        """None where only tokenizer_config.json could tell, which is not fetched."""
        return True if _TEMPLATE in self._sizes else None

    def mirror(self, folder: Path) -> None:
        """Put into `folder` the model's configuration files and indexes, and an empty file for each of the others."""
        for name in self._sizes:
            if name in _CONFIGURATIONS or name.endswith(".safetensors.index.json"):
                with _in_a_sentence(self.repo_id):
                    self._api.hf_hub_download(self.repo_id, name, revision=self._revision, local_dir=folder)
            else:
                (folder / name).touch()

    def headers(self, names: Iterable[str], progress: Callable[[float], None]) -> Headers:
        """Of these safetensors files, by range requests. Raises CheckpointError for one that is damaged."""
        from huggingface_hub.errors import SafetensorsParsingError

        found: Headers = {}
        wanted = list(names)
        for done, name in enumerate(wanted, 1):
            try:
                with _in_a_sentence(self.repo_id):
                    parsed = self._api.parse_safetensors_file_metadata(self.repo_id, name, revision=self._revision)
            except SafetensorsParsingError as error:
                raise CheckpointError(f"{name} of {self.repo_id} has no header that can be read ({error})") from error
            found[name] = {tensor: (entry.dtype, tuple(entry.shape)) for tensor, entry in parsed.tensors.items()}
            for tensor, (_, shape) in found[name].items():
                if not all(isinstance(size, int) and size >= 0 for size in shape):
                    raise CheckpointError(f"{name} of {self.repo_id} gives {tensor} the shape {shape}: it is damaged")
            progress(done / len(wanted))
        return found

    def nbytes(self, names: Iterable[str]) -> int:
        """Of these files."""
        return sum(self._sizes.get(name, 0) for name in names)


@contextmanager
def _in_a_sentence(repo_id: str) -> Iterator[None]:
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise UsageError(
            f"{repo_id} is gated: accept its terms on the hub and set HF_TOKEN to a token of that account"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UsageError(
            f"{repo_id} is neither a folder here nor a model that the hub shows: check the spelling, and set HF_TOKEN "
            "if it is private"
        ) from error
    except errors.HFValidationError as error:
        raise UsageError(
            f"{repo_id} does not exist here, and is no id of the hub (owner/name): check the path"
        ) from error
    except errors.OfflineModeIsEnabled as error:
        raise UsageError(f"{repo_id} is no folder here, and HF_HUB_OFFLINE forbids asking the hub: unset it") from error
    except (errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]  # httpx's or httpx2's, by its release
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"{repo_id} is no folder here, and the hub could not be asked ({reason}): check the path, or the network"
        ) from error
