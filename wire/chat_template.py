"""The target's chat template, rendered as the engine renders it: same extensions, same variables, same content format.

Held equal to transformers' `apply_chat_template` by tests. The template belongs to the model and runs sandboxed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "

Message = dict[str, Any]


class TemplateRefusal(Exception):
    """The template, or what surrounds it, does not accept this conversation."""


class ChatTemplate:
    """A compiled template and the special tokens it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        self._special_tokens = dict(special_tokens)
        self._template = environment.from_string(source)
        tree = environment.parse(source)
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
        self.knows_developers = '"developer"' in source or "'developer'" in source
        self.takes_parts = any(_loops_over_content(tree))
        """Whether it goes through the parts of a message's content itself; else it wants one string."""

    @classmethod
    def load(cls, target_dir: Path) -> ChatTemplate | None:
        """The template of a model directory; None where it has none or several."""
        path = target_dir / "chat_template.jinja"
        source = path.read_text() if path.is_file() else _read_config(target_dir).get("chat_template")
        return cls(source, read_special_tokens(target_dir)) if isinstance(source, str) else None

    def render(
        self, messages: list[Message], *, add_generation_prompt: bool, continue_final_message: bool, **variables: Any
    ) -> str:
        """The prompt's text; raises TemplateRefusal."""
        if continue_final_message:
            messages, final_text = _mark_end(messages)
        try:
            text = self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **(self._special_tokens | variables),
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise TemplateRefusal(str(error)) from error
        return _cut_at_mark(text, final_text) if continue_final_message else text


def read_special_tokens(target_dir: Path) -> dict[str, str]:
    """`bos_token` and its like, by name."""
    tokens = {}
    for name, value in _read_config(target_dir).items():
        if not name.endswith("_token"):
            continue
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            tokens[name] = content
    return tokens


def _read_config(target_dir: Path) -> dict[str, Any]:
    path = target_dir / "tokenizer_config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    return config if isinstance(config, dict) else {}


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what a model is trained on; for rendering it is only its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _mark_end(messages: list[Message]) -> tuple[list[Message], str]:
    """A copy whose last text ends with a mark, and that text."""
    messages = deepcopy(messages)
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        messages[-1]["content"] = content + _CONTINUE_TAG
        return messages, content
    for part in reversed(content or []):
        if "text" in part:
            text: str = part["text"]
            part["text"] = text + _CONTINUE_TAG
            return messages, text
    raise TemplateRefusal("the final message has no text to continue")


def _cut_at_mark(text: str, final_text: str) -> str:
    tag = _CONTINUE_TAG.strip()
    if final_text.strip() not in text or tag not in text:
        raise TemplateRefusal("the final message does not appear in the rendered chat")
    place = text.rindex(tag)
    is_spacing_kept = text[place : place + len(_CONTINUE_TAG)] == _CONTINUE_TAG
    return text[:place] if is_spacing_kept else text[:place].rstrip()


def _loops_over_content(tree: jinja2.nodes.Template) -> Iterator[jinja2.nodes.For]:
    """Loops over `message.content`, over a variable set from it, or over one called `content`."""
    names = {"content"}
    for assignment in tree.find_all(jinja2.nodes.Assign):
        if isinstance(assignment.target, jinja2.nodes.Name) and _is_content(assignment.node):
            names.add(assignment.target.name)
    for loop in tree.find_all(jinja2.nodes.For):
        subject = loop.iter
        if _is_content(subject) or (isinstance(subject, jinja2.nodes.Name) and subject.name in names):
            yield loop


def _is_content(node: jinja2.nodes.Node) -> bool:
    while isinstance(node, (jinja2.nodes.Filter, jinja2.nodes.Test)) and node.node is not None:
        node = node.node
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, jinja2.nodes.Getitem) and isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == "content"
