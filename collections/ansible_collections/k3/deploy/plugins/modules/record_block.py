#!/usr/bin/python
"""Documentation of k3.deploy.record_block; the work is done by the action plugin of the same name."""

from __future__ import annotations

DOCUMENTATION = r"""
module: record_block
short_description: Write a block's record into the run directory on the controller
description:
  - Writes C(blocks/NNN.json) and the logs of every rank, atomically. A block that broke goes to C(void/) with its reason.
options:
  run_dir:
    description: Run directory on the controller.
    type: path
    required: true
  block:
    description: The block's C(index), C(pair), C(arm) and C(slug).
    type: dict
    required: true
  bench:
    description: The harness' result.
    type: dict
  load_seconds:
    description: Seconds from the head's start until it was ready.
    type: float
  started:
    description: When the block began, in seconds since the epoch.
    type: float
  ready_at:
    description: When the head was ready.
    type: float
  ended:
    description: When the block ended.
    type: float
  ranks:
    description: By name, the rank's C(state) while the arm ran, the C(stop) result, and its C(health) C(before) and C(after).
    type: dict
    required: true
  health_bands:
    description: What is healthy, by what is measured; each a C(min), a C(max) or both.
    type: dict
  transport:
    description: What carried each RPC connection (the filter P(k3.deploy.transport_block#filter)).
    type: dict
  void:
    description: Why the block does not count.
    type: str
author: [the k3deploy project (@k3deploy)]
attributes:
  check_mode:
    support: full
    description: Does nothing in check mode.
"""

EXAMPLES = r"""
- name: Record the block
  k3.deploy.record_block:
    run_dir: "{{ k3_run_dir }}"
    block: "{{ block }}"
    ranks: {}
  run_once: true
"""

RETURN = r"""
path:
  description: The record's path.
  type: str
  returned: success
"""
