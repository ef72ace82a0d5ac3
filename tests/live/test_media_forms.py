# SPDX-License-Identifier: Apache-2.0
"""The router finds the same media as vLLM in requests of each path; no server is started."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.router import media_bodies
from ttft_otel.model.endpoints import MESSAGES_PATH, RESPONSES_PATH
from ttft_otel.router.disagg.request_body import parse_body

pytestmark = [pytest.mark.untimed, pytest.mark.full]  # vLLM's imports take half a minute
EC_PARAMS = {"a": {"peer_host": "h", "unknown": [1]}}
# In a process of its own: vLLM's imports warn, and warnings are errors here.
CONVERT_SCRIPT = """
import json, sys
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import construct_input_messages

given = json.load(sys.stdin)
messages = AnthropicMessagesRequest(**given["messages"])
chat = AnthropicServingMessages.to_chat_completion_request(messages)
responses = ResponsesRequest(**given["responses"])
plain = ChatCompletionRequest(messages=[], ec_transfer_params=given["params"])
found = {
    "messages": chat.model_dump(mode="json")["messages"],
    "responses": [dict(each) for each in construct_input_messages(request_input=responses.input)],
    "params": [each.ec_transfer_params for each in (plain, messages, chat, responses)],
}
print("\\n" + json.dumps(found, default=list))
"""


@pytest.fixture(scope="module")
def converted() -> Any:
    """Both requests as the chat messages that vLLM converts them to."""
    given = {
        "messages": {**media_bodies.MESSAGES_BODY, "ec_transfer_params": EC_PARAMS},
        "responses": {**media_bodies.RESPONSES_BODY, "ec_transfer_params": EC_PARAMS},
        "params": EC_PARAMS,
    }
    command = [sys.executable, "-c", CONVERT_SCRIPT]
    ended = subprocess.run(
        command, input=json.dumps(given), stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(ended.stdout.splitlines()[-1])


def list_router_images(path: str, body: dict[str, Any]) -> list[str]:
    """The images that the router sends to encoders, in the prompt's order, each once."""
    items = map(json.loads, parse_body(json.dumps(body).encode(), path).media_items)
    return [each["image_url"]["url"] for each in items]


def list_message_images(messages: list[dict[str, Any]]) -> list[str]:
    """The images of chat messages, each once."""
    urls = []
    for message in messages:
        for part in message.get("content") or []:
            if isinstance(part, dict) and part["type"] in ("image_url", "input_image"):
                url = part["image_url"]
                urls.append(url if isinstance(url, str) else url["url"])
    return list(dict.fromkeys(urls))


def test_images_of_messages_are_those_of_vllms_own_conversion(converted: Any) -> None:
    """From /v1/messages the router takes the images that vLLM's conversion has, tool results included."""
    urls = list_message_images(converted["messages"])

    assert len(urls) == 3 and list_router_images(MESSAGES_PATH, media_bodies.MESSAGES_BODY) == urls


def test_images_of_responses_are_those_of_vllms_own_conversion(converted: Any) -> None:
    """From /v1/responses the router takes the images of messages and of tool results."""
    urls = list_message_images(converted["responses"])

    assert (
        len(urls) == 3 and list_router_images(RESPONSES_PATH, media_bodies.RESPONSES_BODY) == urls
    )


def test_every_path_with_media_takes_encoders_parameters(converted: Any) -> None:
    """vLLM keeps the encoder's parameters of chat, /v1/messages and /v1/responses requests unchanged."""
    assert converted["params"] == [EC_PARAMS] * 4
