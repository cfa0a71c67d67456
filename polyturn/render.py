"""Messages and pictures <-> token ids; the only module that tokenizes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import jinja2
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from polyturn import tool_words
from polyturn.policy.model import Policy
from polyturn.policy.processor import END_OF_TURN
from polyturn.types import ImageRecord, Json, Message

# A conversation after which an observation is rendered; it is cut off again after the reply's end token.
_REPLY = "reply"
_BEFORE = ({"role": "user", "content": "question"}, {"role": "assistant", "content": _REPLY})


@dataclass(frozen=True)
class Rendered:
    """A piece of conversation in both id streams.

    `engine_ids` has one image pad per picture (what an engine is sent), `token_ids` one per visual token
    (what is trained on); `images` in the order of their pads.
    """

    engine_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    images: tuple[ImageRecord, ...]


# The system message that a template writes by itself, at the beginning of a conversation without one.
_SYSTEM = re.compile(r"<\|im_start\|>system\n(.*?)\n*<\|im_end\|>", re.DOTALL)


@dataclass(frozen=True)
class Canonical:
    """The chat template's own pieces around a conversation's replies: the prompt, then each observation.

    `num_rewritten` counts the replies that do not stand verbatim in the rendering of the whole conversation.
    """

    pieces: tuple[Rendered, ...]
    num_rewritten: int


class TemplateError(ValueError):
    """The chat template cannot be used for exact multi-turn training."""


class Renderer:
    """Renders prompts and observations with a policy's tokenizer, chat template and picture sizes."""

    def __init__(self, policy: Policy) -> None:
        self.family = policy.family
        self.vocab_size = int(policy.model.config.text_config.vocab_size)
        self.image_processor = policy.processor.image_processor
        self._tokenizer = policy.processor.tokenizer
        self._template = getattr(policy.processor, "chat_template", None)
        if not (self._template or self._tokenizer.chat_template):
            raise TemplateError(
                "model.path: the directory has no chat template (base models have none); put one there as "
                "chat_template.jinja, such as that of the Instruct model"
            )
        size = cast("Mapping[str, int]", policy.processor.image_processor.size)
        self._min_pixels = int(size["shortest_edge"])
        self._max_pixels = int(size["longest_edge"])
        self._control = _control_tokens(self._tokenizer)
        self._shows_tools = self._answers_tools = True
        self._system = ""
        shown = self._text(_BEFORE, continues=False)
        if _REPLY + END_OF_TURN not in shown:
            raise TemplateError(
                f"the chat template must end an assistant message with {END_OF_TURN}, got {shown[-40:]!r}"
            )
        self._shows_tools = self._finds_tools()
        if own := _SYSTEM.match(shown):
            self._system = own[1]
        self._answers_tools = self._finds_answers()
        self._encoded: dict[str, tuple[int, ...]] = {}

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Json]] = ()
    ) -> Rendered:
        """The prompt of a problem up to and including the assistant header.

        A chat template that has no place for `tools` (Qwen2.5-VL's) shows them at the end of the system message, its own
        where `messages` have none, in Qwen's words.

        Raises:
            TemplateError: the template refuses it, or a text spells a control token, which would end or begin a message.
        """
        for message in messages:
            if found := self._control.search(message.text):
                raise TemplateError(f"a text of the prompt spells the control token {found[0]}")
        images = tuple(image for message in messages for image in message.images)
        text = self._text([_chat(message) for message in messages], tools=tools)
        return self._rendered(text, images)

    def observation(self, message: Message) -> Rendered:
        """What follows a reply's end token: the newline, the message and the next assistant header.

        What the template does to the turns before (some drop their thoughts) does not matter: they are never
        rendered again. A chat template without words for what a tool answers shows it as Qwen's others do: in
        <tool_response> tags, in a message of the user. An environment may repeat what the policy wrote: control
        tokens that its text spells are broken up by a space, so that they are text.

        Raises:
            TemplateError: the template drops the reply before the observation.
        """
        text = self._text([*_BEFORE, self._shown(message)])
        _, found, after = text.partition(_REPLY + END_OF_TURN)
        if not found:
            raise TemplateError("the chat template drops a reply when a message is added")
        return self._rendered(after, message.images)

    def conversation(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Json]] = ()
    ) -> Rendered:
        """A whole conversation rendered at once; only for comparing with what was put together turn by turn."""
        images = tuple(image for message in messages for image in message.images)
        asked = next((i for i, m in enumerate(messages) if m.role == "assistant"), len(messages))
        chat = [
            _chat(m) if i < asked or m.role == "assistant" else self._shown(m)
            for i, m in enumerate(messages)
        ]
        text = self._text(chat, tools=tools, continues=False)
        return self._rendered(text, images)

    def canonical(
        self,
        prompt: Sequence[Message],
        turns: Sequence[tuple[str, Message | None]],
        tools: Sequence[Mapping[str, Json]] = (),
    ) -> Canonical:
        """What the template writes around replies, each observation with all that came before it.

        `turns` are (reply, observation); only the last observation may be None.

        Raises:
            TemplateError: the template drops a reply.
        """
        marked = [_chat(message) for message in prompt]  # a mark stands where each reply was
        said = list(marked)
        texts, pieces = [self._text(marked, tools=tools)], [self.prompt(prompt, tools)]
        for number, (reply, observation) in enumerate(turns):
            mark = f"reply {number} of the conversation"
            marked.append({"role": "assistant", "content": mark})
            said.append({"role": "assistant", "content": reply})
            if observation is not None:
                marked.append(self._shown(observation))
                said.append(self._shown(observation))
                text = self._text(marked, tools=tools)
                _, found, after = text.partition(mark + END_OF_TURN)
                if not found:
                    raise TemplateError("the chat template drops a reply when a message is added")
                texts.append(after)
                pieces.append(self._rendered(after, observation.images))
        whole = self._text(said, tools=tools, continues=False)
        chunks = [text + reply + END_OF_TURN for text, (reply, _) in zip(texts, turns, strict=True)]
        return Canonical(tuple(pieces), sum(chunk not in whole for chunk in chunks))

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text that may hold special tokens; kept, since few distinct texts recur often."""
        if text not in self._encoded:
            if len(self._encoded) > 50_000:
                self._encoded.clear()
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            self._encoded[text] = tuple(cast("list[int]", ids))
        return self._encoded[text]

    def encode_reply(self, text: str) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        """Ids of a reply followed by the end token, and each token's character span in `text`.

        The end token's span is (len(text), len(text)).
        """
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        spans = [*cast("list[tuple[int, int]]", encoded["offset_mapping"]), (len(text), len(text))]
        ids = [*cast("list[int]", encoded["input_ids"]), self.family.end_of_turn_id]
        return tuple(ids), tuple((int(start), int(end)) for start, end in spans)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a reply, without its end token; other special tokens stay visible."""
        ids = list(token_ids)
        if ids and ids[-1] in self.family.end_ids:
            ids.pop()
        return cast("str", self._tokenizer.decode(ids, skip_special_tokens=False))

    def grid(self, image: ImageRecord) -> tuple[int, int]:
        """Rows and columns of visual tokens of a picture."""
        multiple = self.family.size_multiple
        height, width = smart_resize(
            image.height,
            image.width,
            factor=multiple,
            min_pixels=self._min_pixels,
            max_pixels=self._max_pixels,
        )
        return height // multiple, width // multiple

    def _shown(self, message: Message) -> Mapping[str, object]:
        content = tuple(
            self._control.sub(lambda found: f"< {found[0][1:]}", part)
            if isinstance(part, str)
            else part
            for part in message.content
        )
        return _chat(replace(message, content=content))

    def _rendered(self, text: str, images: tuple[ImageRecord, ...]) -> Rendered:
        engine_ids = self.encode(text)
        pad = self.family.image_token_id
        if engine_ids.count(pad) != len(images):
            raise TemplateError(
                f"{len(images)} pictures, but {engine_ids.count(pad)} image pads were rendered; "
                "text must not spell image tokens and the template must show pictures in every role"
            )
        token_ids: list[int] = []
        remaining = iter(images)
        for token in engine_ids:
            if token == pad:
                rows, columns = self.grid(next(remaining))
                token_ids.extend([pad] * (rows * columns))
            else:
                token_ids.append(token)
        return Rendered(engine_ids, tuple(token_ids), images)

    def _text(
        self,
        chat: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, Json]] = (),
        continues: bool = True,
    ) -> str:
        apply = cast("Callable[..., str]", self._tokenizer.apply_chat_template)
        try:
            if tools and not self._shows_tools:
                chat, tools = tool_words.with_tools(chat, tools, self._system), ()
            if not self._answers_tools:
                chat = [tool_words.as_answer(message) for message in chat]
            return apply(
                list(chat),
                tools=list(tools) or None,
                chat_template=self._template,
                add_generation_prompt=continues,
                tokenize=False,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise TemplateError(f"the chat template cannot render this: {error}") from error

    def _finds_tools(self) -> bool:
        """Whether the template writes the tools that it is given; most of those that do not pass over them silently."""
        try:
            return "tool_that_is_looked_for" in self._text(_BEFORE, tools=(tool_words.PROBE_TOOL,))
        except TemplateError:
            return False

    def _finds_answers(self) -> bool:
        """Whether the template has words for a tool's answer; others drop or refuse it, or write the bare role."""
        try:
            shown = self._text((*_BEFORE, {"role": "tool", "content": tool_words.ANSWER}))
        except TemplateError:
            return False
        return tool_words.ANSWER in shown and (self._shows_tools or "<|im_start|>tool" not in shown)


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Tokens such as <|im_end|> and <|image_pad|>, which only the chat template may write."""
    added = (token for token in tokenizer.added_tokens_decoder.values() if token.special)
    found = sorted({token.content for token in added if token.content.startswith("<|")})
    return re.compile("|".join(map(re.escape, found)) or r"(?!)")


def _chat(message: Message) -> Mapping[str, object]:
    """A message as chat templates expect it: plain text as a string, else typed parts."""
    if not message.images:
        return {"role": message.role, "content": message.text}
    parts = [
        {"type": "image"} if isinstance(part, ImageRecord) else {"type": "text", "text": part}
        for part in message.content
    ]
    return {"role": message.role, "content": parts}
