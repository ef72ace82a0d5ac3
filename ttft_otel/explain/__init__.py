# SPDX-License-Identifier: Apache-2.0
"""Answers from stored requests: why some were late, what changed, and what other settings would bring.

reading      request_facts window_reading       what the answers need of each request; a window of them
late         late_requests late_case window_pair cause_detectors  what differs, and which causes hold
             cause_kinds explanation window_answer  the answer, its remedy, its words
changed      window_difference change_answer    two windows: by how much, why, and whether too much
what if      replay_facts step_fit engine_model               a window replayed with other settings
             what_if window_check               predictions and their words, what is refused
"""
