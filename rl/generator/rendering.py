"""Conversations as the target's tokens, of which none is ever made twice.

A turn goes on from the very tokens that were drawn before it. What is new is the text by which the chat template's rendering of the
longer conversation extends that of the shorter one. Where it does not extend it (templates drop earlier reasoning, or trim answers),
the turn is a fork: its prompt is the whole conversation rendered anew, and begins a trajectory of its own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from rl.environments.interface import Action, Chat, ChatMessage, EnvironmentFailed, Observation, Text, Tokens
from rl.trajectory import Turn
from wire.chat_template import ChatTemplate, TemplateRefusal, read_special_tokens
from wire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is put before the next answer."""

    token_ids: tuple[int, ...]
    """What is new, or everything where it is a fork."""
    is_fork: bool = False


class TargetText:
    """The target's tokenizer and chat template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, *, vocab_size: int, eos: str | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self.vocab_size = vocab_size
        eos_id = tokenizer.token_to_id(eos) if eos is not None else None
        self.stop_token_ids: tuple[int, ...] = () if eos_id is None else (eos_id,)

    @classmethod
    def load(cls, target_dir: Path) -> TargetText:
        """Of a model directory; raises ConfigError where it has no tokenizer or none that can be read."""
        try:
            tokenizer = Tokenizer.from_file(str(target_dir / "tokenizer.json"))
            config = json.loads((target_dir / "config.json").read_text())
        except Exception as error:  # as which tokenizers raises everything
            raise ConfigError(f"{target_dir} has no tokenizer and configuration that can be read: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        special = read_special_tokens(target_dir)
        tokenizer.add_special_tokens([token for token in special.values() if tokenizer.token_to_id(token) is not None])
        sizes = [tokenizer.get_vocab_size(), config.get("vocab_size"), config.get("text_config", {}).get("vocab_size")]
        vocab_size = max(size for size in sizes if isinstance(size, int))
        return cls(tokenizer, ChatTemplate.load(target_dir), vocab_size=vocab_size, eos=special.get("eos_token"))

    def encode(self, text: str, *, special: bool = False) -> tuple[int, ...]:
        """special: with what the tokenizer puts around a text, its beginning token for one."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, token_ids: tuple[int, ...], *, special: bool) -> str:
        """special: with the names of special tokens in it."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=not special)

    def render(self, messages: list[ChatMessage]) -> str:
        """The conversation up to where the model speaks. Raises EnvironmentFailed where the template does not take it."""
        if self._template is None:
            raise ConfigError("the target has no chat template; train it on environments that observe plain text or token ids")
        plain = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._template.render(plain, add_generation_prompt=True, continue_final_message=False)
        except TemplateRefusal as error:
            raise EnvironmentFailed(f"the chat template refuses the conversation: {error}") from error


class Conversation:
    """One episode's tokens so far."""

    def __init__(self, target: TargetText) -> None:
        self._target = target
        self._kind: type[Observation] | None = None
        self._messages: list[ChatMessage] = []
        self._text = ""
        """Of all tokens so far, where they are a chat's."""
        self.token_ids: tuple[int, ...] = ()
        """All of the trajectory that runs; a fork begins anew."""

    def observe(self, observation: Observation) -> Prompt:
        """Take what the environment says. Raises EnvironmentFailed, or ConfigError where the target has no chat template."""
        if self._kind not in (None, type(observation)):
            raise EnvironmentFailed(
                f"it began with {self._kind} and goes on with {type(observation)}; one kind is an episode's"
            )
        self._kind = type(observation)
        match observation:
            case Chat(messages):
                prompt = self._chat(messages)
            case Text(text):
                prompt = Prompt(self._target.encode(text, special=not self.token_ids))
            case Tokens(token_ids):
                prompt = Prompt(token_ids)
        if any(not 0 <= token_id < self._target.vocab_size for token_id in prompt.token_ids):
            raise EnvironmentFailed("it observes token ids that the target does not have")
        self.token_ids = prompt.token_ids if prompt.is_fork else self.token_ids + prompt.token_ids
        return prompt

    def answer(self, turn: Turn) -> Action:
        """Take what the model said; returns it as the environment sees it."""
        output = turn.output_token_ids
        self.token_ids += output
        text = self._target.decode(output, special=False)
        if self._messages:
            self._messages.append(ChatMessage("assistant", text))
            self._text += self._target.decode(output, special=True)
        return Action(text, output, is_truncated=turn.finish_reason == "length")

    def _chat(self, messages: tuple[ChatMessage, ...]) -> Prompt:
        self._messages += messages
        rendered = self._target.render(self._messages)
        before, self._text = self._text, rendered
        if rendered.startswith(before):
            return Prompt(self._target.encode(rendered[len(before) :]))
        return Prompt(self._target.encode(rendered), is_fork=True)
