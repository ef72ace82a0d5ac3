# SPDX-License-Identifier: Apache-2.0
"""Tell Triton that a CPU backend exists; vLLM's V2 runner then runs in Triton's interpreter.

Test only, with TRITON_INTERPRET=1: nothing is ever compiled. Keep it off normal environments: vLLM
takes the V2 runner by default wherever it finds such a backend.
"""
