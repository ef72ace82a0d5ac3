# SPDX-License-Identifier: Apache-2.0
"""Read a request's prompt as the engine will see it: token ids and block keys, for routing.

prompt_reader.py tokenizes in a child process (tokenizer_child.py), or asks an instance.
The child reads prompts by means of transformers, and remembers tokenized prefixes; prompt_parts.py changes
chats before the template gets them, as vLLM does, and expands media placeholders.
"""
