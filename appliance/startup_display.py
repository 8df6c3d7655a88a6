"""What `appliance serve` shows while it starts, on stderr, and once it is ready, on stdout."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from appliance.client import MemoryUse, ModelInfo
from appliance.settings import Settings


def ready_text(info: ModelInfo, settings: Settings, port: int) -> str:
    """What is served, where and with what: the block printed once requests are answered."""
    room = (
        f"{info.num_contexts} contexts of that length fit"
        if info.num_contexts != 1
        else "one context of that length fits"
    )
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    rows = {
        "chat": url if settings.ui else "",
        "API": f"{url}/v1",
        "model": f"{info.id} ({info.architecture})",
        "format": info.format,
        "kernels": f"{', '.join(info.kernels)}; {info.dtype} on {info.device}",
        "context": f"{info.max_model_len} tokens; {room} into the KV cache at once",
        "memory": _memory_text(info.memory),
        "test": "" if info.details is None else f"{info.details.self_test.verdict}: {info.details.self_test.summary}",
    }
    lines = [f"  {name:<8} {text}" for name, text in rows.items() if text]
    lines += [f"  warning  {warning}" for warning in info.warnings]
    return "\n".join(["Ready.", *lines, "Press Ctrl-C to stop."])


def _memory_text(memory: MemoryUse) -> str:
    parts = [f"weights {size_text(memory.weights)}", f"KV cache {size_text(memory.kv_cache)}"]
    if memory.recurrent_state:
        parts.append(f"recurrent state {size_text(memory.recurrent_state)}")
    if memory.step_measured is not None:
        parts.append(f"a step {size_text(memory.step_measured)} ({size_text(memory.step_predicted)} expected)")
    return (
        f"{' + '.join(parts)} of {size_text(memory.total)}, of which other programs hold {size_text(memory.others)}; "
        f"the engine holds {size_text(memory.held)} now"
    )


def size_text(num_bytes: int) -> str:
    """GiB from 1 GiB on, else MiB."""
    return f"{num_bytes / (1 << 30):.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / (1 << 20):.0f} MiB"


class StartupDisplay:
    """One line on stderr that says what is being done; on a terminal with a bar, elsewhere once for each thing."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task: TaskID | None = None
        self._shown = ""

    def __enter__(self) -> StartupDisplay:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def show(self, what: str, fraction: float) -> None:
        if what != self._shown:
            self._shown = what
            if not self._console.is_terminal:
                self._console.print(f"{what}...")
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(what, total=1.0)
        if self._task is not None:
            self._progress.update(self._task, completed=fraction)

    def close(self) -> None:
        self._progress.stop()
