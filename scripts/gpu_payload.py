"""Pack what an offline GPU host needs (`make gpu-payload`): two archives to unpack into one directory on PYTHONPATH.

The host has Linux x86-64, Python 3.12 and torch 2.11 for CUDA 13 (docs/gpu.md). This machine needs pip and a
package index; nothing is compiled.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_BYTES = 60 * 2**20  # of an archive
GLIBC_MINORS = range(39, 16, -1)
# Parts of wheels that a Hopper host does not load with polyturn's flags: kernels of other chips and of FlashAttention 3,
# static libraries, and service descriptions of AWS beyond S3. Prefixes of paths inside of the wheels.
PRUNED = (
    "sgl_kernel/flash_ops",
    "sgl_kernel/sm100/",
    "sgl_kernel/flashmla",
    "xgrammar/lib/",
    "mlflow/server/js/",
    "prefect/server/ui",
)
BOTOCORE_DATA = "botocore/data/"
KEPT_SERVICES = ("s3/", "sts/", "sso", "endpoints.json", "partitions.json", "sdk-default", "_retry")


@dataclass(frozen=True)
class Archive:
    """One archive: its name and the file that pins its packages."""

    name: str
    lock: Path


ARCHIVES = (
    Archive("engine", ROOT / "docker" / "gpu-engine.lock"),
    Archive("pipeline", ROOT / "docker" / "gpu-pipeline.lock"),
)


def download(lock: Path, wheels: Path) -> None:
    """Fetch the wheels of a lock for the GPU host; packages without a wheel come as source archives."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC_MINORS]
    platforms += ["manylinux2014_x86_64", "manylinux1_x86_64", "any"]
    target = ["--python-version", "3.12", "--implementation", "cp", "--abi", "cp312"]
    target += ["--abi", "abi3", "--abi", "none"]
    target += [part for platform in platforms for part in ("--platform", platform)]
    source_only = {"antlr4-python3-runtime"}
    pins = [line.strip() for line in lock.read_text().splitlines() if "==" in line]
    wheel_pins = [pin for pin in pins if pin.partition("==")[0] not in source_only]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels)]
    subprocess.run([*pip, "--only-binary=:all:", *target, *wheel_pins], check=True)
    for pin in pins:
        if pin not in wheel_pins:
            subprocess.run([*pip, "--no-binary=:all:", pin], check=True)


def is_pruned(name: str) -> bool:
    """Whether a file of a wheel stays out of the archive."""
    if name.startswith(BOTOCORE_DATA):
        return not name.removeprefix(BOTOCORE_DATA).startswith(KEPT_SERVICES)
    is_old_cuda = name.startswith("torch_memory_saver_") and "cu12" in name
    return is_old_cuda or name.startswith(PRUNED)


def unpack(wheels: Path, site: Path) -> None:
    """Lay all packages into one directory, as `pip install --target` would; scripts are left out."""
    for path in sorted(wheels.iterdir()):
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as wheel:
                wheel.extractall(site, [n for n in wheel.namelist() if not is_pruned(n)])
        else:
            with tempfile.TemporaryDirectory() as scratch, tarfile.open(path) as source:
                source.extractall(scratch, filter="data")
                (package,) = Path(scratch).glob("*/src/*/__init__.py")
                shutil.copytree(package.parent, site / package.parent.name, dirs_exist_ok=True)


def pack(archive: Archive, out: Path) -> Path:
    """Build one archive.

    Raises:
        SystemExit: it is larger than MAX_BYTES.
    """
    with tempfile.TemporaryDirectory() as scratch:
        wheels, site = Path(scratch) / "wheels", Path(scratch) / "site"
        wheels.mkdir()
        download(archive.lock, wheels)
        unpack(wheels, site)
        target = out / f"{archive.name}.tar.xz"
        tar = ["tar", "--sort=name", "--mtime=@0", "--owner=0", "--group=0", "-C", str(site)]
        with (
            target.open("wb") as file,
            subprocess.Popen([*tar, "-cf", "-", "."], stdout=-1) as process,
        ):
            subprocess.run(["xz", "-T0", "-6"], stdin=process.stdout, stdout=file, check=True)
    size = target.stat().st_size
    print(f"{target}: {size / 2**20:.1f} MiB")
    if size > MAX_BYTES:
        raise SystemExit(f"{target} is larger than {MAX_BYTES / 2**20:.0f} MiB")
    return target


def main() -> None:
    """Build the archives that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", choices=[archive.name for archive in ARCHIVES])
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for archive in ARCHIVES:
        if options.only in (None, archive.name):
            pack(archive, options.out)


if __name__ == "__main__":
    main()
