# SPDX-License-Identifier: Apache-2.0
"""Request bodies with images in every place where vLLM accepts them, by path."""

from __future__ import annotations

from typing import Any

PNG_SOURCE = {"type": "base64", "media_type": "image/png", "data": "iVBORw0="}
UNTYPED_SOURCE = {
    "type": "base64",
    "data": '/9j/4\u00e9"\\',
}  # no media type, and characters that must not be re-encoded
URL_SOURCE = {"type": "url", "url": 'http://x/a\u00e9.png?b="1"'}


def build_image_block(source: dict[str, Any]) -> dict[str, Any]:
    """An image block of /v1/messages."""
    return {"type": "image", "source": source}


MESSAGES_BODY: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 4,
    "system": [{"type": "text", "text": "be brief"}],
    "messages": [
        {"role": "user", "content": "hello"},
        {
            "role": "user",
            "content": [
                build_image_block(PNG_SOURCE),
                {"type": "text", "text": "and"},
                build_image_block(URL_SOURCE),
            ],
        },
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}],
        },
        {
            "role": "user",
            "content": [
                build_image_block(UNTYPED_SOURCE),
                {
                    "type": "tool_result",
                    "tool_use_id": "t",
                    "content": [
                        {"type": "text", "text": "this"},
                        build_image_block(URL_SOURCE),
                        build_image_block(PNG_SOURCE),
                    ],
                },
                {"type": "tool_result", "tool_use_id": "u", "content": "a text"},
            ],
        },
    ],
}

RESPONSES_BODY: dict[str, Any] = {
    "model": "tiny",
    "max_output_tokens": 4,
    "input": [
        {"role": "user", "content": "hello"},
        {
            "type": "message",
            "role": "user",
            "content": [
                {
                    "type": "input_image",
                    "image_url": "data:image/png;base64,AA==",
                    "detail": "auto",
                },
                {"type": "input_text", "text": "what is it?"},
                {"type": "input_image", "image_url": 'http://x/\u00e9"', "detail": "low"},
            ],
        },
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_image", "image_url": "http://x/tool", "detail": "auto"}],
        },
    ],
}
