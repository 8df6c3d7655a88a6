"""The Gradio chat page. Knows an `EngineClient` and nothing behind it; entry points are in `appliance.ui.app`.

Importing this package settles the environment variables that Gradio reads at import or when an app is mounted: a
variable of the user's shell must not open the page to the world, nor may anything be reported home.
"""

from __future__ import annotations

import os

_SWITCHED_OFF = {
    "GRADIO_ANALYTICS_ENABLED": "False",
    # Gradio keeps the last 10000 events and summarises them all with pandas after each one, for a page we switch off.
    "GRADIO_ANALYTICS_CACHE_FREQUENCY": "1000000000",
    "GRADIO_ANALYTICS_MAX_EVENTS": "1",
    "GRADIO_RUN_HISTORY": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
_IGNORED = (
    "GRADIO_ALLOWED_PATHS",
    "GRADIO_DEBUG",
    "GRADIO_HISTORY_BUCKET",
    "GRADIO_LOCAL_DEV_MODE",
    "GRADIO_MCP_SERVER",
    "GRADIO_PROFILING",
    "GRADIO_ROOT_PATH",
    "GRADIO_SERVER_NAME",
    "GRADIO_SHARE",
    "GRADIO_SSR_MODE",
    "GRADIO_VIBE_MODE",
    "GRADIO_WATCH_DIRS",
)

os.environ.update(_SWITCHED_OFF)
for _name in _IGNORED:
    os.environ.pop(_name, None)
