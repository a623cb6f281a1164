"""Conversations to text, by the template of a checkpoint. Knows no JAX."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxrunner.api.validation import shown
from jaxrunner.text.jinja_guard import GLOBALS, GUARD
from jaxrunner.text.jinja_sandbox import render

# Names that no keyword argument may replace: our own, and the sandbox's.
RESERVED = {"template", "messages", GUARD, "namespace", "cycler", "joiner", "self", *GLOBALS}
ARGUMENTS = {
    "add_generation_prompt", "continue_final_message", "tools", "bos_token", "eos_token",
}  # fmt: skip
TAG = "(the final message goes on here) "  # with a space, to see whether a template trims


def render_chat(
    template: str | None,
    messages: Sequence[dict[str, Any]],
    /,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[dict[str, Any]] | None = None,
    bos_token: str | None = None,
    eos_token: str | None = None,
    **kwargs: Any,
) -> str:
    """Returns the text of a conversation, special tokens included.

    messages: dicts with a role, and a content that is text or a list of
        {"type": "text", "text": str}, which are joined by newlines.
    continue_final_message: leaves the last message open for the model to go on.
    kwargs: further variables of the template.

    Raises:
      TypeError, ValueError: a bad message or argument, or a template that fails; names it.
    """
    if template is None:
        raise ValueError(
            "chat_template is missing from the checkpoint: pass chat_template=, or use generate"
        )
    if not isinstance(template, str):
        raise TypeError(
            f"chat_template must be a str, got {type(template).__name__}: pass its text"
        )
    if taken := sorted(kwargs.keys() & RESERVED):
        raise ValueError(f"chat_template_kwargs has the reserved name {taken[0]!r}: rename it")
    messages = _read_messages(messages)
    if continue_final_message:
        if add_generation_prompt:
            raise ValueError(
                "continue_final_message=True leaves no room for a new message: "
                "set add_generation_prompt=False"
            )
        messages[-1] = _open(messages[-1])
    variables = kwargs | {"messages": messages, "add_generation_prompt": add_generation_prompt}
    variables["tools"] = _read_tools(tools)
    tokens = {"bos_token": bos_token, "eos_token": eos_token}
    variables |= {name: token for name, token in tokens.items() if token is not None}
    text = render(template, variables)
    return _cut(text) if continue_final_message else text


def check_variables(values: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns a user's further variables of a template, {} for None.

    Raises:
      TypeError, ValueError: a name that is no string, or an argument's of `render_chat`.
    """
    for name in values or {}:
        if not isinstance(name, str):
            raise TypeError(f"chat_template_kwargs has the name {shown(name)}: names are strings")
        if name in ARGUMENTS:
            raise ValueError(f"chat_template_kwargs has {name!r}, an argument itself: pass it so")
    return dict(values or {})


def conversations(messages: Any) -> list[Any]:
    """Returns one conversation, or each of several, unread.

    Raises:
      TypeError: it is no list.
    """
    _check_list(messages)
    many = bool(messages) and not isinstance(messages[0], dict)
    return list(messages) if many else [messages]


def _check_list(messages: Any) -> None:
    if isinstance(messages, str | bytes | dict) or not isinstance(messages, Sequence):
        raise TypeError(
            f"messages must be a list of dicts, got {type(messages).__name__}: "
            'pass [{"role": "user", "content": ...}]'
        )


def _read_messages(messages: Any) -> list[dict[str, Any]]:
    """Returns messages whose contents are text."""
    _check_list(messages)
    if not messages:
        raise ValueError("messages is empty, a conversation needs one: add a message")
    return [_read_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _read_message(name: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise TypeError(f"{name} must be a dict with role and content, got {_kind(message)}")
    if not isinstance(message.get("role"), str):
        raise TypeError(f"{name} must have a role that is a str, got {_kind(message.get('role'))}")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return dict(message)
    if isinstance(content, list | tuple):
        content = "\n".join(_read_part(f"{name}.content[{i}]", p) for i, p in enumerate(content))
    if not isinstance(content, str):
        raise TypeError(
            f"{name} must have a content that is a str or a list of text parts, "
            f"got {_kind(content)}"
        )
    return {**message, "content": content}


def _read_part(name: str, part: Any) -> str:
    """Returns the text of one part of a message."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or part.get("type") != "text":
        got = repr(part.get("type")) if isinstance(part, dict) else _kind(part)
        raise ValueError(f"{name} must be a part of type 'text', the only one read, got {got}")
    if not isinstance(part.get("text"), str):
        raise TypeError(f"{name} must have a text that is a str, got {_kind(part.get('text'))}")
    return part["text"]


def _read_tools(tools: Any) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, dict) for tool in tools):
        raise TypeError(
            f"tools must be a list of dicts or None, got {shown(tools)}: give their JSON schemas"
        )
    return list(tools)


def _open(message: dict[str, Any]) -> dict[str, Any]:
    """Returns the final message with a mark where it ends."""
    content = message.get("content")
    if not content:
        raise ValueError(
            "continue_final_message=True needs a final message with content, got none: "
            "use add_generation_prompt=True"
        )
    return {**message, "content": content + TAG}


def _cut(text: str) -> str:
    """Returns a rendered conversation up to the mark."""
    place = text.rfind(TAG.strip())
    if place < 0:
        raise ValueError(
            "chat template does not write the final message out, so that continue_final_message "
            "has nothing to go on from: set it to False"
        )
    # A template that trims would have trimmed the message that is to go on.
    return text[:place] if text.startswith(TAG, place) else text[:place].rstrip()


def _kind(value: Any) -> str:
    return type(value).__name__
