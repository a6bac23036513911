"""Chat messages as the engine hands them to the chat template: text parts joined or wrapped, odd roles turned plain."""

from __future__ import annotations

from typing import Any

from wire.chat_template import ChatTemplate, Message

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")


class NotText(Exception):
    """The conversation holds something only an engine can turn into tokens."""


def read_conversation(messages: list[Any], template: ChatTemplate) -> list[Message]:
    """Raises NotText."""
    conversation = [_read_message(message, template.takes_parts) for message in messages]
    if template.knows_developers or not any(message["role"] == "developer" for message in conversation):
        return conversation
    for message in conversation:
        if message["role"] == "developer":
            message["role"] = "system"
            message.pop("tools", None)
    return _merge_systems(conversation)


def _read_message(message: Any, takes_parts: bool) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise NotText("a message is no object with a role")
    if message.get("tool_calls") or message.get("tools") or message.get("function_call"):
        raise NotText("a message calls tools")
    role: str = message["role"]
    texts = _texts(message.get("content"))
    if not takes_parts:
        texts = [text for text in texts if text]  # An empty part would otherwise still bring its line break.
    keeps_parts = takes_parts and role != "tool"
    content: Any = [{"type": "text", "text": text} for text in texts] if keeps_parts else "\n".join(texts)
    read: Message = {"role": role, "content": content}
    if role == "assistant" and message.get("reasoning") is not None:
        read["reasoning"] = read["reasoning_content"] = message["reasoning"]
    if role == "tool" and "tool_call_id" in message:
        read["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        read["name"] = message["name"]
    if role == "developer":
        read["tools"] = None
    return read


def _texts(content: Any) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise NotText(f"content is a {type(content).__name__}")
    texts = []
    for part in content:
        text = part if isinstance(part, str) else _text_of(part)
        if text is not None:
            texts.append(text)
    return texts


def _text_of(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _TEXT_PARTS or set(part) - {"type", kind, "text"}:
        raise NotText(f"a content part is of type {kind!r} or has further fields")
    text = part.get("text" if kind in ("text", "input_text", "output_text") else kind)
    if text is not None and not isinstance(text, str):
        raise NotText("a text part holds no text")
    return text


def _merge_systems(conversation: list[Message]) -> list[Message]:
    """One system message in front, where there are several or one stands further back."""
    places = [place for place, message in enumerate(conversation) if message["role"] == "system"]
    if places in ([], [0]):
        return conversation
    texts = []
    for place in places:
        content = conversation[place]["content"]
        texts.append(content if isinstance(content, str) else "\n".join(part["text"] for part in content))
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(message for message in conversation if message["role"] != "system")]
