"""Run the tests of images.engine: ray, with Ray in an environment of its own that sees this one's packages."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".polyturn" / "ray"


def main() -> int:
    """Make the environment if it is not there, and run pytest in it."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", ENVIRONMENT], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    own = ENVIRONMENT / "lib" / version / "site-packages"
    (own / "polyturn_environment.pth").write_text(sysconfig.get_path("purelib") + "\n")
    if subprocess.run(
        [python, "-c", "import ray.data"], capture_output=True, check=False
    ).returncode:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        wanted = project["optional-dependencies"]["ray"]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
    tests = ["-m", "pytest", "-q", "tests/unit/data/test_ray_engine.py", *sys.argv[1:]]
    return subprocess.run([python, *tests], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
