"""Who may speak to the server: the Host, Origin and API key rules, as pure functions over headers.

Host: against DNS rebinding (Ollama's CVE-2024-28224). Origin: against web pages that use the visitor's machine.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from appliance.server.settings import ServerSettings, is_loopback_host

_APP_SCHEMES = frozenset({"app", "tauri", "vscode-webview", "vscode-file"})
"""Schemes of desktop applications, which no web page can have. `file` is missing: its origin is the shared `null`."""


def host_is_allowed(host: str, settings: ServerSettings) -> bool:
    """True if the Host header (with or without port) names this server."""
    if not is_loopback_host(settings.host) and not settings.allowed_hosts:
        return True
    name = _host_name(host)
    return is_loopback_host(name) or name in {allowed.lower() for allowed in settings.allowed_hosts}


def origin_is_own(origin: str, host: str) -> bool:
    """True if the page that asks was served under the very name and port it asks."""
    return bool(host) and origin.split("://", 1)[-1].lower() == host.lower()


def origin_is_configured(origin: str, settings: ServerSettings) -> bool:
    """True if the settings name the origin, or its scheme with `*`."""
    scheme = origin.split("://", 1)[0]
    return origin in settings.allowed_origins or f"{scheme}://*" in settings.allowed_origins


def origin_is_local(origin: str) -> bool:
    """True for pages of this machine's own servers, any port, and for desktop applications."""
    try:
        parts = urlsplit(origin)
        name = parts.hostname or ""
    except ValueError:
        return False
    return parts.scheme in _APP_SCHEMES or (parts.scheme in ("http", "https") and is_loopback_host(name))


def key_is_valid(headers: Headers, settings: ServerSettings) -> bool:
    """True if any of the places where clients put keys holds one of ours; compared in constant time.

    Basic authentication counts, with the key as the password: browsers can ask for it and send it with every request.
    """
    offered = [headers[name].encode("latin-1") for name in ("x-api-key", "api-key") if name in headers]
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        offered.append(credentials.strip().encode("latin-1"))
    elif scheme.lower() == "basic":
        offered.append(_basic_password(credentials))
    valid = False
    for given in offered:
        for key in settings.api_keys:
            valid |= hmac.compare_digest(given, key.encode())
    return valid


def _basic_password(credentials: str) -> bytes:
    try:
        return base64.b64decode(credentials, validate=True).partition(b":")[2]
    except (binascii.Error, ValueError):
        return b""


def _host_name(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0].lstrip("[").lower()
    return host.partition(":")[0].lower()
