"""One trajectory under construction: two id streams, mask, logprobs, limits and the environment's answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from polyturn.comparator import Prompt
from polyturn.envs.base import (
    Env,
    EnvContext,
    ToolSchema,
    build,
    first_message,
    observation_message,
    plain_info,
    reset_of,
)
from polyturn.envs.call import Caller, discard
from polyturn.params import EnvParams, RolloutParams
from polyturn.render import Rendered, Renderer
from polyturn.reply_checks import Expected, objection
from polyturn.sampler.base import Reply, SampleRequest
from polyturn.seeds import derive
from polyturn.stream import TokenStream
from polyturn.types import (
    EnvFailures,
    Json,
    Message,
    Problem,
    StopReason,
    Trajectory,
    Turn,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EpisodeSettings:
    """What all trajectories of a rollout share; `seed` is the rollout's, already derived from run and step.

    `policy_version` is that of the weights which every reply must come from; None: that of the first reply.
    """

    renderer: Renderer
    build_env: Callable[..., object]
    env: EnvParams
    rollout: RolloutParams
    seed: int
    temperature: float
    policy_version: int | None = None


@dataclass
class Episode:
    """Takes replies until the environment is done or a limit is reached; then `close()`, and `finish()` gives the trajectory.

    The loop alone owns the limits: an observation that no reply can follow is neither rendered nor kept.
    """

    settings: EpisodeSettings
    problem: Problem
    group_index: int
    sibling: int
    occurrence: int = (
        0  # of the problem in its rollout: a step over an epoch's end may draw one twice
    )
    attempt: int = 0  # how often its environment failed before (env.retries)
    env_failures: EnvFailures = field(
        default_factory=EnvFailures
    )  # those of earlier attempts included
    stop_reason: StopReason | None = None
    error: str | None = None
    env: Env | None = None
    prompt: Prompt = field(default_factory=lambda: Prompt(()))
    _turns: list[Turn] = field(default_factory=list)
    _stream: TokenStream = field(default_factory=TokenStream)
    _policy_version: int | None = None
    _env_time_s: float = 0.0
    _caller: Caller = field(default_factory=Caller)

    @property
    def is_done(self) -> bool:
        """Whether no further reply is wanted."""
        return self.stop_reason is not None

    @property
    def session(self) -> str:
        """Name of the trajectory for the sampler."""
        name = f"{self.group_index}/{self.sibling}"
        return f"{name}/{self.attempt}" if self.attempt else name

    def again(self) -> Episode:
        """A fresh attempt at the same trajectory: from its start, with seeds of its own."""
        before = self.env_failures
        return Episode(
            self.settings,
            self.problem,
            self.group_index,
            self.sibling,
            self.occurrence,
            attempt=self.attempt + 1,
            env_failures=replace(before, num_retries=before.num_retries + 1),
            _env_time_s=self._env_time_s,
        )

    async def start(self) -> None:
        """Build the environment, show the prompt (with the env's tools and first observation)."""
        try:
            context = EnvContext(
                self.problem,
                self.settings.env.params,
                self.settings.rollout.max_turns,
                self._env_seed(),
            )
            built = await self._call(build, self.settings.build_env, context, on_late=discard)
            self.env = cast("Env", built)
            reset = reset_of(self.env, context.seed)
            first = (
                await self._call(first_message, self.env, await self._call(reset))
                if reset
                else None
            )
            tools = cast("Sequence[ToolSchema]", getattr(self.env, "tools", ()) or ())
            self.prompt = Prompt(
                (*self.problem.messages, *([cast("Message", first)] if first else [])),
                tools if self.settings.env.tools_in_prompt else (),
            )
            self._stream.append(
                self.settings.renderer.prompt(self.prompt.messages, self.prompt.tools)
            )
        except TimeoutError as error:
            self._fail(StopReason.ENV_TIMEOUT, error)
            return
        except (
            Exception
        ) as error:  # a bad environment is data: the trajectory fails, the run goes on
            self._fail(StopReason.ENV_ERROR, error)
            return
        if len(self._stream.token_ids) >= self.settings.rollout.max_context_tokens:
            self.stop_reason = StopReason.MAX_CONTEXT

    def request(self) -> SampleRequest:
        """What to ask the sampler for next."""
        return SampleRequest(
            session=self.session,
            engine_ids=tuple(self._stream.engine_ids),
            images=tuple(self._stream.images),
            seed=self.seed("sample", len(self._turns)),
            max_new_tokens=self._budget(),
            temperature=self.settings.temperature,
        )

    async def advance(self, reply: Reply) -> None:
        """Take a reply, verbatim; step the environment; show its observation if another reply can follow."""
        if reply.finish_reason in ("abort", "error"):
            self.stop_reason = (
                StopReason.ABORT if reply.finish_reason == "abort" else StopReason.SAMPLER_ERROR
            )
            self.error = reply.error
            return
        if wrong := objection(reply, self._expected(), self.settings.renderer):
            where = f"problem {self.problem.id} sibling {self.sibling} turn {len(self._turns)}"
            self._fail(wrong.reason, f"{where}: {wrong.message}")
            return
        self._policy_version = reply.weight_version
        self._stream.take(reply)
        text = self.settings.renderer.decode(reply.token_ids)
        if self._is_cut(reply):
            self._close_turn(reply, text, None, {})
            self.stop_reason = self._limit_reached()
            return
        try:
            observation, is_done, info = await self._step(text)
            message = (
                None if is_done else await self._call(observation_message, self.env, observation)
            )
            shown = self._show(cast("Message | None", message))
        except TimeoutError as error:
            self._close_turn(reply, text, None, {})
            self._fail(StopReason.ENV_TIMEOUT, error)
            return
        except (
            Exception
        ) as error:  # a bad environment is data: the trajectory fails, the run goes on
            self._close_turn(reply, text, None, {})
            self._fail(StopReason.ENV_ERROR, error)
            return
        self._close_turn(reply, text, shown, info)

    async def close(self) -> None:
        """Close the environment; a failure is counted and logged."""
        try:
            close = getattr(self.env, "close", None)
            if callable(close):
                await self._call(close)
        except Exception as error:  # closing can no longer change what was sampled
            count = self.env_failures.num_close_failures + 1
            self.env_failures = replace(self.env_failures, num_close_failures=count)
            logger.warning("env.close of problem %s failed: %s", self.problem.id, told(error))
        finally:
            self._caller.end()

    def finish(self) -> Trajectory:
        """Freeze the trajectory."""
        assert self.stop_reason is not None
        return Trajectory(
            problem=self.problem,
            group_index=self.group_index,
            sibling=self.sibling,
            turns=tuple(self._turns),
            token_ids=np.array(self._stream.token_ids, dtype=np.int64),
            loss_mask=np.array(self._stream.loss_mask, dtype=np.int8),
            logprobs=np.array(self._stream.logprobs, dtype=np.float32),
            images=tuple(self._stream.images),
            stop_reason=self.stop_reason,
            policy_version=self._policy_version or 0,
            error=self.error,
            tokens=self._stream.counts(self.settings.renderer.family.image_token_id),
            env_time_s=self._env_time_s,
            env_failures=self.env_failures,
        )

    def seed(self, *path: str | int) -> int:
        """A seed that depends on the rollout, the problem and the try, and not on what else is sampled."""
        attempt = ("attempt", self.attempt) if self.attempt else ()
        own = (self.problem.id, self.occurrence, self.sibling, *attempt)
        return derive(self.settings.seed, *own, *path)

    def _env_seed(self) -> int:
        """The same for all siblings and attempts: an environment that draws its task from it gives them the same one."""
        return derive(self.settings.seed, self.problem.id, self.occurrence, "env")

    # -- streams ----------------------------------------------------------------------------------------------

    def _close_turn(
        self, reply: Reply, text: str, observation: Message | None, info: Mapping[str, Json]
    ) -> None:
        self._turns.append(Turn(reply.token_ids, reply.logprobs, text, observation, info))

    def _show(self, message: Message | None) -> Message | None:
        """Append an observation if a reply can follow it; else stop and drop it."""
        limits = self.settings.rollout
        if message is None:
            self.stop_reason = StopReason.ENV_DONE
        elif len(self._turns) + 1 >= limits.max_turns:
            self.stop_reason = StopReason.MAX_TURNS
        elif self._stream.num_sampled >= limits.max_new_tokens:
            self.stop_reason = StopReason.MAX_NEW_TOKENS
        else:
            rendered = self._after_end_token(self.settings.renderer.observation(message))
            if len(self._stream.token_ids) + len(rendered.token_ids) < limits.max_context_tokens:
                self._stream.append(rendered)
                return message
            self.stop_reason = StopReason.MAX_CONTEXT
        return None

    def _after_end_token(self, observation: Rendered) -> Rendered:
        """Put the end token in front, never trained, where the engine stopped the reply by something else."""
        end = self.settings.renderer.family.end_of_turn_id
        if self._stream.token_ids[-1] == end:
            return observation
        return replace(
            observation,
            engine_ids=(end, *observation.engine_ids),
            token_ids=(end, *observation.token_ids),
        )

    def _budget(self) -> int:
        """Tokens that the next reply may have (at least 1 while the episode is not done)."""
        limits = self.settings.rollout
        return min(
            limits.max_new_tokens - self._stream.num_sampled,
            limits.max_context_tokens - len(self._stream.token_ids),
            limits.max_turn_tokens or limits.max_new_tokens,
        )

    def _is_cut(self, reply: Reply) -> bool:
        """Whether a limit ended the reply; an engine may say so of one whose very last token is an end token."""
        end_ids = self.settings.renderer.family.end_ids
        has_ended = any(token in end_ids for token in reply.token_ids[-1:])
        return reply.finish_reason == "length" and not has_ended

    def _limit_reached(self) -> StopReason:
        is_full = len(self._stream.token_ids) >= self.settings.rollout.max_context_tokens
        return StopReason.MAX_CONTEXT if is_full else StopReason.MAX_NEW_TOKENS

    def _expected(self) -> Expected:
        version = (
            self.settings.policy_version if self._policy_version is None else self._policy_version
        )
        return Expected(len(self._stream.token_ids), self._budget(), version)

    def _fail(self, reason: StopReason, error: Exception | str) -> None:
        self.stop_reason = reason
        self.env_failures = counted(self.env_failures, reason)
        self.error = (error if isinstance(error, str) else told(error))[:500]
        logger.warning(
            "problem %s sibling %d: %s: %s", self.problem.id, self.sibling, reason, self.error
        )

    # -- environment ------------------------------------------------------------------------------------------

    async def _step(self, text: str) -> tuple[object, bool, Mapping[str, Json]]:
        answered = await self._call(cast("Env", self.env).step, text)
        if not (isinstance(answered, tuple) and len(cast("tuple[object, ...]", answered)) == 3):
            size = f" of {len(answered)}" if isinstance(answered, tuple) else ""
            raise TypeError(
                f"step() must return (observation, done, info), got {type(answered).__name__}{size}"
            )
        observation, is_done, info = cast("tuple[object, object, object]", answered)
        return observation, bool(is_done), plain_info(info)

    async def _call(
        self,
        method: Callable[..., object],
        *args: object,
        on_late: Callable[[object], object] | None = None,
    ) -> object:
        limit = self.settings.env.step_timeout_s
        started = time.perf_counter()
        try:
            return await self._caller.call(method, *args, time_limit_s=limit, on_late=on_late)
        except TimeoutError as error:
            said = str(error) or f"no answer within env.step_timeout_s {limit:g}"
            raise TimeoutError(said) from None
        finally:
            self._env_time_s += time.perf_counter() - started


def told(error: Exception) -> str:
    """Class and message of what an environment raised; one that cannot say its message is told by its class."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # an environment's own exception class may do anything
        return type(error).__name__


def counted(failures: EnvFailures, reason: StopReason) -> EnvFailures:
    """The counts with one more failure, if `reason` is one of the environment's."""
    if reason is StopReason.ENV_ERROR:
        return replace(failures, num_errors=failures.num_errors + 1)
    if reason is StopReason.ENV_TIMEOUT:
        return replace(failures, num_timeouts=failures.num_timeouts + 1)
    return failures
