# SPDX-License-Identifier: Apache-2.0
"""Media of any kind, anywhere in a conversation, reach the encoders as the client wrote them."""

from __future__ import annotations

import json
from typing import Any

from router import fakes

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "low"}}
VIDEO = {"type": "video_url", "video_url": {"url": "http://x/v.mp4"}}
SOUND = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
AUDIO = {"type": "audio_url", "audio_url": {"url": "http://x/a.wav"}}
TEXT = {"type": "text", "text": "what is it?"}


def test_every_item_of_every_message() -> None:
    """Several items in a message, several messages, repeated ones once; text and tools stay behind."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [IMAGE, TEXT, VIDEO]},
        {"role": "assistant", "content": "a cat"},
        {"role": "user", "content": [SOUND, AUDIO, IMAGE, TEXT]},
    ]
    body = {
        "model": "tiny",
        "messages": messages,
        "stream": True,
        "tools": [{"type": "function"}],
        "mm_processor_kwargs": {"max_pixels": 99},
        "temperature": 0.5,
    }

    async def scenario() -> None:
        async with (
            fakes.instance() as e,
            fakes.instance() as pd,
            fakes.router([pd.url], [e.url]) as router,
        ):
            data = json.dumps(body, indent=1).encode()
            status, _, _ = await router.post("/v1/chat/completions", data)
            assert status == 200 and pd.seen[0].body == data
            asked = [each.json for each in e.seen]
            assert all(len(each["messages"]) == 1 for each in asked)
            items = [each["messages"][0]["content"] for each in asked]
            assert sorted(items, key=str) == sorted([[IMAGE], [VIDEO], [SOUND], [AUDIO]], key=str)
            for each in asked:
                assert each["mm_processor_kwargs"] == {"max_pixels": 99}
                assert not {"tools", "temperature"} & set(each)

    fakes.run(scenario)
