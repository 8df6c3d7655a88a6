"""The settings of `appliance serve`: one frozen type, from which the command line's flags and the documentation derive.

A flag wins over an APPLIANCE_* environment variable, that over appliance.toml in the working directory, that over the
default. Knows nothing of how a setting is used.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ByteSize, Field, SecretStr, ValidationError
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from appliance.config import EngineConfig
from appliance.errors import UsageError

SETTINGS_FILE = "appliance.toml"
ENVIRONMENT_PREFIX = "APPLIANCE_"

_ENGINE_DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
_AUTO = BeforeValidator(lambda value: None if value == "auto" else value)
_LIST = BeforeValidator(
    lambda value: tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value
)

Names = Annotated[tuple[str, ...], NoDecode, _LIST]
"""A list in TOML, a comma-separated text elsewhere."""
Count = Annotated[int, Field(ge=1)]
AutoCount = Annotated[Count | None, _AUTO]


class Settings(BaseSettings):
    """Everything that can be set, with its default and its help text. Build it with `Settings.load`."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENVIRONMENT_PREFIX,
        env_ignore_empty=True,
        toml_file=SETTINGS_FILE,
        protected_namespaces=(),
    )

    model: str | None = Field(None, description="Folder of a checkpoint or a .gguf file; none: the built-in model.")
    served_model_name: str | None = Field(None, description="Name of the model in the API; none: the folder's name.")
    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    api_key: Annotated[tuple[SecretStr, ...], NoDecode, _LIST] = Field(
        (), description="Keys that requests must carry one of; never a flag, since other users can read a command line."
    )
    auth: bool = Field(True, description="Demand an API key where the host is not a loopback address.")
    allowed_hosts: Names = Field((), description="Further names that browsers may reach this server by.")
    allowed_origins: Names = Field((), description="Web origins whose pages may call the API.")
    ui: bool = Field(True, description="Serve the browser chat at /.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where the model runs.")
    dtype: Literal["auto", "bfloat16", "float16", "half", "float32", "float"] = Field(
        "auto", description="Type of activations and KV cache; float32 is the exact mode."
    )
    max_model_len: AutoCount = Field(
        None, description="Longest context in tokens; auto: what fits the model and the memory."
    )
    block_size: Annotated[Literal[16, 32, 64], BeforeValidator(lambda v: int(v) if str(v).isdecimal() else v)] = Field(
        _ENGINE_DEFAULTS["block_size"], description="Tokens of one KV cache block."
    )
    num_kv_blocks: AutoCount = Field(None, description="Blocks of the KV cache; auto: sized from the memory.")
    kv_cache_memory: Annotated[Annotated[ByteSize, Field(gt=0)] | None, _AUTO] = Field(
        None, description="Memory of the KV cache, e.g. 2GiB; auto: sized from the free memory."
    )
    max_num_seqs: Count = Field(_ENGINE_DEFAULTS["max_num_seqs"], description="Requests that run at once.")
    max_num_batched_tokens: Count = Field(
        _ENGINE_DEFAULTS["max_num_batched_tokens"], description="Tokens of one step, prefill and decode together."
    )
    enable_prefix_caching: bool = Field(
        _ENGINE_DEFAULTS["enable_prefix_caching"], description="Keep the KV cache of prompts for later requests."
    )
    allow_failed_self_test: bool = Field(
        _ENGINE_DEFAULTS["allow_failed_self_test"],
        description="Serve a model that failed its self-test at load, with a warning on every surface.",
    )
    max_waiting: Count = Field(_ENGINE_DEFAULTS["max_waiting"], description="Requests that may queue before 429.")
    threads: int = Field(0, ge=0, description="CPU threads of the engine; 0 takes all cores.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe message to show; debug adds tracebacks and an access log."
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)

    @classmethod
    def load(cls, flags: Mapping[str, Any]) -> Settings:
        """The settings, with those flags that were given on the command line.

        Raises UsageError, a sentence that names the first wrong setting, where it came from and what is allowed.
        """
        try:
            return cls(**dict(flags))
        except ValidationError as error:
            raise UsageError(_sentence(error, flags)) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"{SETTINGS_FILE} in {Path.cwd()} is not valid TOML: {error}") from None
        except OSError as error:
            raise UsageError(f"{SETTINGS_FILE} in {Path.cwd()} could not be read: {error.strerror}") from None

    def engine_config(self, folder: Path) -> EngineConfig:
        """What the engine needs of the settings, for the checkpoint in `folder`. Raises UsageError."""
        if self.num_kv_blocks is not None and self.kv_cache_memory is not None:
            raise UsageError("num_kv_blocks and kv_cache_memory both size the KV cache: set one of them")
        return EngineConfig(
            model=str(folder),
            served_name=self.served_model_name or folder.name,
            device=self.device,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            num_kv_blocks=self.num_kv_blocks,
            kv_cache_bytes=None if self.kv_cache_memory is None else int(self.kv_cache_memory),
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            enable_prefix_caching=self.enable_prefix_caching,
            allow_failed_self_test=self.allow_failed_self_test,
            max_waiting=self.max_waiting,
            num_threads=self.threads,
        )


def flag_of(name: str) -> str:
    """The command line's spelling of a setting."""
    return "--" + name.replace("_", "-")


def _source(name: str, flags: Mapping[str, object]) -> str:
    if name in flags:
        return flag_of(name) if name != "model" else "the command line"
    for variable, value in os.environ.items():
        if variable.upper() == ENVIRONMENT_PREFIX + name.upper() and value:
            return variable
    return SETTINGS_FILE


def _sentence(error: ValidationError, flags: Mapping[str, object]) -> str:
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0])
    source = _source(name, flags)
    field = Settings.model_fields.get(name)
    if field is None:
        return f"{source} holds {name!r}, which is no setting: use one of {', '.join(Settings.model_fields)}"
    reason = first["msg"][0].lower() + first["msg"][1:]
    if _AUTO in field.metadata:
        reason += ", or auto"
    found = "" if name == "api_key" else f" {first['input']!r}"
    return f"{name}{found} from {source} is not valid: {reason}"
