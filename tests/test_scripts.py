"""start.sh with a stand-in for Python: what it does and says, without a real installation. It knows no pip."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOOLS = ("bash", "awk", "cat", "cksum", "cp", "df", "dirname", "flock", "grep", "mkdir", "rm", "tee", "touch", "uname")

FAKE_PYTHON = """#!/bin/bash
case "$*" in
    "-m venv "*)
        mkdir -p "$3/bin"
        cp "$0" "$3/bin/python"
        printf '#!/bin/bash\\necho served "$@"\\n' >"$3/bin/appliance"
        chmod +x "$3/bin/appliance"
        ;;
    "-m pip install "*)
        printf '%s\\n' "$*" >>"$CALLS"
        while [[ $1 != --log ]]; do shift; done
        printf '%s\\n' "$PIP_SAYS" >>"$2"
        [[ -z $PIP_DIES ]] || kill -9 $PPID
        [[ -z $PIP_SAYS ]]
        ;;
    *ensurepip*) [[ -z $NO_VENV ]] ;;
esac
"""


@dataclass(frozen=True)
class Checkout:
    """A copy of the repository's scripts, and the only tools that they find."""

    root: Path
    bin: Path
    calls: Path

    def start(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(self.root / "start.sh"), *arguments],
            env={"PATH": str(self.bin), "CALLS": str(self.calls), **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
        )

    def pip_calls(self) -> list[str]:
        return self.calls.read_text().splitlines() if self.calls.exists() else []


def _executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    root, tools = tmp_path / "a folder", tmp_path / "bin"
    root.mkdir()
    tools.mkdir()
    for name in ("start.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, root)
    for tool in (*TOOLS, "chmod"):
        found = shutil.which(tool)
        assert found is not None, f"{tool} is needed by start.sh and missing here"
        (tools / tool).symlink_to(os.path.realpath(found))
    _executable(tools / "python3", FAKE_PYTHON)
    return Checkout(root, tools, tmp_path / "calls")


def test_the_first_run_installs_and_serves_with_the_arguments(checkout: Checkout) -> None:
    result = checkout.start("--port", "8001")
    assert (result.returncode, result.stdout) == (0, "served serve --port 8001\n")
    assert f"--editable {checkout.root}" in checkout.pip_calls()[-1]
    assert f"--constraint {checkout.root}/constraints.txt" in checkout.pip_calls()[-1]


def test_a_repeat_run_takes_no_pip(checkout: Checkout) -> None:
    checkout.start()
    before = checkout.pip_calls()
    assert checkout.start().stdout == "served serve\n"
    assert checkout.pip_calls() == before


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_a_changed_requirement_is_installed(checkout: Checkout, name: str) -> None:
    checkout.start()
    before = checkout.pip_calls()
    with (checkout.root / name).open("a") as file:
        file.write("\n# changed\n")
    assert checkout.start().returncode == 0
    assert len(checkout.pip_calls()) > len(before)


def test_an_install_that_was_killed_is_begun_anew(checkout: Checkout) -> None:
    assert checkout.start(PIP_DIES="1").returncode != 0
    (checkout.root / ".venv" / "half a package").touch()
    result = checkout.start()
    assert (result.returncode, result.stdout) == (0, "served serve\n")
    assert "Rebuilding" in result.stderr
    assert not (checkout.root / ".venv" / "half a package").exists()


def test_a_checkout_that_was_moved_gets_a_new_environment(checkout: Checkout) -> None:
    checkout.start()
    moved = Checkout(checkout.root.rename(checkout.root.with_name("elsewhere")), checkout.bin, checkout.calls)
    result = moved.start()
    assert (result.returncode, result.stdout) == (0, "served serve\n")
    assert f"--editable {moved.root}" in moved.pip_calls()[-1]


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="this machine has an NVIDIA driver")
def test_without_an_nvidia_driver_the_cpu_build_of_torch_is_tried_first(checkout: Checkout) -> None:
    checkout.start()
    first, second = checkout.pip_calls()
    assert first.endswith("--timeout 5 --retries 0 torch")
    assert "index-url" not in second


def test_with_an_nvidia_driver_torch_comes_from_the_default_index(checkout: Checkout) -> None:
    _executable(checkout.bin / "nvidia-smi", "#!/bin/bash\n")
    checkout.start()
    assert len(checkout.pip_calls()) == 1


@pytest.mark.parametrize(
    ("pip_says", "code", "sentence"),
    [
        ("NewConnectionError: Failed to establish a new connection", 6, "the package index could not be reached"),
        ("OSError: [Errno 28] No space left on device", 5, "is full: free about 4 GB"),
        ("something else", 7, "pip could not install what the appliance needs"),
    ],
)
def test_a_failed_install_is_one_sentence_and_is_tried_again(
    checkout: Checkout, pip_says: str, code: int, sentence: str
) -> None:
    result = checkout.start(PIP_SAYS=pip_says)
    assert result.returncode == code
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert sentence in last
    assert checkout.start().stdout == "served serve\n"


def test_no_python_is_one_sentence(checkout: Checkout) -> None:
    (checkout.bin / "python3").unlink()
    result = checkout.start()
    assert result.returncode == 4
    assert result.stderr.startswith("error: no Python 3.11 or newer was found")
    assert not (checkout.root / ".venv").exists()


def test_no_venv_module_is_one_sentence(checkout: Checkout) -> None:
    result = checkout.start(NO_VENV="1")
    assert result.returncode == 4
    assert result.stderr.startswith("error: python3 has no venv module")


def test_a_full_disk_is_found_before_anything_is_installed(checkout: Checkout) -> None:
    (checkout.bin / "df").unlink()
    _executable(checkout.bin / "df", '#!/bin/bash\necho; echo "disk 9 9 1000000 0% /"\n')
    result = checkout.start()
    assert result.returncode == 5
    assert result.stderr.startswith("error: only 976 MB are free")
    assert not checkout.pip_calls()


def test_the_readme_tells_the_commands_that_ci_runs() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "./start.sh" in readme
    assert "./test.sh" in readme
    assert "./test.sh" in (ROOT / ".ci" / "run").read_text()
