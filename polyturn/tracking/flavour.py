"""The pyfunc flavour of a policy: MLmodel, signature, input example, pinned requirements and code, beside the weights."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import mlflow
import pandas as pd
import yaml
from mlflow.models import ModelSignature
from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema
from PIL import Image

import polyturn
from polyturn.tracking import pyfunc_model

# What polyturn.answer imports, directly or by torch and transformers at run time (a test compares).
REQUIREMENTS = (
    "accelerate", "boto3", "huggingface-hub", "jinja2", "mlflow", "mpmath", "numpy", "pandas", "peft", "pillow", "psutil",
    "pydantic", "pyyaml", "ruamel.yaml", "safetensors", "sympy", "tokenizers", "torch", "tqdm", "transformers",
)  # fmt: skip
SIGNATURE = ModelSignature(
    inputs=Schema([ColSpec("binary", "image"), ColSpec("string", "question")]),
    outputs=Schema(
        [
            ColSpec("string", "answer"),
            ColSpec("string", "text"),
            ColSpec("long", "num_turns"),
            ColSpec("string", "stop_reason"),
        ]
    ),
    params=ParamSchema(
        [ParamSpec("temperature", "double", 0.0), ParamSpec("seed", "long", 0)],
    ),
)
# What `write` leaves; MLflow adds the last when it downloads a version.
NAMES = frozenset(
    {
        "MLmodel", "conda.yaml", "input_example.json", "polyturn.zip", "pyfunc_model.py", "python_env.yaml",
        "requirements.txt", "serving_input_example.json", "registered_model_meta",
    }
)  # fmt: skip
_CODE_DIRECTORIES = ("polyturn", "plugins")  # the user's environments lie in plugins/


def write(target: Path, params: Mapping[str, object], root: Path) -> None:
    """Write the files that make a Hugging Face directory, copied over them, a pyfunc model too.

    `params` is params.yaml as a tree; the plug-ins are those of the checkout `root`.
    """
    with TemporaryDirectory() as scratch:
        placeholder = Path(scratch) / pyfunc_model.POLICY
        placeholder.mkdir()
        (placeholder / "empty").touch()
        mlflow.pyfunc.save_model(
            path=target,
            python_model=str(Path(pyfunc_model.__file__)),
            artifacts={pyfunc_model.POLICY: str(placeholder)},
            model_config={"params": params},
            pip_requirements=pinned(),
            signature=SIGNATURE,
            input_example=(_example(), {"temperature": 0.0}),
        )
    _put_weights_at_the_root(target)
    with zipfile.ZipFile(target / pyfunc_model.CODE, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, name in _code(root):
            # No times: equal code is an equal file.
            archive.writestr(zipfile.ZipInfo(name), path.read_bytes())


def pinned() -> list[str]:
    """Requirements as installed here, without local labels (+cpu), which indexes do not know."""
    return [f"{name}=={metadata.version(name).partition('+')[0]}" for name in REQUIREMENTS]


def _example() -> pd.DataFrame:
    picture = io.BytesIO()
    Image.new("RGB", (64, 64), "white").save(picture, "PNG")
    return pd.DataFrame({"image": [picture.getvalue()], "question": ["Find x."]})


def _put_weights_at_the_root(target: Path) -> None:
    """The model's directory is the Hugging Face directory itself, for all who know nothing of MLflow."""
    path = target / "MLmodel"
    tree = cast("dict[str, dict[str, dict[str, object]]]", yaml.safe_load(path.read_text()))
    own = tree["flavors"]["python_function"]
    own["artifacts"] = {pyfunc_model.POLICY: {"path": ".", "uri": "."}}
    own["model_code_path"] = Path(pyfunc_model.__file__).name  # not where it lay on this machine
    path.write_text(yaml.safe_dump(tree))
    for left in sorted((target / "artifacts").rglob("*"), reverse=True):
        left.rmdir() if left.is_dir() else left.unlink()
    (target / "artifacts").rmdir()


def _code(root: Path) -> Iterator[tuple[Path, str]]:
    package = Path(polyturn.__file__).parent
    for name, directory in zip(_CODE_DIRECTORIES, (package, root / "plugins"), strict=True):
        for path in sorted(directory.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path, f"{name}/{path.relative_to(directory).as_posix()}"
