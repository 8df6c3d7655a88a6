"""The numbers of `/metrics`: histograms measured at this surface, gauges and totals read from the engine when scraped.

It knows prometheus_client and `EngineClient.stats`; not HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from appliance.client import EngineClient, FinishReason

_LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_PER_TOKEN_S = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1)

_GAUGES = (
    ("requests_running", "requests_running", "Requests that hold KV blocks."),
    ("requests_waiting", "requests_waiting", "Requests in the queue."),
    ("kv_blocks_total", "kv_blocks_total", "Blocks of the KV pool."),
    ("kv_blocks_free", "kv_blocks_free", "Unreferenced blocks of the KV pool, cached ones included."),
)
_TOTALS = (
    ("prefix_cache_query_tokens", "prefix_cache_query_tokens", "Prompt tokens looked up in the prefix cache."),
    ("prefix_cache_hit_tokens", "prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache."),
    ("preemptions", "preemptions", "Requests put back into the queue for want of KV blocks."),
    ("prompt_tokens", "prompt_tokens", "Prompt tokens processed."),
    ("generation_tokens", "generation_tokens", "Tokens generated."),
)
"""Metric, field of EngineStats, help. Totals count since the engine's start; Prometheus handles their resets."""


class _EngineCollector(Collector):
    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def collect(self) -> Iterable[Metric]:
        stats = self._client.stats
        for name, attribute, text in _GAUGES:
            yield GaugeMetricFamily(f"appliance_{name}", text, value=getattr(stats, attribute))
        used = stats.kv_blocks_total - stats.kv_blocks_free
        ratio = used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
        yield GaugeMetricFamily("appliance_kv_cache_usage_ratio", "Share of the KV pool in use, 0 to 1.", value=ratio)
        for name, attribute, text in _TOTALS:
            yield CounterMetricFamily(f"appliance_{name}", text, value=getattr(stats, attribute))
        info = self._client.model_info
        if info is not None:
            labels = ["model", "format", "bits", "kernel"]
            family = GaugeMetricFamily("appliance_model_info", "The loaded model.", labels=labels)
            family.add_metric([info.id, info.format, str(info.bits), ",".join(info.kernels)], 1)
            yield family


class ServerMetrics:
    """One registry a server. Recording costs a few microseconds a request and nothing a token."""

    def __init__(self, client: EngineClient) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(client))
        self._success = Counter(
            "appliance_request_success",
            "Requests answered, by why they ended; abort: the client left.",
            ["finished_reason"],
            registry=self._registry,
        )
        self._rejected = Counter(
            "appliance_request_rejected",
            "Requests answered with an error, by its code.",
            ["reason"],
            registry=self._registry,
        )
        self._first_token = Histogram(
            "appliance_time_to_first_token_seconds",
            "From submission of the tokenized prompt to the first token.",
            buckets=_LATENCY_S,
            registry=self._registry,
        )
        self._per_token = Histogram(
            "appliance_time_per_output_token_seconds",
            "Mean time between tokens of one answer, after the first.",
            buckets=_PER_TOKEN_S,
            registry=self._registry,
        )
        self._latency = Histogram(
            "appliance_e2e_request_latency_seconds",
            "From submission of the tokenized prompt to the end of the answer.",
            buckets=_LATENCY_S,
            registry=self._registry,
        )

    def reject(self, reason: str) -> None:
        """Count an error answer; `reason` is the code of an ApplianceError."""
        self._rejected.labels(reason).inc()

    def finish(
        self, reason: FinishReason, *, submitted_s: float, first_token_s: float | None, end_s: float, tokens: int
    ) -> None:
        """Record an ended request; times on one monotonic clock, in seconds."""
        self._success.labels(reason.value).inc()
        self._latency.observe(end_s - submitted_s)
        if first_token_s is not None:
            self._first_token.observe(first_token_s - submitted_s)
            if tokens > 1:
                self._per_token.observe((end_s - first_token_s) / (tokens - 1))

    def render(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)
