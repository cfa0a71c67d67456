"""The images stage against img2dataset: small PNGs from a loopback server.

Prints images/s, CPU seconds and peak memory of both, run in turn several times, and the growth of our memory from
2,000 images to all; the result holds medians.
img2dataset is installed into an environment of its own (--peer-dir); where that fails, the peer is a plain
aiohttp + Pillow loop, and the table says so. The server runs in a process of its own and is counted in
neither's CPU seconds, but shares the machine's cores with both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from polyturn.data.files import write_jsonl

SIDE = 64  # pixels of the square pictures


def picture(index: int) -> bytes:
    """A distinct RGB PNG: stripes whose colours hold the index."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        )

    rows = b"".join(
        b"\0" + bytes((index % 256, index // 256 % 256, (index + 3 * y) % 256)) * SIDE
        for y in range(SIDE)
    )
    header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 1)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


class PictureProtocol(asyncio.Protocol):
    """Answers GET /<index>.png, keeping connections open."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember where answers go."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._buffer = b""

    def data_received(self, data: bytes) -> None:
        """Answer every whole request."""
        self._buffer += data
        while b"\r\n\r\n" in self._buffer:
            head, self._buffer = self._buffer.split(b"\r\n\r\n", 1)
            body = picture(int(head.split(b" ", 2)[1].strip(b"/").removesuffix(b".png")))
            answer = (
                b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: %d\r\n\r\n"
                % len(body)
            )
            self._transport.write(answer + body)
            if b"connection: close" in head.lower():
                self._transport.close()


async def serve() -> None:
    """Serve until killed; the port goes to stdout."""
    server = await asyncio.get_running_loop().create_server(PictureProtocol, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def run_stage(root: Path) -> None:
    """The images stage over root/raw."""
    from polyturn.data.images import ImageJob, build_image_store  # noqa: PLC0415
    from polyturn.params import ImagesParams  # noqa: PLC0415

    job = ImageJob(
        raw=root / "raw",
        out=root / "out",
        work=root / "work",
        cache=root / "cache",
        logs=root / "logs",
        images=ImagesParams(  # as many requests in flight as the peer's two processes of 32 threads
            allow_hosts=("127.0.0.1",), serve_host=None, concurrency=64, per_host=64
        ),
        dedup_splits=True,
    )
    report = build_image_store(job)
    assert report.num_kept == report.num_rows, report.table()


def run_plain(root: Path) -> None:
    """The simplest honest loop: aiohttp, Pillow, one file per picture."""
    import io  # noqa: PLC0415

    import aiohttp  # noqa: PLC0415
    from PIL import Image  # noqa: PLC0415

    urls = (root / "urls.txt").read_text().split()
    (root / "plain").mkdir()

    async def loop() -> None:
        slots = asyncio.Semaphore(32)

        async def one(index: int, url: str, session: aiohttp.ClientSession) -> None:
            async with slots, session.get(url) as response:
                body = await response.read()
            Image.open(io.BytesIO(body)).convert("RGB").save(root / "plain" / f"{index}.png")

        async with aiohttp.ClientSession() as session:
            await asyncio.gather(*(one(i, url, session) for i, url in enumerate(urls)))

    asyncio.run(loop())


@dataclass(frozen=True)
class Measured:
    """One program's run; peak memory is the sum over its processes where it has several."""

    seconds: float
    cpu_s: float
    peak_mb: float


def measure(command: Sequence[str], environment: dict[str, str] | None = None) -> Measured:
    """Run a program and its children to the end.

    Raises:
        RuntimeError: it fails.
    """
    started = time.monotonic()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, **(environment or {})}
        )
        peak = 0.0
        while process.poll() is None:
            peak = max(peak, _tree_mb(process.pid))
            time.sleep(0.05)
        seconds = time.monotonic() - started
        if process.returncode:
            log.seek(0)
            raise RuntimeError(f"{command[:3]} fails: {log.read().decode()[-2000:]}")
    return Measured(seconds, 0.0, peak)


