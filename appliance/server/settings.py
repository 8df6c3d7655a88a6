"""How the HTTP surface is to behave: one frozen value. It knows nothing of the engine."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from appliance.errors import UsageError


def is_loopback_host(host: str) -> bool:
    """True for localhost, *.localhost, 127.0.0.0/8 and ::1, with or without brackets."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of the HTTP surface.

    Raises UsageError naming the setting, what was found and what is allowed.
    """

    host: str = "127.0.0.1"
    """Address the server is bound to; on a loopback address only local Host headers are answered."""
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    """Any of them opens every route but /health; empty asks for none."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names for the Host header, without port. If set on another bind, only these and local names pass."""
    allowed_origins: tuple[str, ...] = ()
    """Further origins for browsers, as `scheme://host[:port]` or `scheme://*`."""
    max_body_bytes: int = 32 << 20
    keepalive_s: float = 15.0
    """Seconds of silence on a stream after which an empty chunk is sent."""
    model_name: str = ""
    """Name under which `/v1/models` lists a model that is still loading."""
    model_aliases: tuple[str, ...] = ()
    """Further names for the loaded model, besides its id and "default"."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UsageError(f"port must be between 0 and 65535, found {self.port}")
        if self.max_body_bytes < 1024:
            raise UsageError(f"max_body_bytes must be at least 1024, found {self.max_body_bytes}")
        if not self.keepalive_s > 0:
            raise UsageError(f"keepalive_s must be above 0, found {self.keepalive_s}")
        if any(not key.strip() for key in self.api_keys):
            raise UsageError("an API key is empty: give each key at least one character, or none at all")
        for origin in self.allowed_origins:
            if "://" not in origin:
                raise UsageError(
                    f"allowed origin {origin!r} has no scheme: write it as https://host:port or scheme://*"
                )
