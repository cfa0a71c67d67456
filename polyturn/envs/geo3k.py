r"""Geometry3K with a scoring tool: the policy may have an answer checked before it boxes it (slime's task).

Both tool names of slime are accepted. With `oracle: false` in env.params (or env.eval_params) the feedback says
only whether the answer can be read, so that an evaluation leaks nothing. `rounding` and `tolerance` are to be set as in
the reward section. The loop owns the turn limit; the env only says when one reply is left.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from polyturn.data.synthetic import Figure
from polyturn.envs.base import Observation, ToolSchema
from polyturn.envs.demonstration import Demonstration, Say
from polyturn.envs.tools import ToolCall, ToolCallError, parse_tool_calls
from polyturn.grading.compare import Rounding
from polyturn.reward import grade, is_gradable
from polyturn.types import Json, Message, Problem

TOOL_NAMES = ("calc_score", "calc_geo3k_reward")
LAST_CHANCE = "You have one reply left: write your final answer as Answer: \\boxed{ANSWER}."

_RIGHT = "The answer {answer} is correct (score 1). Now write your final answer as Answer: \\boxed{{ANSWER}}."
_WRONG = "The answer {answer} is wrong (score 0). Look at the figure again and reason differently."
_READABLE = (
    "The answer {answer} is well formed. When you are sure, write it as Answer: \\boxed{{ANSWER}}."
)
_UNREADABLE = (
    "The answer {answer} is no value. Give a number or an expression such as 3\\sqrt{{2}}."
)
_MAX_SHOWN = 200  # characters of an answer that the feedback repeats


def _schema(name: str) -> ToolSchema:
    answer = {"type": "string", "description": "Your answer: a number or an expression in LaTeX."}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": "Check an answer to the problem before you give your final answer.",
            "parameters": {
                "type": "object",
                "properties": {"answer": answer},
                "required": ["answer"],
            },
        },
    }


class Geo3kEnv:
    """The scoring tool of one problem."""

    tools: tuple[ToolSchema, ...] = (_schema(TOOL_NAMES[0]),)

    def __init__(
        self,
        answer: str,
        *,
        oracle: bool = True,
        max_turns: int = 1,
        rounding: Rounding = "reference",
        tolerance: float = 0.0,
    ) -> None:
        self._answer = answer
        self._oracle = oracle
        self._rounding: Rounding = rounding
        self._tolerance = tolerance
        self._max_turns = max_turns
        self._num_turns = 0

    def step(self, response_text: str) -> tuple[Observation, bool, dict[str, Json]]:
        """Answer the last tool call of a reply; a reply without one is final.

        Returns:
            The feedback, whether the reply was final, and info: num_tool_calls, tool_error (bool) and, where an
            answer was scored with the oracle, score (0 or 1).
        """
        self._num_turns += 1
        calls = parse_tool_calls(response_text)
        info: dict[str, Json] = {"num_tool_calls": len(calls), "tool_error": False}
        if not calls:
            return Observation(), True, info
        answer = _answer_of(calls[-1])
        if isinstance(answer, ToolCallError):
            info["tool_error"] = True
            text = answer.message
        else:
            text, score = self._feedback(answer)
            info.update({} if score is None else {"score": score})
        if self._max_turns - self._num_turns == 1:
            text = f"{text} {LAST_CHANCE}"
        return Observation(text, role="tool"), False, info

    def _feedback(self, answer: str) -> tuple[str, float | None]:
        shown = answer if len(answer) <= _MAX_SHOWN else f"{answer[:_MAX_SHOWN]}..."
        if not is_gradable(answer):
            return _UNREADABLE.format(answer=shown), 0.0 if self._oracle else None
        if not self._oracle:
            return _READABLE.format(answer=shown), None
        verdict = grade(answer, self._answer, rounding=self._rounding, tolerance=self._tolerance)
        return (_RIGHT if verdict.match else _WRONG).format(answer=shown), float(verdict.match)


def _answer_of(call: ToolCall | ToolCallError) -> str | ToolCallError:
    if isinstance(call, ToolCallError):
        return call
    if call.name not in TOOL_NAMES:
        return ToolCallError(f"there is no function {call.name[:40]!r}, only {TOOL_NAMES[0]!r}")
    answer = call.arguments.get("answer")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return repr(answer)
    if not isinstance(answer, str) or not answer.strip():
        return ToolCallError('"arguments" must hold "answer" as a string')
    return answer.strip()


def build_env(problem: Problem, params: Mapping[str, object], max_turns: int) -> Geo3kEnv:
    """Make the env of a problem.

    `params` may hold `oracle` (default true: the feedback tells right from wrong), `rounding` and `tolerance`
    (defaults as in reward).

    Raises:
        ValueError: another key, or a value of another type; the message names the key.
    """
    unknown = sorted(set(params) - {"oracle", "rounding", "tolerance"})
    if unknown:
        raise ValueError(
            f"env.params: {unknown} are unknown to geo3k; it takes oracle, rounding, tolerance"
        )
    oracle, rounding = params.get("oracle", True), params.get("rounding", "reference")
    tolerance = params.get("tolerance", 0.0)
    if not isinstance(oracle, bool):
        raise ValueError(f"env.params.oracle must be true or false, got {oracle!r}")
    if rounding not in ("reference", "strict"):
        raise ValueError(f"env.params.rounding must be 'reference' or 'strict', got {rounding!r}")
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or tolerance < 0:
        raise ValueError(f"env.params.tolerance must be a number of at least 0, got {tolerance!r}")
    return Geo3kEnv(
        problem.answer, oracle=oracle, max_turns=max_turns, rounding=rounding, tolerance=tolerance
    )


# ---- demonstrations for the warm start ---------------------------------------------------------------------------

READ_QUESTION = "Find x."


def texts() -> list[str]:
    """What this environment and its demonstrations say, for the tokenizer of a small model (model.small.texts)."""
    feedback = (_RIGHT, _WRONG, _READABLE, _UNREADABLE)
    return [
        READ_QUESTION,
        LAST_CHANCE,
        *(text.format(answer=f"{n}") for n in range(50) for text in feedback),
    ]


def demonstrations(
    kind: str, problem: Problem, rng: random.Random, params: Mapping[str, float]
) -> Demonstration:
    r"""Examples for supervised training.

    `answer`: the prompt and `Answer: \boxed{ANSWER}`, from labels alone. The others need synthetic problems:
    `read`: the picture, "Find x.", its label. `confirm`: the right answer was checked, perhaps after a wrong one;
    only the final reply, which repeats it, is trained. `retry`: a deliberately weak demonstrator. A guess of its is right
    with probability params["skill"], else one of the answers that labels from params["guess_min"] to
    params["guess_max"] give. With probability params["check"] it has its guess checked first, and after each
    wrong one it checks another with probability params["persist"], as long as params["max_turns"] (to be set as
    rollout.max_turns) leaves a final reply. A share params["oracle"] of the examples is under `oracle: true`; in
    the others the feedback tells nothing, and the demonstrator keeps its guess.

    Raises:
        ValueError: an unknown kind, or a problem without the metadata.
    """
    makers = {
        "answer": _answer_example,
        "read": _read_example,
        "confirm": _confirm_example,
        "retry": _retry_example,
    }
    if kind not in makers:
        raise ValueError(
            f"warmstart.phases: polyturn.envs.geo3k knows the kinds {sorted(makers)}, got {kind!r}"
        )
    if kind != "answer" and "label" not in problem.metadata:
        raise ValueError(
            f"warmstart.examples: the kind {kind!r} of polyturn.envs.geo3k:demonstrations needs data.source: "
            f"synthetic, but problem {problem.id} has no label in its metadata; the kind 'answer' takes other data too"
        )
    return makers[kind](problem, rng, params)


def tool_call(answer: str) -> str:
    """The call that has an answer checked, as the demonstrations write it."""
    return f'<tool_call>{{"name": "{TOOL_NAMES[0]}", "arguments": {{"answer": "{answer}"}}}}</tool_call>'


def final(answer: str) -> str:
    """A final reply."""
    return f"Answer: \\boxed{{{answer}}}"


def _answer_example(
    problem: Problem, rng: random.Random, params: Mapping[str, float]
) -> Demonstration:
    del rng, params
    return Demonstration(problem.messages, (Say(final(problem.answer)),), "answer")


def _read_example(
    problem: Problem, rng: random.Random, params: Mapping[str, float]
) -> Demonstration:
    del rng, params
    prompt = Message("user", (*problem.images, READ_QUESTION))
    return Demonstration((prompt,), (Say(final(str(problem.metadata["label"]))),), "read")


def _confirm_example(
    problem: Problem, rng: random.Random, params: Mapping[str, float]
) -> Demonstration:
    max_turns = int(params["max_turns"])
    env = Geo3kEnv(problem.answer, max_turns=max_turns)
    wrong = [guess for guess in _answers(problem, params) if guess != problem.answer]
    path = [*rng.sample(wrong, rng.randrange(max_turns - 1)), problem.answer]
    turns: list[Say | Message] = []
    for call in map(tool_call, path):
        turns += [Say(call, ()), Message("tool", (env.step(call)[0].text,))]
    return Demonstration(problem.messages, (*turns, Say(final(problem.answer))), "confirm")


def _retry_example(
    problem: Problem, rng: random.Random, params: Mapping[str, float]
) -> Demonstration:
    has_oracle = rng.random() < params["oracle"]
    max_turns = int(params["max_turns"])
    env = Geo3kEnv(problem.answer, oracle=has_oracle, max_turns=max_turns)
    turns: list[Say | Message] = []
    tried: list[str] = []
    guess = _guess(problem, rng, params, tried)
    goes_on = rng.random() < params["check"]
    while goes_on and len(tried) < max_turns - 1:
        call = tool_call(guess)
        turns += [Say(call), Message("tool", (env.step(call)[0].text,))]
        tried.append(guess)
        if not has_oracle or guess == problem.answer:
            break
        guess = _guess(problem, rng, params, tried)
        goes_on = rng.random() < params["persist"]
    return Demonstration(problem.messages, (*turns, Say(final(guess))), "retry")


def _guess(
    problem: Problem, rng: random.Random, params: Mapping[str, float], tried: Sequence[str]
) -> str:
    """The right answer with probability params["skill"], else any that was not tried."""
    if problem.answer not in tried and rng.random() < params["skill"]:
        return problem.answer
    others = _answers(problem, params)
    return rng.choice([other for other in others if other not in tried] or others)


def _answers(problem: Problem, params: Mapping[str, float]) -> list[str]:
    """What would be right if the label were any from params["guess_min"] to params["guess_max"]."""
    shape, quantity = str(problem.metadata["shape"]), str(problem.metadata["quantity"])
    labels = range(int(params["guess_min"]), int(params["guess_max"]) + 1)
    return [str(Figure(shape, quantity, label, "").answer) for label in labels]