def _tree_mb(pid: int) -> float:
    """Resident memory of a process and its descendants."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0.0
    kb = next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")), 0)
    return kb / 1024 + sum(_tree_mb(int(child)) for child in children)


def timed(command: Sequence[str]) -> Measured:
    """`measure`, with the CPU seconds of all its processes."""
    before = os.times()
    found = measure(command)
    after = os.times()
    cpu_s = (after.children_user + after.children_system) - (
        before.children_user + before.children_system
    )
    return Measured(found.seconds, cpu_s, found.peak_mb)


def prepare(root: Path, port: int, count: int, first: int) -> None:
    """Rows for the stage and a URL list for the peer."""
    urls = [f"http://127.0.0.1:{port}/{index}.png" for index in range(first, first + count)]
    (root / "raw" / "pictures").mkdir(parents=True)
    rows = (
        {
            "id": f"{i:06d}",
            "split": "train",
            "problem": "<image>x",
            "answer": "1",
            "images": [url],
            "metadata": {},
        }
        for i, url in enumerate(urls)
    )
    write_jsonl(root / "raw" / "problems.jsonl", rows)
    (root / "raw" / "quarantine.jsonl").write_text("")
    (root / "urls.txt").write_text("\n".join(urls))


def peer_python(directory: Path) -> Path | None:
    """The interpreter of an environment with img2dataset; None if it cannot be installed."""
    python = directory / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    probe = [str(python), "-c", "import img2dataset"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        install = [str(python), "-m", "pip", "install", "-q", "img2dataset"]
        done = subprocess.run(install, capture_output=True, text=True, check=False)
        if done.returncode or subprocess.run(probe, capture_output=True, check=False).returncode:
            print(f"img2dataset cannot be used here: {done.stderr.strip()[-300:]}")
            return None
    return python


def peer_command(python: Path | None, root: Path) -> list[str]:
    """img2dataset with the same work: decode, check, encode PNG, sha256; or the plain loop."""
    if python is None:
        return [sys.executable, __file__, "--plain", str(root)]
    flags = {
        "url_list": root / "urls.txt",
        "output_folder": root / "peer",
        "output_format": "files",
        "resize_mode": "no",
        "encode_format": "png",
        "encode_quality": 3,
        "processes_count": 2,
        "thread_count": 32,
        "compute_hash": "sha256",
        "number_sample_per_shard": 1000,
    }
    return [
        str(python.parent / "img2dataset"),
        *(f"--{key}={value}" for key, value in flags.items()),
    ]


def compare(root: Path, port: int, count: int, peer: Path | None, rounds: int) -> dict[str, float]:
    """Run both in turn, `rounds` times, and print the table; the result holds medians."""
    name = "img2dataset" if peer else "aiohttp + Pillow loop"
    print(f"{'program':<24}{'images':>8}{'images/s':>10}{'CPU s':>8}{'peak MB':>9}")
    small = _ours(root / "small", port, 2_000, 0)
    ours: list[Measured] = []
    theirs: list[Measured] = []
    for turn in range(rounds):
        directory = root / f"round{turn}"
        ours.append(_ours(directory, port, count, 2_000 + turn * count))
        theirs.append(timed(peer_command(peer, directory)))
        _line(name, count, theirs[-1])
    again = timed([sys.executable, __file__, "--stage", str(root / "round0")])
    _line("polyturn, all cached", count, again)
    seconds, peer_seconds = (median(run.seconds for run in runs) for runs in (ours, theirs))
    ratios = [peer.seconds / own.seconds for own, peer in zip(ours, theirs, strict=True)]
    cpu = [peer.cpu_s / own.cpu_s for own, peer in zip(ours, theirs, strict=True)]
    return {
        "ratio_vs_peer": round(median(ratios), 3),
        "cpu_ratio_vs_peer": round(median(cpu), 3),
        "memory_growth_mb": round(median(run.peak_mb for run in ours) - small.peak_mb, 1),
        "images_per_s": round(count / seconds, 1),
        "peer_images_per_s": round(count / peer_seconds, 1),
    }


def _ours(directory: Path, port: int, count: int, first: int) -> Measured:
    prepare(directory, port, count, first)
    found = timed([sys.executable, __file__, "--stage", str(directory)])
    _line("polyturn images", count, found)
    return found


def _line(name: str, count: int, found: Measured) -> None:
    speed = count / found.seconds
    print(f"{name:<24}{count:>8}{speed:>10.0f}{found.cpu_s:>8.1f}{found.peak_mb:>9.0f}", flush=True)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="500 pictures, one round")
    parser.add_argument("--peer-dir", type=Path, default=Path(".polyturn/peers/img2dataset"))
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--stage", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--plain", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.count, options.rounds = 500, 1
    if options.serve:
        asyncio.run(serve())
    elif options.stage:
        run_stage(options.stage)
    elif options.plain:
        run_plain(options.plain)
    else:
        peer = peer_python(options.peer_dir)
        root = Path(tempfile.mkdtemp(prefix="polyturn-images-"))
        server = subprocess.Popen(
            [sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True
        )
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            print("RESULT " + json.dumps(compare(root, port, options.count, peer, options.rounds)))
        finally:
            server.terminate()
            server.wait()
            shutil.rmtree(root)


if __name__ == "__main__":
    main()
