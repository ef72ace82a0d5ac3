# SPDX-License-Identifier: Apache-2.0
"""Which instance a request goes to: one file per policy, all pure, the clock passed in.

work.py the cost, pending.py what each instance has to do, index.py what it has cached, model.py how
long that takes, state.py all of these in one; registry.py the policies by name.
"""
