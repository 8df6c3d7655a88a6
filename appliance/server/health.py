"""GET /health, /version and /metrics: what operators and their machines ask."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from appliance import __version__
from appliance.client import EngineClient, EngineState
from appliance.server.metrics import ServerMetrics
from appliance.server.routes import Handler


def health_handler(client: EngineClient) -> Handler:
    """200 only while requests are answered, else 503 with the state in its own words."""

    async def health(_: Request) -> Response:
        now = client.health
        ready = now.state is EngineState.READY
        content = {"status": "ok" if ready else now.state.value, "detail": now.detail}
        return JSONResponse(content, 200 if ready else 503, None if ready else {"retry-after": "2"})

    return health


def metrics_handler(metrics: ServerMetrics) -> Handler:
    """Prometheus' text format."""

    async def prometheus(_: Request) -> Response:
        return Response(metrics.render(), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    return prometheus


async def version(_: Request) -> Response:
    """The version of this program."""
    return JSONResponse({"version": __version__})
