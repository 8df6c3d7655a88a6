"""The repository's own rules: which way imports run, what a GPU box needs, sizes, links, documented settings."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance import __version__
from appliance.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("appliance", "kernels", "quant", "ui", "tests", "benchmarks")
MAX_LINES = 500

# Left may import right, and its own room; whatever is not named here is of the room "base", which imports no other.
MAY_IMPORT = {
    "base": set[str](),
    "kernels": {"base"},
    "quant": {"base", "kernels"},
    "models": {"base", "kernels", "quant"},
    "engine": {"base", "kernels", "quant", "models"},
    "model_source": {"base", "kernels", "quant", "models"},
    "local_client": {"base", "engine", "model_source"},
    "server": {"base"},
    "ui": {"base"},
    "bench": {"base"},
    "inspection": {"base", "kernels", "quant", "models", "engine", "model_source"},
    "quantize": {"base", "quant", "models", "model_source", "local_client", "inspection"},
    "cli": {
        *("base", "kernels", "quant", "models", "engine", "model_source", "local_client"),
        *("server", "ui", "bench", "inspection", "quantize"),
    },
}
ROOM_OF_MODULE = {
    **dict.fromkeys(("kernels", "quant", "models", "engine", "server", "ui", "bench", "inspection", "quantize"), None),
    **dict.fromkeys(("local_client", "engine_process", "request_stream"), "local_client"),
    **dict.fromkeys(("chat_template", "detokenizer", "tokenizer"), "local_client"),
    **dict.fromkeys(("model_text", "__init__", "llm", "async_llm_engine", "client_thread"), "local_client"),
    "engine_arguments": "local_client",
    **dict.fromkeys(("cli", "__main__", "serve", "settings", "startup_display"), "cli"),
    "inspect_command": "cli",
    **dict.fromkeys(("builtin_model", "gguf_conversion", "model_cache", "model_source"), "model_source"),
}
WITHOUT_TORCH = ("request", "scheduler", "block_manager", "state_slots")
NOT_ON_A_GPU_BOX = (
    "zmq",
    "msgspec",
    "pydantic",
    "gguf",
    "llguidance",
    "prometheus_client",
    "fastapi",
    "gradio",
    "typer",
)


def python_files(*rooms: str) -> list[Path]:
    """The rooms' files, each under its real path once."""
    files = [file for room in rooms for file in sorted((ROOT / room).rglob("*.py")) if file.resolve() == file]
    assert len(files) > len(rooms)
    return files


def room_of(module: str) -> str:
    """`appliance.engine.core` -> engine."""
    parts = module.split(".")
    part = parts[1] if len(parts) > 1 else ""
    return ROOM_OF_MODULE.get(part, "base") or part


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "appliance" else ("appliance", *parts))


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute name of each import, those inside functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno} imports relatively"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            [name] = node.args
            assert isinstance(name, ast.Constant), f"{file}:{node.lineno} imports a computed name"
            yield node.lineno, str(name.value)


def test_imports_run_one_way() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{line} is of {room} and imports {name}"
        for file in python_files("appliance", "kernels", "quant", "ui")
        for room in [room_of(module_of(file))]
        for line, name in imports(file)
        if name.startswith("appliance.") and room_of(name) not in MAY_IMPORT[room] | {room}
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_is_imported_under_its_bare_name() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{line} {name}"
        for file in python_files(*ROOMS)
        for line, name in imports(file)
        if name.split(".")[0] in ("quant", "kernels", "ui")
    ]
    assert not wrong, "\n".join(wrong)


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_the_scheduling_modules_need_no_torch(name: str) -> None:
    result = run_python(f"import sys; sys.modules['torch'] = None\nimport appliance.engine.{name}")
    assert result.returncode == 0, result.stderr


def test_a_gpu_box_needs_no_more_than_torch_and_transformers() -> None:
    modules = [
        module_of(file).removesuffix(".__init__")
        for file in python_files("kernels", "quant", "appliance/models", "appliance/engine")
        if file.name not in ("__main__.py", "messages.py")  # the engine process, which talks through zmq and msgspec
    ]
    code = f"import sys, importlib\nfor name in {NOT_ON_A_GPU_BOX}: sys.modules[name] = None\n"
    result = run_python(code + f"for name in {modules}: importlib.import_module(name)")
    assert result.returncode == 0, result.stderr


def test_the_package_itself_imports_nothing_heavy() -> None:
    code = "import appliance, sys\nprint(*[name for name in ('torch', 'transformers', 'zmq') if name in sys.modules])"
    assert run_python(code).stdout.strip() == ""


@pytest.mark.parametrize("room", ["kernels", "quant", "ui"])
def test_the_package_links_to_the_folders_of_the_root(room: str) -> None:
    assert os.readlink(ROOT / "appliance" / room) == f"../{room}"


def test_kernels_is_a_namespace_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists(), "it would hide Hugging Face's package of that name"


def test_no_file_is_long() -> None:
    long = [file for file in python_files(*ROOMS) if len(file.read_text(encoding="utf-8").splitlines()) > MAX_LINES]
    assert not long


def test_the_version_is_told_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    needed = {re.split(r"[<>=; ]", text)[0].lower().replace("_", "-") for text in requirements}
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines}
    assert needed <= pinned
    assert not [line for line in lines if "==" not in line or "+" in line], "exact versions, fit for any build"


def test_every_setting_is_documented() -> None:
    text = (ROOT / "docs" / "settings.md").read_text()
    missing = [name for name in Settings.model_fields if f"| `{name}` |" not in text]
    assert not missing
    documented = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert set(documented) == set(Settings.model_fields), "a setting that no longer exists is documented"


@pytest.mark.slow
def test_the_wheel_holds_one_package(tmp_path: Path) -> None:
    source = tmp_path / "source"  # setuptools writes beside what it builds
    shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(".*", "build"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(command, check=True, timeout=300)
    [wheel] = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"appliance", f"appliance_llm-{__version__}.dist-info"}
    expected = {
        f"{module_of(file).replace('.', '/')}.py" for file in python_files("appliance", "kernels", "quant", "ui")
    }
    assert expected | {"appliance/quantize/calibration.txt"} <= set(names)
    assert {f"appliance/ui/{file.name}" for file in (ROOT / "ui").glob("page.*")} <= set(names)
