"""A small HTTP server that speaks SGLang's protocol, backed by the `hf` sampler; it can be told to misbehave."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
from aiohttp import web
from PIL import Image
from safetensors.torch import load_file
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from polyturn.policy import model
from polyturn.render import Renderer
from polyturn.sampler.base import SampleRequest
from polyturn.sampler.hf import HfSampler
from polyturn.sampler.sglang.checksums import server_name
from polyturn.types import ImageRecord


@dataclass
class FakeServer:
    """State of the server; `faults` are taken one a /generate request, from the front."""

    policy: model.Policy
    faults: list[str] = field(default_factory=list)
    bodies: list[dict] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    peers: list[object] = field(default_factory=list)  # of each /generate request: its connection
    version: str = "default"
    is_deaf: bool = False  # takes no new weights, but says that it did
    forgets: bool = False  # says that it has no keys and values of earlier turns
    probes: list[dict] = field(default_factory=list)  # bodies that a test has put aside
    url: str = ""
    groups: dict[str, ProcessGroupGloo] = field(default_factory=dict)  # that it is a member of
    broadcasts: str = "take"  # or "refuse" or "hang"

    def __post_init__(self) -> None:
        self._sampler = HfSampler(self.policy, Renderer(self.policy))
        self._known: dict[tuple[int, ...], int] = {}  # ids of a turn -> expanded ones computed

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application(client_max_size=100_000_000)
        app.router.add_post("/generate", self.generate)
        app.router.add_get("/health", self._answer({}))
        app.router.add_get("/server_info", self._answer({"version": "0.5.15"}))
        app.router.add_get("/model_info", self.model_info)
        app.router.add_post("/update_weights_from_disk", self.update_from_disk)
        app.router.add_post("/init_weights_update_group", self.join)
        app.router.add_post("/update_weights_from_distributed", self.update_from_broadcast)
        app.router.add_post("/destroy_weights_update_group", self.leave)
        app.router.add_post("/weights_checker", self.checksums)
        app.router.add_post("/abort_request", self.abort)
        for path in ("/flush_cache", "/release_memory_occupation", "/resume_memory_occupation"):
            app.router.add_post(path, self._answer({}))
        return app

    def _answer(self, content: dict):
        async def handler(request: web.Request) -> web.Response:
            self.calls.append(request.path)
            return web.json_response(content)

        return handler

    async def model_info(self, request: web.Request) -> web.Response:
        """Tell the weight version."""
        return web.json_response({"weight_version": self.version})

    async def abort(self, request: web.Request) -> web.Response:
        """Remember who was given up."""
        self.aborted.append((await request.json())["rid"])
        return web.Response()

    async def update_from_disk(self, request: web.Request) -> web.Response:
        """Load a directory."""
        content = await request.json()
        self.calls.append(request.path)
        self.version = content["weight_version"]
        if not self.is_deaf:
            for file in sorted(Path(content["model_path"]).glob("*.safetensors")):
                self._sampler.update_weights(iter(load_file(file).items()), 0)
        return web.json_response({"success": True, "message": "ok"})

    async def join(self, request: web.Request) -> web.Response:
        """Enter a group as the rank that is told, over gloo."""
        told = await request.json()
        name, world = told["group_name"], told["world_size"]

        def enter() -> ProcessGroupGloo:
            store = TCPStore(told["master_address"], told["master_port"], world, is_master=False)
            whole = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
            patience = timedelta(seconds=20)
            return ProcessGroupGloo(whole, told["rank_offset"], world, timeout=patience)

        self.groups[name] = await asyncio.to_thread(enter)
        return web.json_response({"success": True, "message": "ok"})

    async def update_from_broadcast(self, request: web.Request) -> web.Response:
        """Take the tensors of a bucket from rank 0."""
        content = await request.json()
        self.calls.append(request.path)
        if self.broadcasts == "hang":
            await asyncio.sleep(5)
        if self.broadcasts == "refuse":
            return web.json_response({"success": False, "message": "no such weight"}, status=400)
        group = self.groups[content["group_name"]]
        kinds = zip(content["names"], content["dtypes"], content["shapes"], strict=True)

        held = dict(self.policy.model.named_parameters())

        def receive() -> None:
            for name, dtype, shape in kinds:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype))
                group.broadcast(tensor, 0).wait()
                held[name].data.copy_(tensor)

        await asyncio.to_thread(receive)
        self.version = content["weight_version"]
        return web.json_response({"success": True, "message": "ok"})

    async def leave(self, request: web.Request) -> web.Response:
        """Forget a group."""
        is_known = self.groups.pop((await request.json())["group_name"], None) is not None
        return web.json_response({"success": is_known}, status=200 if is_known else 400)

    async def checksums(self, request: web.Request) -> web.Response:
        """Hashes as SGLang names them; this model fuses nothing, so stacks are made here."""
        named = dict(self.policy.model.named_parameters())
        sums = {}
        for name, tensor in named.items():
            told, value = server_name(name), tensor.data
            if ".q_proj." in told:
                parts = [named[name.replace("q_proj", f"{part}_proj")].data for part in "qkv"]
                told, value = told.replace("q_proj", "qkv_proj"), torch.cat(parts)
            elif ".gate_proj." in told:
                parts = [value, named[name.replace("gate_proj", "up_proj")].data]
                told, value = told.replace("gate_proj", "gate_up_proj"), torch.cat(parts)
            elif any(f".{part}." in told for part in ("k_proj", "v_proj", "up_proj")):
                continue
            elif told == "model.embed_tokens.weight":
                value = torch.nn.functional.pad(value, (0, 0, 0, -len(value) % 64))
            sums[told] = hash_tensor(value)
        return web.json_response({"success": True, "ranks": [{"checksums": sums}]})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """One reply of the `hf` sampler, in SGLang's words."""
        content = await request.json()
        self.bodies.append(content)
        assert request.transport is not None
        self.peers.append(request.transport.get_extra_info("peername"))
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "500":
            return web.json_response({"error": "out of memory"}, status=500)
        if fault == "500 in plain text":
            return web.Response(text="Internal Server Error", status=500)
        if fault == "null":
            return web.Response(text="null")
        if fault in ("429", "503"):
            return web.json_response({"error": "the request queue is full"}, status=int(fault))
        if fault == "disconnect":
            request.transport.close()
            return web.Response()
        if fault == "hang":
            await asyncio.sleep(30)
        if fault == "abort":
            return web.json_response(_aborted(self.version))
        return web.json_response(await self._reply(content, fault))

    async def _reply(self, content: dict, fault: str) -> dict:
        images = tuple(_record(uri) for uri in content.get("image_data", ()))
        if fault == "drop image":
            blank = Image.new("RGB", (images[0].width, images[0].height), "white")
            images = (_png(blank), *images[1:])
        sampling = content["sampling_params"]
        reply = (
            await self._sampler.generate(
                [
                    SampleRequest(
                        session=content.get("rid", "bare"),
                        engine_ids=tuple(content["input_ids"]),
                        images=images,
                        seed=sampling.get("sampling_seed", 42),
                        max_new_tokens=sampling["max_new_tokens"],
                        temperature=sampling["temperature"],
                    )
                ]
            )
        )[0]
        cached = self._cached(tuple(content["input_ids"]))
        computed = reply.prompt_length + len(reply.token_ids) - 1
        self._known[(*content["input_ids"], *reply.token_ids)] = computed
        ids = list(reply.token_ids)
        scored = [[p, i, None] for p, i in zip(reply.logprobs, ids, strict=True)]
        if fault == "wrong ids":
            ids[0] += 1
        version = "0" if fault == "old version" else self.version
        matched = {"matched": ids[-1]} if reply.finish_reason == "stop" else {}
        return {
            "output_ids": ids,
            "meta_info": {
                "prompt_tokens": reply.prompt_length + (3 if fault == "longer prompt" else 0),
                "cached_tokens": cached,
                "completion_tokens": len(ids),
                "weight_version": version,
                "output_token_logprobs": scored,
                "finish_reason": {"type": reply.finish_reason, **matched},
            },
        }

    def _cached(self, ids: tuple[int, ...]) -> int:
        """Expanded prompt tokens that an earlier turn of the same conversation computed."""
        found = [n for known, n in self._known.items() if ids[: len(known)] == known]
        return 0 if self.forgets else max(found, default=0)


def hash_tensor(tensor: torch.Tensor) -> str:
    """A hash of a tensor's bytes."""
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]


@contextmanager
def serving(server: FakeServer) -> Iterator[FakeServer]:
    """Run it on a free port, in a thread of its own."""
    loop = asyncio.new_event_loop()
    started = threading.Event()

    async def up() -> web.AppRunner:
        runner = web.AppRunner(server.app())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        server.url = f"http://127.0.0.1:{port}"
        started.set()
        return runner

    def run() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(up())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(20)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


def _aborted(version: str) -> dict:
    return {
        "output_ids": [],
        "meta_info": {
            "prompt_tokens": 1,
            "weight_version": version,
            "output_token_logprobs": [],
            "finish_reason": {"type": "abort", "message": "Aborted"},
        },
    }


def _record(uri: str) -> ImageRecord:
    png = base64.b64decode(uri.removeprefix("data:image/png;base64,"))
    with Image.open(io.BytesIO(png)) as picture:
        return ImageRecord.from_png(png, picture.width, picture.height)


def _png(picture: Image.Image) -> ImageRecord:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return ImageRecord.from_png(file.getvalue(), picture.width, picture.height)
