"""A registered policy as an MLflow model (models from code): `predict` on pictures and questions.

This file is copied into the model beside the policy and `polyturn.zip`, the code that it was registered with, which
is used unless polyturn is loaded already. It runs where the model is served.
"""

import base64
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pandas as pd
from mlflow.models import set_model
from mlflow.pyfunc.model import PythonModel, PythonModelContext

if TYPE_CHECKING:
    from polyturn.answer import Answerer

CODE = "polyturn.zip"
POLICY = "policy"


class PolicyModel(PythonModel):
    """Columns `image` (bytes of a picture's file, or base64 text of them) and `question`; the answer of each row."""

    _answerer: "Answerer"

    def load_context(self, context: PythonModelContext) -> None:
        """Load the weights."""
        directory = Path(str(context.artifacts[POLICY]))
        if "polyturn" not in sys.modules:
            sys.path.insert(0, str(directory / CODE))
        from polyturn import params  # noqa: PLC0415  (of the model's own code)
        from polyturn.answer import Answerer  # noqa: PLC0415

        config = cast("Mapping[str, Any]", context.model_config)
        self._answerer = Answerer(directory, params.parse(dict(config["params"]), origin="MLmodel"))

    def predict(  # pyright: ignore[reportIncompatibleMethodOverride]  (the base returns nothing)
        self,
        context: PythonModelContext,
        model_input: pd.DataFrame,
        params: dict[str, Any] | None = None,
    ) -> pd.DataFrame:
        """Answer every row; `params`: temperature (0: greedy), seed."""
        from polyturn.answer import Question  # noqa: PLC0415

        del context
        chosen = params or {}
        questions = [
            Question(_bytes(image), str(text))
            for image, text in zip(model_input["image"], model_input["question"], strict=True)
        ]
        answers = self._answerer.answer(
            questions,
            temperature=float(chosen.get("temperature", 0.0)),
            seed=int(chosen.get("seed", 0)),
        )
        return pd.DataFrame([vars(answer) for answer in answers])


def _bytes(image: object) -> bytes:
    return image if isinstance(image, bytes) else base64.b64decode(str(image))


set_model(PolicyModel())
