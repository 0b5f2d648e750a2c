"""What ships is found: in a checkout, and in a wheel installed elsewhere."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from jaxspec import resources
from jaxspec.errors import UsageError

ROOT = Path(__file__).parent.parent


def test_shipped_files_are_those_of_the_checkout() -> None:
    """configs/ at the top is what the package reads; a copy would drift."""
    for path in (ROOT / "configs" / "run").glob("*.toml"):
        assert resources.run_config_file(path.stem).samefile(path)
    assert resources.model_dir("nano") == ROOT / "jaxspec" / "models" / "nano"


def test_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resources.run_config_file("some/where.toml") == Path("some/where.toml")
    with pytest.raises(UsageError, match=r"has no config\.json"):
        resources.model_dir(str(tmp_path))
    (tmp_path / "config.json").touch()
    assert resources.model_dir(str(tmp_path)) == tmp_path


@pytest.mark.slow
def test_a_wheel_holds_and_finds_what_ships(tmp_path: Path) -> None:
    """Builds the wheel, unpacks it elsewhere and reads the shipped files from there."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    source = tmp_path / "source"
    source.mkdir()
    for name in ("jaxspec", "pallas_kernels", "configs", "pyproject.toml", "README.md", "LICENSE"):
        subprocess.run(["cp", "-rP", str(ROOT / name), str(source)], check=True)
    subprocess.run(
        [*pip, "wheel", "-q", "--no-deps", "-w", str(tmp_path / "wheel"), str(source)], check=True
    )
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    kept = [*(ROOT / "configs").rglob("*.toml"), *(ROOT / "jaxspec" / "models").rglob("*.*")]
    kept.append(ROOT / "pallas_kernels" / "tuned.toml")
    for path in kept:
        name = path.relative_to(ROOT).as_posix()
        assert (f"jaxspec/{name}" if name.startswith("configs/") else name) in names
    for path in [*(ROOT / "jaxspec").rglob("*.py"), *(ROOT / "pallas_kernels").rglob("*.py")]:
        assert path.relative_to(ROOT).as_posix() in names
    assert not [name for name in names if name.startswith(("tests/", "scripts/", "configs/"))]
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    code = (
        "from jaxspec import resources, settings, text; "
        "print(resources.__file__); "
        "settings.read_run_config(resources.run_config_file('demo'), {}); "
        "text.Tokenizer.load(resources.model_dir('nano')); "
        "from pallas_kernels import tuning; "
        "tuning.select('index_topk', 'any', dict.fromkeys(tuning.SIZES['index_topk'], 1))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(str(tmp_path / "installed"))
